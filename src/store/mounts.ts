import { existsSync, readFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { realPath, statusOf } from '../paths.ts';

/** Whether a path is itself a mount point. False without /proc, which admin commands do not need. */
export function isMountPoint(path: string): boolean {
  return mounts().some(({ place }) => place === path);
}

/** Whether the file system that the path is on is mounted so that nothing on it may be executed, mount(8). */
export function isOnNoexec(path: string): boolean {
  const real = realPath(path);
  const above = mounts()
    .filter(({ place }) => place === '/' || real === place || real.startsWith(`${place}/`))
    .toSorted((one, other) => one.place.length - other.place.length);
  let mount = above[0];
  // What is not mounted on the one reached so far is hidden by it.
  for (const next of above) if (next.parent === mount?.id) mount = next;
  return mount?.options.split(',').includes('noexec') ?? false;
}

/**
 * The type of the file system, such as `nfs4`, on which the file is or is to be created, if other machines may have
 * mounted that too; undefined: not known to be one of those.
 */
export function networkFileSystemOf(path: string): string | undefined {
  const dev = statusOf(dirname(realPath(path)))?.dev;
  const type = mounts().find(({ device }) => device === dev)?.type;
  return type !== undefined && NETWORK_TYPES.test(type) ? type : undefined;
}

/**
 * Says that the file is on such a file system, and what to do; undefined: it is not. SQLite works there, but not from
 * two machines at once, as they do not share its -shm (sqlite.org/wal.html); and the lock of the service, see
 * `refuseOtherMachine`, reaches the others only over NFS with locks.
 */
export function networkProblem(path: string): { message: string; advice: string } | undefined {
  const type = networkFileSystemOf(path);
  if (type === undefined) return undefined;
  return {
    message: `the file is on a network file system (${type}): if another machine uses it too, which davit may not notice, it is damaged`,
    advice: 'keep it on a local disk, or see to it that only this machine uses it',
  };
}

/** A FUSE file system has the name of its program; a virtual machine or a container may get a folder by 9p or virtiofs. */
const NETWORK_TYPES =
  /^(?:nfs4?|cifs|smb3|9p|virtiofs|vboxsf|afs|ceph|coda|gfs2|ocfs2|lustre|beegfs|gpfs|fuse\.(?:sshfs|glusterfs|ceph|ceph-fuse|mfs|s3fs|rclone|gcsfuse|juicefs|davfs|curlftpfs))$/;

interface Mount {
  id: string;
  /** The `id` of the mount that it is mounted on. */
  parent: string;
  /** As in `Stats.dev`. */
  device: number;
  place: string;
  /** Of this mount, separated by commas. */
  options: string;
  type: string;
}

/** proc_pid_mountinfo(5). Empty without /proc. */
function mounts(): Mount[] {
  if (!existsSync(MOUNTS)) return [];
  const lines = readFileSync(MOUNTS, 'utf8').matchAll(
    /^(\S+) (\S+) (\d+):(\d+) \S+ (\S+) (\S+) .*?- (\S+) /gm,
  );
  return [...lines].map(([, id = '', parent = '', major, minor, place = '', options = '', type = '']) => ({
    id,
    parent,
    device: deviceNumber(Number(major), Number(minor)),
    place: unescaped(place),
    options,
    type,
  }));
}

const MOUNTS = '/proc/self/mountinfo';

/** makedev(3), for numbers below those that need its upper half. */
function deviceNumber(major: number, minor: number): number {
  return (minor & 0xff) + (major & 0xfff) * 0x100 + (minor & ~0xff) * 0x1000;
}

/** Spaces and the like are octal. */
function unescaped(text: string): string {
  return text.replace(/\\(\d{3})/g, (_, digits) => String.fromCharCode(Number.parseInt(digits, 8)));
}
