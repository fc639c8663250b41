import { readlinkSync, realpathSync, type Stats, statSync } from 'node:fs';
import { dirname, resolve } from 'node:path';
import type { Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';

/** The file that a path leads to, by whichever links, also when it is not there yet: one file has one lock. */
export function realPath(path: string): string {
  try {
    return realpathSync(path);
  } catch (error) {
    const target = codeOf(error) === 'ENOENT' ? linkTarget(path) : undefined;
    return target === undefined ? resolve(path) : realPath(resolve(realpathSync(dirname(path)), target));
  }
}

function linkTarget(path: string): string | undefined {
  try {
    return readlinkSync(path);
  } catch {
    return undefined;
  }
}

/** What is told to whoever would write then. */
export const MOVED =
  'the database, or its -wal or -shm, was moved, removed or replaced, or is out of reach: nothing is written until it ' +
  'is back in its place, or davit was started anew';

/** Where the files of an open database are, and which ones they are. May cross a thread. */
export type Whereabouts = readonly { file: string; dev: number | undefined; ino: number | undefined }[];

/** Of a file of SQLite's, opened and read, and what belongs to it. */
export function whereaboutsOf(path: string): Whereabouts {
  const real = realPath(path);
  return [path, `${real}-wal`, `${real}-shm`].map((file) => {
    const { dev, ino } = statusOf(file) ?? {};
    return { file, dev, ino };
  });
}

/**
 * Whether all are where they were. Others find by their names what they read and write, so what is written to one that
 * was moved, removed or replaced is lost, or damages the file (sqlite.org/howtocorrupt.html, section 2.4).
 */
export function areInPlace(whereabouts: Whereabouts): boolean {
  return whereabouts.every(({ file, dev, ino }) => {
    const now = statusOf(file);
    return now?.ino === ino && now?.dev === dev;
  });
}

/** A look takes 15 µs, a fifth of what a commit without a disk's share takes: under load some share one. */
const LOOK_COUNTS_FOR_MS = 10;

/** Tells from now on whether a database that is open is where it is now. */
export function watchPlace(path: string, { monotonicMs }: Pick<Effects, 'monotonicMs'>): () => boolean {
  const whereabouts = whereaboutsOf(path);
  let seenAtMs = monotonicMs();

  return () => {
    if (monotonicMs() - seenAtMs < LOOK_COUNTS_FOR_MS) return true;
    if (!areInPlace(whereabouts)) return false;
    seenAtMs = monotonicMs();
    return true;
  };
}

/** Undefined where there is none, and where no look gets to it: in a directory that was closed, for instance. */
export function statusOf(file: string): Stats | undefined {
  try {
    return statSync(file);
  } catch {
    return undefined;
  }
}
