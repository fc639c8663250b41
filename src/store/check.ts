import { assetText } from '../assets.ts';
import { type Timestamp, timestamp } from '../domain.ts';
import {
  connect,
  type Database,
  isOurs,
  newerFile,
  pragmaNumber,
  SCHEMA_VERSION,
  schemaVersionOf,
} from './database.ts';
import type { NewerFile } from './newer.ts';
import { openingProblem, sqliteCode } from './sqlite-errors.ts';

/** What a davit file contains, so that a user can tell one file from another. */
export interface FileFacts {
  schema_version: number;
  bytes: number;
  /** When the file was created; a copy has the time of its original. */
  created_at: Timestamp;
  /** The latest time in the rows of the file. */
  last_event_at: Timestamp;
  projects: number;
  keys: number;
  deployments: number;
  /** The next service on the file records these as interrupted. */
  running_deployments: number;
  /** The next service on the file starts these. Those of paused projects are not counted. */
  waiting_deployments: number;
  /** The next service on the file sends these. Those held for a disabled webhook are not counted. */
  pending_deliveries: number;
}

/** Why this davit cannot use a file. */
export type Unusable =
  | { kind: 'foreign' }
  | ({ kind: 'newer' } & NewerFile)
  | { kind: 'damaged'; problem: string };

export type FileCheck = { kind: 'good'; facts: FileFacts } | Unusable;

/**
 * Checks that the file is davit's, has this schema or an older one, and is undamaged: every page, index and reference.
 * Checkpoints and removes its WAL, so that it is a single file afterwards. Blocks the thread.
 */
export function checkDatabase(path: string): FileCheck {
  return withDatabase(path, (database): FileCheck => {
    const found = identify(database);
    if (found !== undefined) return found;
    database.pragma('journal_mode = DELETE');
    const problem = firstProblem(database);
    return problem === undefined ? { kind: 'good', facts: factsOf(database) } : { kind: 'damaged', problem };
  });
}

/** The first problem found in the file; undefined if it is undamaged. Reads the whole file. */
export function firstProblem(database: Database): string | undefined {
  const [damage] = integrityProblems(database, 1);
  return damage ?? completenessProblems(database, 1)[0] ?? foreignKeyProblems(database, 1)[0];
}

/** What is wrong with pages, indexes and constraints, in at most `limit` sentences. */
export function integrityProblems(database: Database, limit: number): string[] {
  const sentences = database.prepare<[], string>(`PRAGMA integrity_check(${limit})`).pluck().all();
  // A sentence about pages begins with a line that names the database, which is always `main`.
  return sentences
    .filter((sentence) => sentence !== 'ok')
    .map((sentence) => sentence.replace(/^\*\*\* in database main \*\*\*\n/, '').replaceAll('\n', '; '));
}

/**
 * What the file lacks, in at most `limit` sentences: the row of `instance` and, if the schema is this davit's, tables,
 * indexes and triggers. SQLite's own check finds nothing wrong with a file that lacks them.
 */
export function completenessProblems(database: Database, limit: number): string[] {
  const present = new Set(database.prepare<[], string>('SELECT name FROM sqlite_schema').pluck().all());
  const isKnown = schemaVersionOf(database) === SCHEMA_VERSION;
  const missing = Array.from(isKnown ? assetText('schema.sql').matchAll(CREATED) : [])
    .filter(([, , name = '']) => !present.has(name))
    .map(([, kind = '', name]) => `the ${kind.toLowerCase()} ${name} is missing`);
  if (missing.length > 0) return missing.slice(0, limit);
  const count = database.prepare<[], number>('SELECT count(*) FROM instance').pluck().get();
  return count === 1 ? [] : ['the row of the table instance is missing'];
}

const CREATED = /^CREATE (?:UNIQUE )?(TABLE|INDEX|TRIGGER) (\w+)/gm;

/** Rows that refer to missing rows, in at most `limit` sentences. */
export function foreignKeyProblems(database: Database, limit: number): string[] {
  const rows = database
    .prepare<[number], { table: string; parent: string; count: number }>(
      'SELECT "table", parent, count(*) AS count FROM pragma_foreign_key_check GROUP BY 1, 2 LIMIT ?',
    )
    .all(limit);
  return rows.map(({ table, parent, count }) => `${count} of ${table} refer to ${parent} that are not there`);
}

/**
 * The result of `action` on the opened file, or why the file is unusable. Throws errors that are not the file's fault.
 */
export function withDatabase<Result>(
  path: string,
  action: (database: Database) => Result,
): Result | Unusable {
  const database = connect(path);
  try {
    return action(database);
  } catch (error) {
    return whatIsWrong(error, path);
  } finally {
    database.close();
  }
}

/** Why the file at `path` is unusable, by an error of SQLite. Throws any other error, and errors of the disk. */
export function whatIsWrong(error: unknown, path: string): Unusable {
  const code = sqliteCode(error);
  if (code === 'SQLITE_NOTADB') return { kind: 'foreign' };
  // SQLITE_ERROR: a table is missing.
  if (error instanceof Error && code !== undefined && /^SQLITE_(CORRUPT|ERROR)/.test(code)) {
    return { kind: 'damaged', problem: error.message };
  }
  throw openingProblem(path, error);
}

/** Why this davit cannot use the file; undefined if it can, or could after a migration. Does not look for damage. */
export function identify(database: Database): Unusable | undefined {
  if (!isOurs(database)) return { kind: 'foreign' };
  return schemaVersionOf(database) > SCHEMA_VERSION ? { kind: 'newer', ...newerFile(database) } : undefined;
}

/** Its statements, and those of `newestMs`, must work with every schema: a test runs them on each. */
function factsOf(database: Database): FileFacts {
  const number = (sql: string) => Number(database.prepare<[], number>(sql).pluck().get());
  return {
    schema_version: schemaVersionOf(database),
    bytes: pragmaNumber(database, 'page_count') * pragmaNumber(database, 'page_size'),
    created_at: timestamp(number('SELECT created_at FROM instance')),
    last_event_at: timestamp(newestMs(database)),
    projects: number('SELECT count(*) FROM projects'),
    keys: number('SELECT count(*) FROM keys'),
    deployments: number('SELECT count(*) FROM deployments'),
    running_deployments: number(
      "SELECT count(*) FROM deployments WHERE status IN ('running', 'canceling') AND reported = 0",
    ),
    waiting_deployments: number(`
      SELECT count(*) FROM deployments d JOIN projects p ON p.id = d.project_id
       WHERE d.status = 'queued' AND d.reported = 0 AND p.status = 'active'`),
    pending_deliveries: number(`
      SELECT count(*) FROM deliveries d JOIN webhooks w ON w.id = d.webhook_id
       WHERE d.status = 'pending' AND w.status = 'enabled' AND w.deleted_at IS NULL`),
  };
}

/** The latest time in any row, milliseconds since 1970. */
export function newestMs(database: Database): number {
  const newest = database.prepare<[], number>(`
    SELECT max(at) FROM (
      SELECT max(created_at) AS at FROM instance
      UNION ALL SELECT max(created_at) FROM projects
      UNION ALL SELECT max(created_at) FROM keys
      UNION ALL SELECT max(last_used_at) FROM keys
      UNION ALL SELECT max(max(created_at, coalesce(started_at, 0), coalesce(finished_at, 0))) FROM deployments
      UNION ALL SELECT max(created_at) FROM events
      UNION ALL SELECT max(at) FROM attempts)`);
  return Number(newest.pluck().get());
}
