import { statfsSync } from 'node:fs';
import { dirname } from 'node:path';
import Sqlite from 'better-sqlite3';
import { AppError, codeOf, messageOf } from '../errors.ts';
import { realPath } from '../paths.ts';
import { networkFileSystemOf } from './mounts.ts';
import { writableBytes } from './place.ts';
import { unwritable } from './prepare-file.ts';

/* What errors of SQLite mean, and what is said of them. */

/**
 * Turns an error of SQLite into an AppError `conflict` where the path or the system is at fault; returns others as is.
 */
export function openingProblem(path: string, error: unknown): unknown {
  if (codeOf(error) === 'ERR_DLOPEN_FAILED') {
    return new AppError(
      'conflict',
      `SQLite cannot be loaded (${messageOf(error)}): davit needs glibc 2.34 and the libstdc++ of GCC 11, or newer ones, as ` +
        'Debian 12, Ubuntu 22.04 and RHEL 9 have them',
      { cause: error },
    );
  }
  const code = sqliteCode(error);
  const isFailing = code === 'SQLITE_FULL' || isFailureOfDisk(error);
  const shortage = isFailing || code === 'SQLITE_CANTOPEN' ? shortageBeside(path) : undefined;
  if (shortage !== undefined) {
    return new AppError('conflict', `cannot use ${path}: ${shortage}`, { cause: error });
  }
  if (code === 'SQLITE_CANTOPEN') {
    return new AppError(
      'conflict',
      `cannot open ${path}: check that it exists and that this user may write there`,
      {
        cause: error,
      },
    );
  }
  if (code === 'SQLITE_NOTADB') return notOurs(path);
  if (isLocked(error) || isFailureOfDisk(error)) {
    const type = networkFileSystemOf(path);
    if (type === undefined) return error;
    return new AppError(
      'conflict',
      `cannot use ${path} (${messageOf(error)}): it is on a network file system (${type}), which may lack the locks or ` +
        'the shared memory that SQLite needs: keep it on a local disk',
      { cause: error },
    );
  }
  if (code === 'SQLITE_READONLY_DBMOVED') {
    return new AppError('conflict', `${path} was replaced while it was opened: try again`, { cause: error });
  }
  if (code?.startsWith('SQLITE_READONLY') === true) return unwritable(path, error);
  return error;
}

/** SQLite creates two files beside the database, and its -shm has this much at least. */
const BESIDE_FILES = 2;
const BESIDE_BYTES = 32 * 1024;

/** Why SQLite cannot create its files beside the database, as far as statfs(2) tells. */
function shortageBeside(path: string): string | undefined {
  try {
    const stats = statfsSync(dirname(realPath(path)));
    if (stats.files > 0 && stats.ffree < BESIDE_FILES) {
      return 'its disk has no room for further files (inodes), however small: remove some that nobody needs';
    }
    return writableBytes(stats) < BESIDE_BYTES ? 'its disk is full: make room' : undefined;
  } catch {
    return undefined;
  }
}

/** The error for a file that another program made. */
export function notOurs(path: string): AppError {
  return new AppError('conflict', `${path} is not a davit file: choose another one with --db`);
}

/** `SQLITE_FULL`, `SQLITE_CONSTRAINT_UNIQUE` and so on; undefined for an error that is not SQLite's. */
export function sqliteCode(error: unknown): string | undefined {
  return error instanceof Sqlite.SqliteError ? error.code : undefined;
}

/** Whether SQLite found that the file is damaged, or not a database at all. */
export function isDamaged(error: unknown): boolean {
  const code = sqliteCode(error);
  return code === 'SQLITE_NOTADB' || code?.startsWith('SQLITE_CORRUPT') === true;
}

/** Whether another process keeps a lock on the file. */
export function isLocked(error: unknown): boolean {
  return sqliteCode(error)?.startsWith('SQLITE_BUSY') === true;
}

/** Whether the disk failed, or refused a write because of a quota. */
export function isFailureOfDisk(error: unknown): boolean {
  return sqliteCode(error)?.startsWith('SQLITE_IOERR') === true;
}
