import { closeSync, openSync, type StatsFs } from 'node:fs';
import { basename } from 'node:path';
import type { Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import { octal, realPath, statusOf } from '../paths.ts';
import { quoteForBash } from '../shell-words.ts';

/** What was committed and is not in the file yet. */
export function walPath(path: string): string {
  return `${realPath(path)}-wal`;
}

/** What every process that has the database open has in its memory, sqlite.org/walformat.html. */
export function sharedMemoryPath(path: string): string {
  return `${realPath(path)}-shm`;
}

/** The lock file of a database, which its service has open all the time. */
export function lockPath(path: string): string {
  return `${realPath(path)}-lock`;
}

/** Why nothing is written while a file of the database is not in its place. */
export const MOVED =
  'the database, or its -wal or -shm, was moved, removed or replaced, or is out of reach: nothing is written until it ' +
  'is back in its place, or, if only the -wal or -shm is gone, davit was restarted';

/** Why nothing is written once the -wal is shorter than what is in use of it, see `watchWal`. */
export const CUT_SHORT =
  'the -wal was cut short, and what only it had is lost: nothing is written until davit and whatever else has the file ' +
  'open was ended; started again, davit goes on with what is left';

/**
 * Which file a path led to when it was opened; undefined numbers: none. A plain value, which may be posted to a thread.
 */
export interface FileIdentity {
  path: string;
  dev: number | undefined;
  ino: number | undefined;
}

/** The database at `path` with its -wal and -shm. Once it is open and has been read, all three exist. */
export function identifyFiles(path: string): FileIdentity[] {
  return [path, walPath(path), sharedMemoryPath(path)].map((file) => {
    const { dev, ino } = statusOf(file) ?? {};
    return { path: file, dev, ino };
  });
}

/**
 * Whether each path still leads to the same file. Other processes open the files by their paths, so what is written to
 * one that was moved, removed or replaced is lost, or damages the database (sqlite.org/howtocorrupt.html, section 2.4).
 */
export function areInPlace(files: readonly FileIdentity[]): boolean {
  return files.every(({ path, dev, ino }) => {
    const now = statusOf(path);
    return now?.ino === ino && now?.dev === dev;
  });
}

/**
 * What `open` opens by the path of these files; undefined: they are not in their place. They are looked at before it,
 * too: once open, another file would look like the one that is served, to whoever asks what was moved.
 */
export function openInPlace<Opened extends { close(): void }>(
  files: readonly FileIdentity[],
  open: () => Opened,
): Opened | undefined {
  if (!areInPlace(files)) return undefined;
  const opened = open();
  if (areInPlace(files)) return opened;
  opened.close();
  return undefined;
}

/** A check takes 15 µs, a fifth of a commit without its fsync: under load several commits share one. */
const CHECK_COUNTS_FOR_MS = 10;

/** Returns a function that checks whether the files of an open database are still where they are now. */
export function watchPlace(path: string, { monotonicMs }: Pick<Effects, 'monotonicMs'>): () => boolean {
  const files = identifyFiles(path);
  let checkedAtMs = monotonicMs();

  return () => {
    if (monotonicMs() - checkedAtMs < CHECK_COUNTS_FOR_MS) return true;
    if (!areInPlace(files)) return false;
    checkedAtMs = monotonicMs();
    return true;
  };
}

/**
 * Says that others than its owner have access to a file, and what to do; undefined: they have none. `mode`: as in
 * `Stats`.
 */
export function exposureProblem(path: string, mode: number): { message: string; advice: string } | undefined {
  if ((mode & 0o077) === 0) return undefined;
  return {
    message: `others have access to ${basename(path)} (mode ${octal(mode)})`,
    advice: `chmod 600 ${quoteForBash(path)}`,
  };
}

/** How much this user can write to a file system, root also what is reserved. statfs(2) knows of no quota. */
export function writableBytes({ bavail, bfree, bsize }: StatsFs): number {
  return (process.geteuid?.() === 0 ? bfree : bavail) * bsize;
}

/**
 * Whether the file system of the database takes no writes. Tested by opening the lock file. access(2) does not notice
 * that the kernel has made a file system read-only after an error, and closing the database file itself would release
 * the locks that SQLite has on it, fcntl(2); so this is not for the process that serves the file.
 */
export function isOnReadOnlyFileSystem(path: string): boolean {
  try {
    closeSync(openSync(lockPath(path), 'r+'));
    return false;
  } catch (error) {
    return codeOf(error) === 'EROFS';
  }
}
