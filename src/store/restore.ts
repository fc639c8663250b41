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
  statSync,
  writeSync,
} from 'node:fs';
import { dirname } from 'node:path';
import type { DeploymentId } from '../domain.ts';
import { AppError, codeOf } from '../errors.ts';
import { connect, type Database, isDamaged, isOurs, notOurs, pragmaNumber, sqliteCode } from './database.ts';
import { beginExclusive } from './exclusive.ts';
import { giveName, giveToOwner, isLinkless, syncDirectory, syncFile } from './partial-file.ts';

/** What SQLite keeps beside a file and reads without asking whose it is. */
const SIDE_FILES = ['-wal', '-journal'] as const;

/**
 * Puts the file `replacement`, one that `checkDatabase` found good, where `path` is or was, in one step: at every
 * moment there is the old file or the new one there. The old one is kept at `asidePath`, with all that its WAL
 * held. No WAL of the old one is ever beside the new one, where SQLite would read it as that one's. The caller
 * holds `lockForServing`. Returns whether there was anything to keep. Throws AppError `conflict`, and nothing has
 * changed, while another process has the old one open. `path` is no link.
 */
export function replaceDatabase(path: string, replacement: string, asidePath: string): boolean {
  const before = statSync(path, { throwIfNoEntry: false });
  const release = before === undefined ? () => undefined : holdAlone(path);
  let letGo = () => {};
  try {
    syncFile(replacement);
    giveToOwner([replacement, `${path}-lock`], before ?? statSync(dirname(path)));
    const sides = SIDE_FILES.filter((side) => existsSync(path + side));
    if (before !== undefined) letGo = keepAs(path, asidePath);
    for (const side of sides) renameSync(path + side, asidePath + side);
    rmSync(`${path}-shm`, { force: true });
    // First that nothing is left beside it, then the new one: a power cut must not turn that around.
    syncDirectory(dirname(path));
    if (before === undefined) giveName(replacement, path);
    else renameSync(replacement, path);
    syncDirectory(dirname(path));
    return before !== undefined || sides.length > 0;
  } finally {
    letGo();
    release();
  }
}

/**
 * Gives a file another name; where none can have two, that to a copy. Returns what closes the copied one: not before
 * nobody has to be kept out any longer, as closing it lets go of what is locked, fcntl(2).
 */
function keepAs(path: string, asidePath: string): () => void {
  try {
    linkSync(path, asidePath);
    return () => undefined;
  } catch (error) {
    if (!isLinkless(error)) throw error;
  }
  const source = openSync(path, 'r');
  appendFrom(source, asidePath);
  syncFile(asidePath);
  return () => closeSync(source);
}

/** Copies a file that somebody kept, with a WAL that is beside it, into the empty file `to`. Blocks the thread. */
export function adoptFile(from: string, to: string): void {
  appendBytes(from, to);
  for (const side of SIDE_FILES) {
    if (existsSync(from + side)) appendBytes(from + side, to + side);
  }
}

/**
 * How many bytes that copies. Throws AppError `not_found` where there is no such file, or something else, and
 * `conflict` where this user may not read it.
 */
export function adoptedBytes(from: string): number {
  const stats = whereReadable(from, () => statSync(from, { throwIfNoEntry: false }));
  if (stats === undefined) throw new AppError('not_found', `there is no file ${from}`);
  if (!stats.isFile()) throw new AppError('not_found', `${from} is no file`);
  whereReadable(from, () => accessSync(from, constants.R_OK));
  return stats.size;
}

function whereReadable<Result>(path: string, look: () => Result): Result {
  try {
    return look();
  } catch (error) {
    throw new AppError(
      'conflict',
      `${path} cannot be read (${codeOf(error)}): give this user the right, or a copy of its own`,
      { cause: error },
    );
  }
}

/** The ids of what a file, of whichever schema, says is running; none of a file that cannot be read. */
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

/** Not `copyFileSync`: it gives the copy the mode of the original, in which others may be allowed to read. */
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
 * Takes the WAL into the file and keeps everybody else out until the returned function is called. Of a damaged
 * file nothing can be taken in: it is kept with its WAL.
 */
function holdAlone(path: string): () => void {
  const database = connect(path);
  try {
    refuseForeign(path, database);
    beginExclusive(database, path);
    return () => database.close();
  } catch (error) {
    database.close();
    if (isDamaged(error)) return () => undefined;
    throw error;
  }
}

/** Somebody else's database is as sound a file as ours: it was not meant. */
function refuseForeign(path: string, database: Database): void {
  if (pragmaNumber(database, 'page_count') > 0 && !isOurs(database)) throw notOurs(path);
}
