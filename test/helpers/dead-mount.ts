import { type SpawnSyncReturns, spawnSync } from 'node:child_process';

/** Mounts FUSE on the first argument, of which nobody answers: as an sshfs that lost its server, it gives ENOTCONN. */
const MOUNT = [
  'exec 3<>/dev/fuse',
  'mount -i -t fuse -o fd=3,rootmode=40000,user_id=0,group_id=0 none "$1"',
  'exec 3>&-',
  'shift',
  'exec "$@"',
].join(' && ');

/** Runs a program with a file system on `folder` that cannot be reached. */
export function onDeadMount(folder: string, words: readonly string[]): SpawnSyncReturns<string> {
  return spawnSync('unshare', ['-rm', 'sh', '-c', MOUNT, 'sh', folder, ...words], { encoding: 'utf8' });
}

export const ifMayMountFuse =
  onDeadMount('/mnt', ['true']).status === 0 ? {} : { skip: 'mounting FUSE is not allowed here' };
