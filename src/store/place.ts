import { type Stats, statSync } from 'node:fs';
import type { Effects } from '../effects.ts';
import { realPath } from './lock.ts';

/** What is told to whoever would write then. */
export const MOVED =
  'the database, or its -wal or -shm, was moved, removed or replaced: nothing is written until it is back in its ' +
  'place, or davit was started anew';

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
    before: statSync(file, { throwIfNoEntry: false }),
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
  const now = statSync(file, { throwIfNoEntry: false });
  return now?.ino === before?.ino && now?.dev === before?.dev;
}
