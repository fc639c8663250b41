import { assetText } from '../assets.ts';
import { type Timestamp, timestamp } from '../domain.ts';
import {
  connect,
  type Database,
  isOurs,
  newerFile,
  openingProblem,
  pragmaNumber,
  SCHEMA_VERSION,
  schemaVersionOf,
  sqliteCode,
} from './database.ts';
import type { NewerFile } from './newer.ts';

/** What is in a davit file, to tell one from another. */
export interface FileFacts {
  schema_version: number;
  bytes: number;
  /** The file's first day; a copy has that of the file that it was copied from. */
  created_at: Timestamp;
  /** The last that happened in it, as far as its rows tell. */
  last_event_at: Timestamp;
  projects: number;
  keys: number;
  deployments: number;
  /** The next service on the file records these as interrupted. */
  running_deployments: number;
  /** The next service on the file starts these; those of paused projects wait on. */
  waiting_deployments: number;
  /** It sends these; what is held for a disabled webhook is not among them. */
  pending_deliveries: number;
}

/** Why a file is of no use to this davit. */
export type Unusable =
  | { kind: 'foreign' }
  | ({ kind: 'newer' } & NewerFile)
  | { kind: 'damaged'; problem: string };

export type FileCheck = { kind: 'good'; facts: FileFacts } | Unusable;

/**
 * Whether the file is davit's, of this schema or an older one, and whole: every page, index and reference.
 * Takes a WAL beside it in, so that it is one file afterwards. Blocks the thread.
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

/** The first thing that SQLite finds wrong with it; undefined for a whole file. Reads all of it. */
export function firstProblem(database: Database): string | undefined {
  const [damage] = integrityProblems(database, 1);
  return damage ?? completenessProblems(database, 1)[0] ?? foreignKeyProblems(database, 1)[0];
}

/** What is wrong with pages, indexes and constraints, `limit` sentences at most. */
export function integrityProblems(database: Database, limit: number): string[] {
  const sentences = database.prepare<[], string>(`PRAGMA integrity_check(${limit})`).pluck().all();
  // A sentence about pages begins with a line that says in which file, of which there is one.
  return sentences
    .filter((sentence) => sentence !== 'ok')
    .map((sentence) => sentence.replace(/^\*\*\* in database main \*\*\*\n/, '').replaceAll('\n', '; '));
}

/**
 * What every file has and this one lacks, `limit` sentences at most: its one row of `instance` and, as far as this
 * davit knows its schema, tables, indexes and triggers. To SQLite it is whole without them.
 */
export function completenessProblems(database: Database, limit: number): string[] {
  const present = new Set(database.prepare<[], string>('SELECT name FROM sqlite_schema').pluck().all());
  const isKnown = schemaVersionOf(database) === SCHEMA_VERSION;
  const missing = Array.from(isKnown ? assetText('schema.sql').matchAll(CREATED) : [])
    .filter(([, , name = '']) => !present.has(name))
    .map(([, kind = '', name]) => `the ${kind.toLowerCase()} ${name} is missing`);
  if (missing.length > 0) return missing.slice(0, limit);
  const count = database.prepare<[], number>('SELECT count(*) FROM instance').pluck().get();
  return count === 1 ? [] : ['what belongs to the file as a whole is missing'];
}

const CREATED = /^CREATE (?:UNIQUE )?(TABLE|INDEX|TRIGGER) (\w+)/gm;

/** Rows that refer to rows that are not there, `limit` sentences at most. */
export function foreignKeyProblems(database: Database, limit: number): string[] {
  const rows = database
    .prepare<[number], { table: string; parent: string; count: number }>(
      'SELECT "table", parent, count(*) AS count FROM pragma_foreign_key_check GROUP BY 1, 2 LIMIT ?',
    )
    .all(limit);
  return rows.map(({ table, parent, count }) => `${count} of ${table} refer to ${parent} that are not there`);
}

/** What `action` finds in a file, or what is wrong with the file. Throws what is not the file's fault. */
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

/** What an error of SQLite says of the file at `path`. Throws any other error, and those of the disk. */
export function whatIsWrong(error: unknown, path: string): Unusable {
  const code = sqliteCode(error);
  if (code === 'SQLITE_NOTADB') return { kind: 'foreign' };
  // SQLITE_ERROR: a table that is not there.
  if (error instanceof Error && code !== undefined && /^SQLITE_(CORRUPT|ERROR)/.test(code)) {
    return { kind: 'damaged', problem: error.message };
  }
  throw openingProblem(path, error);
}

/** What keeps this davit from using it at all; undefined if nothing does, or it is only to be migrated. */
export function identify(database: Database): Unusable | undefined {
  if (!isOurs(database)) return { kind: 'foreign' };
  return schemaVersionOf(database) > SCHEMA_VERSION ? { kind: 'newer', ...newerFile(database) } : undefined;
}

/** Asked of files of every schema: a test does so with each. */
function factsOf(database: Database): FileFacts {
  const number = (sql: string) => Number(database.prepare<[], number>(sql).pluck().get());
  return {
    schema_version: schemaVersionOf(database),
    bytes: pragmaNumber(database, 'page_count') * pragmaNumber(database, 'page_size'),
    created_at: timestamp(number('SELECT created_at FROM instance')),
    last_event_at: timestamp(
      number(`
        SELECT max(at) FROM (
          SELECT max(created_at) AS at FROM instance
          UNION ALL SELECT max(created_at) FROM projects
          UNION ALL SELECT max(created_at) FROM keys
          UNION ALL SELECT max(last_used_at) FROM keys
          UNION ALL SELECT max(created_at) FROM events)`),
    ),
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
