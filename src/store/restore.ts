import {
  accessSync,
  closeSync,
  constants,
  existsSync,
  linkSync,
  openSync,
  readSync,
  renameSync,
  rmSync,
  type Stats,
  statSync,
  writeSync,
} from 'node:fs';
import { dirname } from 'node:path';
import type { DeploymentId } from '../domain.ts';
import { AppError, codeOf } from '../errors.ts';
import { connect, isOurs, pragmaNumber } from './database.ts';
import { beginExclusive } from './exclusive.ts';
import { giveName, giveToOwner, isLinkless, syncDirectory, syncFile } from './publish.ts';
import { isDamaged, notOurs, sqliteCode } from './sqlite-errors.ts';

/** SQLite reads these files with whatever database is beside them. */
const SIDE_FILES = ['-wal', '-journal'] as const;

/**
 * Replaces the database at `path`, if there is one, by the file `replacement`, which `checkDatabase` must have found
 * good. The rename is atomic: at any time there is either the old file or the new one. The old one is kept at
 * `asidePath`, with everything from its WAL; that is never beside the new file, where SQLite would read it. Returns
 * whether there was anything to keep. Throws AppError `conflict`, with nothing changed, while another process has the
 * old file open. The caller must hold `lockForServing`, and `path` must not be a symbolic link.
 */
export function replaceDatabase(path: string, replacement: string, asidePath: string): boolean {
  const before = statSync(path, { throwIfNoEntry: false });
  const release = before === undefined ? () => undefined : openExclusively(path);
  let closeOld = () => {};
  try {
    syncFile(replacement);
    giveToOwner([replacement, `${path}-lock`], before ?? statSync(dirname(path)));
    const sides = SIDE_FILES.filter((side) => existsSync(path + side));
    if (before !== undefined) closeOld = keepAs(path, asidePath);
    try {
      for (const side of sides) renameSync(path + side, asidePath + side);
      rmSync(`${path}-shm`, { force: true });
      // Makes the removal of the -wal durable before the new file appears, so that a power cut cannot combine the two.
      syncDirectory(dirname(path));
      if (before === undefined) giveName(replacement, path);
      else renameSync(replacement, path);
    } catch (error) {
      // Where there was no file, one may have appeared, beside which nothing of another may lie.
      if (before !== undefined) putBack(path, asidePath, sides, before);
      throw error;
    }
    syncDirectory(dirname(path));
    return before !== undefined || sides.length > 0;
  } finally {
    closeOld();
    release();
  }
}

/**
 * Keeps a file under another name: by a hard link, or as a copy where the file system has no hard links. Returns a
 * function that closes the copied file. It must not be called while the file's locks are needed, as closing releases
 * them, fcntl(2).
 */
function keepAs(path: string, asidePath: string): () => void {
  try {
    linkSync(path, asidePath);
    return () => undefined;
  } catch (error) {
    if (!isLinkless(error)) throw error;
  }
  const source = openSync(path, 'r');
  try {
    appendFrom(source, asidePath);
    syncFile(asidePath);
  } catch (error) {
    closeSync(source);
    rmSync(asidePath, { force: true });
    throw error;
  }
  return () => closeSync(source);
}

/**
 * Undoes what was done to keep the file, of which each try would otherwise leave another copy. Does nothing if the new
 * file has its name all the same, as a network file system may report a rename as failed that was done.
 */
function putBack(path: string, asidePath: string, sides: readonly string[], { dev, ino }: Stats): void {
  const now = statSync(path, { throwIfNoEntry: false });
  if (now?.ino !== ino || now.dev !== dev) return;
  for (const side of sides) {
    if (!existsSync(path + side)) renameSync(asidePath + side, path + side);
  }
  rmSync(asidePath, { force: true });
}

/** Copies a file, with a WAL or journal that is beside it, into the empty file `to`. Blocks the thread. */
export function adoptFile(from: string, to: string): void {
  appendBytes(from, to);
  for (const side of SIDE_FILES) {
    if (existsSync(from + side)) appendBytes(from + side, to + side);
  }
}

/**
 * The size of a file for `adoptFile`, without what is beside it. Throws AppError `not_found` if it does not exist or is
 * not a regular file, and `conflict` if this user may not read it.
 */
export function adoptedBytes(from: string): number {
  const stats = whereReadable(from, () => statSync(from, { throwIfNoEntry: false }));
  if (stats === undefined) throw new AppError('not_found', `there is no file ${from}`);
  if (!stats.isFile()) throw new AppError('not_found', `${from} is not a regular file`);
  whereReadable(from, () => accessSync(from, constants.R_OK));
  return stats.size;
}

function whereReadable<Result>(path: string, action: () => Result): Result {
  try {
    return action();
  } catch (error) {
    throw new AppError(
      'conflict',
      `${path} cannot be read (${codeOf(error)}): give this user the right, or a copy of its own`,
      { cause: error },
    );
  }
}

/** The ids of the running deployments in a file of any schema; empty if it cannot be read. */
export function runningIn(path: string): DeploymentId[] {
  if (!existsSync(path)) return [];
  const database = connect(path);
  try {
    return database
      .prepare<[], DeploymentId>(
        "SELECT id FROM deployments WHERE status IN ('running', 'canceling') AND reported = 0",
      )
      .pluck()
      .all();
  } catch (error) {
    if (sqliteCode(error) === undefined) throw error;
    return [];
  } finally {
    database.close();
  }
}

const PIECE_BYTES = 1024 * 1024;

/** Not by `copyFileSync`, which copies the original's mode: it may let other users read. */
function appendBytes(from: string, to: string): void {
  const source = openSync(from, 'r');
  try {
    appendFrom(source, to);
  } finally {
    closeSync(source);
  }
}

function appendFrom(source: number, to: string): void {
  const target = openSync(to, 'a', 0o600);
  try {
    const piece = Buffer.alloc(PIECE_BYTES);
    for (let length = readSync(source, piece); length > 0; length = readSync(source, piece)) {
      for (let written = 0; written < length; )
        written += writeSync(target, piece, written, length - written);
    }
  } finally {
    closeSync(target);
  }
}

/**
 * Checkpoints the WAL and excludes all other processes until the returned function is called. Does nothing with a
 * damaged file, which is kept with its WAL.
 */
function openExclusively(path: string): () => void {
  const database = connect(path);
  try {
    // A sound database of another program cannot be what the user meant to replace.
    if (pragmaNumber(database, 'page_count') > 0 && !isOurs(database)) throw notOurs(path);
    beginExclusive(database, path);
    return () => database.close();
  } catch (error) {
    database.close();
    if (isDamaged(error)) return () => undefined;
    throw error;
  }
}
