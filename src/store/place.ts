import { type Stats, statSync } from 'node:fs';
import type { Effects } from '../effects.ts';
import { realPath } from './lock.ts';

/** What is told to whoever would write then. */
export const MOVED =
  'the database, or its -wal or -shm, was moved, removed or replaced, or is out of reach: nothing is written until it ' +
  'is back in its place, or davit was started anew';

/** A look takes 15 µs, a fifth of what a commit without a disk's share takes: under load some share one. */
const LOOK_COUNTS_FOR_MS = 10;

/**
 * Tells from now on whether a file of SQLite's, opened and read, and what belongs to it are where they are now. Others
 * find by their names what they read and write, so what is written to one that was moved, removed or replaced is lost,
 * or damages the file (sqlite.org/howtocorrupt.html, section 2.4).
 */
export function watchPlace(path: string, { monotonicMs }: Pick<Effects, 'monotonicMs'>): () => boolean {
  const real = realPath(path);
  const files = [path, `${real}-wal`, `${real}-shm`].map((file) => ({
    file,
    before: statusOf(file),
  }));
  let seenAtMs = monotonicMs();

  return () => {
    if (monotonicMs() - seenAtMs < LOOK_COUNTS_FOR_MS) return true;
    if (!files.every(isInPlace)) return false;
    seenAtMs = monotonicMs();
    return true;
  };
}

function isInPlace({ file, before }: { file: string; before: Stats | undefined }): boolean {
  const now = statusOf(file);
  return now?.ino === before?.ino && now?.dev === before?.dev;
}

/** Undefined too where no look gets to it: in a directory that was closed, on a network that is gone. */
function statusOf(file: string): Stats | undefined {
  try {
    return statSync(file);
  } catch {
    return undefined;
  }
}
