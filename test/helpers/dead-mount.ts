import { type SpawnSyncReturns, spawnSync } from 'node:child_process';

/** Mounts FUSE on the first argument. Whoever has descriptor 3 would have to answer. */
const MOUNT = [
  'exec 3<>/dev/fuse',
  'mount -i -t fuse -o fd=3,rootmode=40000,user_id=0,group_id=0 none "$1"',
  'shift',
];

/** Runs a program with a file system on `folder` that cannot be reached: as an sshfs without a server, it gives ENOTCONN. */
export function onDeadMount(folder: string, words: readonly string[]): SpawnSyncReturns<string> {
  return onMount(folder, ['exec 3>&-', 'exec "$@"'], words);
}

/** Runs a program with a file system on `folder` that never answers. If the program waits for it, it is killed. */
export function onHangingMount(folder: string, words: readonly string[]): SpawnSyncReturns<string> {
  return onMount(folder, ['exec "$@"'], words);
}

function onMount(folder: string, then: string[], words: readonly string[]): SpawnSyncReturns<string> {
  const script = [...MOUNT, ...then].join(' && ');
  return spawnSync('unshare', ['-rm', 'sh', '-c', script, 'sh', folder, ...words], {
    encoding: 'utf8',
    timeout: 30_000,
    killSignal: 'SIGKILL',
  });
}

export const ifMayMountFuse =
  onDeadMount('/mnt', ['true']).status === 0 ? {} : { skip: 'mounting FUSE is not allowed here' };
