import { AppError } from '../errors.ts';
import { type Database, sqliteCode } from './database.ts';

/**
 * Takes the WAL into the file and begins a transaction that keeps everybody else out, readers too, until it or the
 * connection ends; from then on the file needs no WAL beside it. Throws AppError `conflict`, and nothing has changed,
 * while anybody else has it open.
 */
export function beginAlone(database: Database, path: string): void {
  try {
    // Not by locking_mode: under it SQLite would keep a journal beside the file.
    do {
      if (database.inTransaction) database.exec('ROLLBACK');
      // Refused as long as anybody else has the file open in WAL mode, even if only to read now and then.
      database.pragma('journal_mode = DELETE');
      database.exec('BEGIN EXCLUSIVE');
      // Whoever opened it between the two has made it a WAL file again, of which this transaction shuts out no reader.
    } while (database.pragma('journal_mode', { simple: true }) !== 'delete');
  } catch (error) {
    if (sqliteCode(error)?.startsWith('SQLITE_BUSY') !== true) throw error;
    throw new AppError(
      'conflict',
      `another process has ${path} open, a davit admin command or a backup as a rule: try again when it has ended`,
      { cause: error },
    );
  }
}
