import { statSync } from 'node:fs';
import { AppError } from '../errors.ts';
import { connect, type Database } from './database.ts';
import { openerOf } from './file-locks.ts';
import { isLocked, openingProblem } from './sqlite-errors.ts';

/**
 * Checkpoints the WAL, leaves WAL mode, and begins an exclusive transaction: until it or the connection ends, nobody
 * else can read or write the file, and all of its content is in the one file. Throws AppError `conflict`, with nothing
 * changed, while anybody else has the file open.
 */
export function beginExclusive(database: Database, path: string): void {
  try {
    // Not by PRAGMA locking_mode, with which SQLite would leave a journal beside the file.
    do {
      if (database.inTransaction) database.exec('ROLLBACK');
      // SQLITE_BUSY as long as anybody else has the file open in WAL mode, even without a transaction.
      database.pragma('journal_mode = DELETE');
      database.exec('BEGIN EXCLUSIVE');
      // A process that opened the file in between has switched it back to WAL, in which this transaction admits readers.
    } while (database.pragma('journal_mode', { simple: true }) !== 'delete');
  } catch (error) {
    if (!isLocked(error)) throw error;
    throw new AppError(
      'conflict',
      `${openerOf(statSync(path))} has ${path} open, perhaps a davit admin command, a backup or Litestream: try again when ` +
        'it has ended',
      { cause: error },
    );
  }
}

/** Throws as `beginExclusive` does, before a long work that would end there. Returns what `lastWriteOf` does. */
export function refuseWhileOpen(path: string): string {
  const database = connect(path);
  try {
    beginExclusive(database, path);
    return lastWriteOf(path);
  } catch (error) {
    throw openingProblem(path, error);
  } finally {
    database.close();
  }
}

/**
 * Differs once another process has written to the file, as far as the resolution of the file system's clock can tell. For
 * a file that is not in WAL mode, as `beginExclusive` leaves it; whoever writes in WAL mode first writes so in the file.
 */
export function lastWriteOf(path: string): string {
  const { ino, size, mtimeNs } = statSync(path, { bigint: true });
  return `${ino}-${size}-${mtimeNs}`;
}
