import { existsSync, statSync } from 'node:fs';
import Sqlite from 'better-sqlite3';
import { assetText, version as davitVersion, nativeAddonPath } from '../assets.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { bindByPosition } from './named-parameters.ts';
import { type NewerFile, newer } from './newer.ts';
import { createPrivately, refuseUnwritable } from './prepare-file.ts';
import { notOurs, openingProblem, sqliteCode } from './sqlite-errors.ts';

/*
 * All statements compare parameters as `+:name`, not `:name`. This SQLite, built with STAT4, prepares a statement again
 * whenever a bound parameter may influence its plan, as it may where a table has a partial index: finding a key took
 * 18 µs instead of 2, and claiming and ending a deployment 170 instead of 97. An expression such as `+:name` influences
 * no plan.
 */

export type Database = Sqlite.Database;
export type Statement<Parameters extends unknown[] | object, Row = unknown> = Sqlite.Statement<
  Parameters extends unknown[] ? Parameters : [Parameters],
  Row
>;

/** Both are in schema.sql too; a test checks that they agree. */
export const APPLICATION_ID = 1684108916;
export const SCHEMA_VERSION = 4;

/**
 * The page cache of a connection: a quarter of the default. The kernel's page cache holds the same pages, and SQLite looks
 * through all of its own at each commit that has split a page of an index, most of a writer's: 127 µs for 16 MB.
 */
const PAGE_CACHE_KIB = 4_000;

/** How long a writer waits for the transaction of another process, most often an admin command. */
export const BUSY_TIMEOUT_MS = 5_000;

/**
 * Opens the file for reading and writing; creates it (mode 0600) with its tables on first use. Throws AppError
 * `conflict` for a file that is not davit's or has another schema (migrations.ts migrates an older one), and where only
 * the WAL of a file is left.
 */
export function openForWriting(path: string, effects: Effects): Database {
  if (!existsSync(path)) connect(':memory:').close(); // no file is created where SQLite cannot be loaded
  createPrivately(path);
  refuseUnwritable(path);
  const database = connect(path);
  try {
    // better-sqlite3 defaults to NORMAL under WAL, which may lose acknowledged commits on power loss.
    database.pragma('synchronous = FULL');
    database.pragma('foreign_keys = ON');
    // Before switching to WAL, so that another program's file is left unchanged.
    prepareSchema(database, path, effects);
    database.pragma('journal_mode = WAL');
    database.pragma(`cache_size = -${PAGE_CACHE_KIB}`);
    return database;
  } catch (error) {
    database.close();
    throw openingProblem(path, error);
  }
}

/**
 * Whether the file exists and an older davit wrote it. Throws AppError `conflict` for one that is not davit's, that a
 * newer davit wrote, or that is read-only.
 */
export function isOlder(path: string): boolean {
  if (!existsSync(path)) return false;
  refuseUnwritable(path);
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

/** Opens the file for reading only. It must exist: the writer opens it first. */
export function openForReading(path: string): Database {
  const database = connect(path, { readonly: true });
  database.pragma('query_only = ON');
  database.pragma(`cache_size = -${PAGE_CACHE_KIB}`);
  return database;
}

/** Runs `read` in one transaction, so that all of its statements see the same snapshot. */
export function inSnapshot<Result>(database: Database, read: () => Result): Result {
  return database.transaction(read).deferred();
}

/**
 * A connection with the settings common to all, to a file that is there. Throws what `openingProblem` makes of an error.
 */
export function connect(path: string, { readonly = false, timeoutMs = BUSY_TIMEOUT_MS } = {}): Database {
  const nativeBinding = nativeAddonPath('better_sqlite3');
  try {
    const database = new Sqlite(path, {
      readonly,
      // SQLite would make one that was just moved anew, for others to read as well, and delete the -wal beside it.
      fileMustExist: true,
      timeout: timeoutMs,
      ...(nativeBinding === undefined ? {} : { nativeBinding }),
    });
    database.pragma('trusted_schema = OFF');
    bindByPosition(database);
    return database;
  } catch (error) {
    throw openingProblem(path, error);
  }
}

/**
 * Copies as much of the WAL into the file as possible without waiting: what readers still use is copied the next time.
 * Errors of the disk are ignored, as the WAL still has everything; if they concern writes, the next commit reports
 * them. Returns whether there was none.
 */
export function checkpoint(database: Database): boolean {
  try {
    database.pragma('wal_checkpoint(PASSIVE)');
    return true;
  } catch (error) {
    if (sqliteCode(error) === undefined) throw error;
    return false;
  }
}

function prepareSchema(database: Database, path: string, effects: Effects): void {
  // The usual case needs no write transaction, and so does not wait for another process.
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

/**
 * How the file's schema relates to this davit's. Throws AppError `conflict` for a file that is not davit's, or newer.
 */
export function kindOf(database: Database, path: string): 'new' | 'older' | 'current' {
  if (isNew(database, path)) return 'new';
  if (!isOurs(database)) throw notOurs(path);
  const schemaVersion = schemaVersionOf(database);
  if (schemaVersion > SCHEMA_VERSION) throw newer(path, newerFile(database));
  return schemaVersion < SCHEMA_VERSION ? 'older' : 'current';
}

/** The schema version of the file, its `user_version`. */
export function schemaVersionOf(database: Database): number {
  return pragmaNumber(database, 'user_version');
}

/** The value of a pragma that is one number, such as `page_count`. */
export function pragmaNumber(database: Database, name: string): number {
  return Number(database.pragma(name, { simple: true }));
}

/** Which schema and which davit a newer file has. */
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

/** Null if the file does not say: every known schema has the column, but a newer one may not. */
function writtenBy(database: Database): string | null {
  try {
    const text = database.prepare<[], unknown>('SELECT davit_version FROM instance').pluck().get();
    return typeof text === 'string' && /^[\w.+-]{1,40}$/.test(text) ? text : null;
  } catch {
    return null;
  }
}

/** Whether any version of davit made the file. */
export function isOurs(database: Database): boolean {
  return pragmaNumber(database, 'application_id') === APPLICATION_ID;
}

/** Whether the file is empty and no program has marked it as its own. */
function isNew(database: Database, path: string): boolean {
  const isMarked = pragmaNumber(database, 'application_id') !== 0 || schemaVersionOf(database) !== 0;
  return !isMarked && isEmpty(database, path);
}

function isEmpty(database: Database, path: string): boolean {
  // SQLite reports no pages for a file of one byte, too.
  if (pragmaNumber(database, 'page_count') === 0) return statSync(path).size === 0;
  return database.prepare('SELECT count(*) FROM sqlite_schema').pluck().get() === 0;
}

/**
 * Lets retention return unused pages to the file system in steps, see retention.ts. SQLite accepts the setting only for
 * an empty file; copies by VACUUM INTO keep it. It costs one pointer-map page in 800, which could not be measured:
 * 5,810 creations a second with it, 5,790 without.
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
