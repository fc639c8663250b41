import { accessSync, closeSync, constants, existsSync, openSync, statSync } from 'node:fs';
import Sqlite from 'better-sqlite3';
import { assetText, version as davitVersion, nativeAddonPath } from '../assets.ts';
import type { Effects } from '../effects.ts';
import { AppError, codeOf, messageOf } from '../errors.ts';
import { type NewerFile, newer } from './newer.ts';
import { realPath, statusOf } from './place.ts';

/*
 * In all statements parameters are compared as `+:name`, not `:name`. SQLite, built with STAT4, plans a statement anew
 * whenever a parameter is bound that its plan may depend on, as it may where a table has a partial index: 18 µs to find
 * a key in place of 2, 170 to claim a deployment and end it in place of 97. On an expression no plan depends.
 */

export type Database = Sqlite.Database;
export type Statement<Parameters extends unknown[] | object, Row = unknown> = Sqlite.Statement<
  Parameters extends unknown[] ? Parameters : [Parameters],
  Row
>;

/** Both stand in schema.sql too, and a test holds them together. */
export const APPLICATION_ID = 1684108916;
export const SCHEMA_VERSION = 2;

/** What a reader keeps of the file, in KiB: a quarter of the usual, as the system's own cache has it too. */
const READER_CACHE_KIB = 4_000;

/** How long a writer waits for another process, an admin command as a rule, to finish its transaction. */
export const BUSY_TIMEOUT_MS = 5_000;

/**
 * The connection that may write; makes the file (mode 0600) and its tables on first use.
 * Throws AppError `conflict` for a file that is not davit's, or of another schema: migrations.ts mends an older one; and
 * where only the WAL of a file is left.
 */
export function openForWriting(path: string, effects: Effects): Database {
  if (!existsSync(path)) connect(':memory:').close(); // first: where SQLite cannot be loaded no file is made
  createPrivately(path);
  refuseUnwritable(path);
  const database = connect(path);
  try {
    // better-sqlite3 defaults to NORMAL under WAL, which may lose acknowledged commits on power loss.
    database.pragma('synchronous = FULL');
    database.pragma('foreign_keys = ON');
    // Before WAL: a file that is somebody else's stays as it was.
    prepareSchema(database, path, effects);
    database.pragma('journal_mode = WAL');
    return database;
  } catch (error) {
    database.close();
    throw openingProblem(path, error);
  }
}

/**
 * Whether there is a file of an older davit. Throws AppError `conflict` for one that is not davit's, or of a newer
 * davit.
 */
export function isOlder(path: string): boolean {
  if (!existsSync(path)) return false;
  const database = connect(path);
  try {
    database.pragma('query_only = ON');
    return kindOf(database, path) === 'older';
  } catch (error) {
    throw openingProblem(path, error);
  } finally {
    database.close();
  }
}

/** A connection that cannot write. The file must exist: whoever reads opens after whoever writes. */
export function openForReading(path: string): Database {
  const database = connect(path, { readonly: true });
  database.pragma('query_only = ON');
  database.pragma(`cache_size = -${READER_CACHE_KIB}`);
  return database;
}

/** Runs `read` in one snapshot, so that several statements see the same moment. */
export function inSnapshot<Result>(database: Database, read: () => Result): Result {
  return database.inTransaction ? read() : database.transaction(read).deferred();
}

/** A connection with the settings that all share. Throws AppError `conflict` where the place is at fault. */
export function connect(path: string, { readonly = false, timeoutMs = BUSY_TIMEOUT_MS } = {}): Database {
  const nativeBinding = nativeAddonPath('better_sqlite3');
  try {
    const database = new Sqlite(path, {
      readonly,
      timeout: timeoutMs,
      ...(nativeBinding === undefined ? {} : { nativeBinding }),
    });
    database.pragma('trusted_schema = OFF');
    return database;
  } catch (error) {
    throw openingProblem(path, error);
  }
}

/**
 * Copies what it can of the WAL into the file, waiting for nobody: what readers still hold is copied the next time.
 * So is what a disk does not take, as everything is safe in the WAL; what that means for writes is said there.
 */
export function checkpoint(database: Database): void {
  try {
    database.pragma('wal_checkpoint(PASSIVE)');
  } catch (error) {
    if (sqliteCode(error) === undefined) throw error;
  }
}

/** An error of SQLite as an AppError `conflict` where the place or the system is at fault; any other error as it is. */
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
  if (code === 'SQLITE_READONLY_DBMOVED') {
    return new AppError('conflict', `${path} was replaced at this very moment: try again`, { cause: error });
  }
  if (code?.startsWith('SQLITE_READONLY') === true) return unwritable(path, error);
  return error;
}

/** SQLite would make the file with the umask's mode; secrets deserve better. */
function createPrivately(path: string): void {
  if (existsSync(path)) return;
  refuseLoneWal(path);
  try {
    // Made where a link leads, too, and left as it is if another davit was quicker.
    closeSync(openSync(path, 'a', 0o600));
  } catch (error) {
    const code = codeOf(error);
    const reason = code === 'ENOENT' ? 'its directory is not there' : code;
    throw new AppError('conflict', `cannot create ${path} (${reason}): choose another place with --db`, {
      cause: error,
    });
  }
}

/** SQLite would open it all the same, and give what it makes beside it the same mode: nothing could be written later either. */
function refuseUnwritable(path: string): void {
  for (const file of [path, `${realPath(path)}-wal`, `${realPath(path)}-shm`]) {
    try {
      // Not by opening it: to close it again would give up the locks that this process has on it (fcntl(2)).
      accessSync(file, constants.W_OK);
    } catch (error) {
      if (codeOf(error) === 'EACCES') throw unwritable(file, error);
    }
  }
}

function unwritable(file: string, cause: unknown): AppError {
  return new AppError(
    'conflict',
    `cannot write to ${file}: check that this user may write to it and its directory`,
    { cause },
  );
}

/** Beside a file that is empty SQLite removes it, with all that is in nothing but it. */
function refuseLoneWal(path: string): void {
  const wal = `${realPath(path)}-wal`;
  if ((statusOf(wal)?.size ?? 0) === 0) return;
  throw new AppError(
    'conflict',
    `${path} is not there, but ${wal} is, which holds a part of it: move it back, or remove that too`,
  );
}

function prepareSchema(database: Database, path: string, effects: Effects): void {
  // As a rule it is ours and of this version, and then nobody's writing is waited for.
  if (kindOf(database, path) === 'current') return;
  letShrink(database);
  database
    .transaction(() => {
      const kind = kindOf(database, path);
      if (kind === 'new') createSchema(database, effects);
      if (kind === 'older') throw older(path, schemaVersionOf(database));
    })
    .immediate();
}

/** What a file is to this davit. Throws AppError `conflict` for one that is not davit's, or of a newer davit. */
export function kindOf(database: Database, path: string): 'new' | 'older' | 'current' {
  if (isNew(database, path)) return 'new';
  if (!isOurs(database)) throw notOurs(path);
  const schemaVersion = schemaVersionOf(database);
  if (schemaVersion > SCHEMA_VERSION) throw newer(path, newerFile(database));
  return schemaVersion < SCHEMA_VERSION ? 'older' : 'current';
}

/** `user_version`. */
export function schemaVersionOf(database: Database): number {
  return pragmaNumber(database, 'user_version');
}

/** What a pragma says of the file that is one number, as `page_count` does. */
export function pragmaNumber(database: Database, name: string): number {
  return Number(database.pragma(name, { simple: true }));
}

/** What a file of a newer davit tells of it. */
export function newerFile(database: Database): NewerFile {
  return { schemaVersion: schemaVersionOf(database), davitVersion: writtenBy(database) };
}

function older(path: string, schemaVersion: number): AppError {
  return new AppError(
    'conflict',
    `an older davit wrote ${path} (schema ${schemaVersion}, this one needs ${SCHEMA_VERSION}): stop that one if it ` +
      "runs; then 'davit serve' migrates the file, or 'davit admin migrate' without starting anything",
  );
}

/** Every schema has this column; still, what a newer one has nobody knows. */
function writtenBy(database: Database): string | null {
  try {
    const text = database.prepare<[], unknown>('SELECT davit_version FROM instance').pluck().get();
    return typeof text === 'string' && /^[\w.+-]{1,40}$/.test(text) ? text : null;
  } catch {
    return null;
  }
}

/** Whether davit made the file, of whichever version. */
export function isOurs(database: Database): boolean {
  return pragmaNumber(database, 'application_id') === APPLICATION_ID;
}

/** That no program has marked, and that has nothing in it. */
function isNew(database: Database, path: string): boolean {
  const isMarked = pragmaNumber(database, 'application_id') !== 0 || schemaVersionOf(database) !== 0;
  return !isMarked && isEmpty(database, path);
}

function isEmpty(database: Database, path: string): boolean {
  // SQLite takes a file of a single byte for one of none.
  if (pragmaNumber(database, 'page_count') === 0) return statSync(path).size === 0;
  return database.prepare('SELECT count(*) FROM sqlite_schema').pluck().get() === 0;
}

/**
 * What retention removes can be given back to the file system, in steps: see retention.ts. SQLite takes this only for
 * a file that is empty; copies by VACUUM INTO keep it. Its price, a page in 800 that tells who refers to the others,
 * was not to be seen: 5,810 creations a second with it, 5,790 without.
 */
function letShrink(database: Database): void {
  if (pragmaNumber(database, 'page_count') === 0) database.pragma('auto_vacuum = INCREMENTAL');
}

function createSchema(database: Database, effects: Effects): void {
  database.exec(assetText('schema.sql'));
  database
    .prepare('INSERT INTO instance (only_row, created_at, cursor_secret, davit_version) VALUES (1, ?, ?, ?)')
    .run(effects.now(), effects.randomBytes(32), davitVersion);
}

/** For a file that another program made. */
export function notOurs(path: string): AppError {
  return new AppError('conflict', `${path} is not a davit file: choose another one with --db`);
}

/** `SQLITE_FULL`, `SQLITE_CONSTRAINT_UNIQUE` and so on; undefined for what SQLite did not throw. */
export function sqliteCode(error: unknown): string | undefined {
  return error instanceof Sqlite.SqliteError ? error.code : undefined;
}

/** Whether SQLite said that a file is none of its own, or not whole any more. */
export function isDamaged(error: unknown): boolean {
  const code = sqliteCode(error);
  return code === 'SQLITE_NOTADB' || code?.startsWith('SQLITE_CORRUPT') === true;
}

/** Whether SQLite said that the disk failed, or took no more for a quota. */
export function isFailureOfDisk(error: unknown): boolean {
  return sqliteCode(error)?.startsWith('SQLITE_IOERR') === true;
}
