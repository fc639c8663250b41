import Sqlite from 'better-sqlite3';
import { dumpOf } from './store.ts';

/** Runs these statements on a file, new or not. Foreign keys are not checked, and its schema can be corrupted. */
export function changeFile(path: string, sql: string): void {
  const database = new Sqlite(path);
  try {
    database.unsafeMode();
    database.pragma('foreign_keys = OFF');
    database.exec(sql);
  } finally {
    database.close();
  }
}

/** Every row of every table of a file. */
export function dumpFile(path: string): Record<string, unknown[]> {
  const database = new Sqlite(path, { fileMustExist: true });
  try {
    return dumpOf(database);
  } finally {
    database.close();
  }
}
