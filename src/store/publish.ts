import {
  closeSync,
  existsSync,
  fsyncSync,
  lchownSync,
  linkSync,
  openSync,
  renameSync,
  rmSync,
  type Stats,
} from 'node:fs';
import { AppError, codeOf } from '../errors.ts';

/** Makes links, renames and removals in a directory durable, on file systems that can do so. */
export function syncDirectory(path: string): void {
  try {
    syncFile(path, 'r');
  } catch (error) {
    // fsync(2) of one that does not support it, as on some network file systems: all else has been done.
    if (codeOf(error) !== 'EINVAL') throw error;
  }
}

/** Makes all that was written to a file durable. */
export function syncFile(path: string, flags = 'r+'): void {
  const descriptor = openSync(path, flags);
  try {
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
}

/**
 * Renames a file. Throws AppError `conflict` if the name is taken: by link(2), which fails then, as Node has no rename
 * that does.
 */
export function giveName(path: string, finalPath: string): void {
  try {
    linkSync(path, finalPath);
    rmSync(path);
  } catch (error) {
    if (codeOf(error) === 'EEXIST' || existsSync(finalPath)) throw nameTaken(finalPath, error);
    // Without links, the check just above is all that protects another file of that name.
    if (!isLinkless(error)) throw error;
    renameSync(path, finalPath);
  }
}

/** Whether a link failed because the file system has no hard links, as those of USB sticks and some networks. */
export function isLinkless(error: unknown): boolean {
  return ['EPERM', 'ENOTSUP', 'ENOSYS', 'EOPNOTSUPP'].includes(codeOf(error));
}

/** A name that another file has. */
export function nameTaken(path: string, cause?: unknown): AppError {
  return new AppError('conflict', `${path} is there already: choose another name, nothing is overwritten`, {
    cause,
  });
}

/** Gives files that root created to the owner of the database, so that the service can use them. */
export function giveToOwner(paths: string[], { uid, gid }: Stats): void {
  if (process.getuid?.() !== 0) return;
  // Symbolic links are not followed, with which the owner of the directory could have root give away any file.
  for (const path of paths) lchownSync(path, uid, gid);
}
