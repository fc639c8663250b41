import type { Effects } from '../effects.ts';
import { statusOf } from '../paths.ts';
import {
  completenessProblems,
  firstProblem,
  foreignKeyProblems,
  identify,
  integrityProblems,
  newestMs,
  type Unusable,
  whatIsWrong,
} from './check.ts';
import {
  BUSY_TIMEOUT_MS,
  connect,
  type Database,
  pragmaNumber,
  SCHEMA_VERSION,
  schemaVersionOf,
} from './database.ts';
import { lockersOf } from './file-locks.ts';
import { refuseOtherMachine } from './holder.ts';
import { isLocked, sqliteCode } from './sqlite-errors.ts';
import { type Reads, readsOn } from './store.ts';
import { walUseOf, watchWal } from './wal.ts';

/** A file that was opened for examination. Nothing can be written to it. */
export interface ExaminedFile {
  reads: Reads;
  examination: Examination;
  close(): void;
}

export interface TableSize {
  name: string;
  rows: number;
  /** Including its indexes. */
  bytes: number;
}

/** A file that must be migrated before its tables can be read. */
export interface OlderFile {
  kind: 'older';
  schemaVersion: number;
  /** The first problem found in it. */
  damage: Unusable | undefined;
}

/** A write transaction of another process that does not end. */
export interface KeptTransaction {
  /** Null: it cannot be told, usually as the process is in another PID namespace. */
  processId: number | null;
}

type Examination = ReturnType<typeof examine>;

const SENTENCES_MAX = 5;

/**
 * Opens a file read-only, even while this machine serves it. Returns an `OlderFile` or why the file is unusable where
 * its tables cannot be read. Throws AppError `conflict` for a file that another machine serves.
 * `timeoutMs`: how long to wait for a lock on it.
 */
export function openForExamination(
  path: string,
  timeoutMs = BUSY_TIMEOUT_MS,
): ExaminedFile | OlderFile | Unusable {
  refuseOtherMachine(path);
  const database = connect(path, { timeoutMs });
  try {
    database.pragma('query_only = ON');
    const found = identify(database);
    if (found !== undefined) {
      database.close();
      return found;
    }
    const schemaVersion = schemaVersionOf(database);
    if (schemaVersion < SCHEMA_VERSION) {
      const problem = firstProblem(database);
      database.close();
      return {
        kind: 'older',
        schemaVersion,
        damage: problem === undefined ? undefined : { kind: 'damaged', problem },
      };
    }
    return { reads: readsOn(database), examination: examine(database), close: () => database.close() };
  } catch (error) {
    database.close();
    return whatIsWrong(error, path);
  }
}

function examine(database: Database) {
  const miscounted = database.prepare<[], { id: string; counted: number; waiting: number }>(`
    SELECT p.id, p.queued_count AS counted, count(d.seq) AS waiting
      FROM projects p
      LEFT JOIN deployments d ON d.project_id = p.id AND d.status = 'queued' AND d.reported = 0
     GROUP BY p.id HAVING counted <> waiting`);

  return {
    sqliteVersion: (): string => String(database.prepare('SELECT sqlite_version()').pluck().get()),
    schemaVersion: (): number => schemaVersionOf(database),
    /** The size of the free pages, which SQLite uses before the file grows. */
    unusedBytes: (): number => pragmaNumber(database, 'freelist_count') * pragmaNumber(database, 'page_size'),

    /** What is wrong with pages, indexes and constraints, and what is missing. Reads the whole file. */
    integrityProblems: (): string[] => [
      ...integrityProblems(database, SENTENCES_MAX),
      ...completenessProblems(database, SENTENCES_MAX),
    ],
    foreignKeyProblems: (): string[] => foreignKeyProblems(database, SENTENCES_MAX),

    /** Projects whose `queued_count` differs from the deployments that wait. */
    miscountedProjects: (): { id: string; counted: number; waiting: number }[] => miscounted.all(),

    keptTransaction: (effects: Pick<Effects, 'monotonicMs' | 'block'>) =>
      keptTransaction(database.name, effects),

    walUncopiedBytes: (): number => unlessReadOnly(() => walUseOf(database)().uncopiedBytes, 0),

    /** False: somebody has cut the -wal short. All of the file can be read even so, if all of it was copied by then. */
    isWalWhole: (): boolean => unlessReadOnly(() => watchWal(database).note(), true),

    newestMs: (): number => newestMs(database),

    /** The largest first; empty if the file is damaged. Reads the whole file. */
    tableSizes(): TableSize[] {
      try {
        return tableSizes(database);
      } catch (error) {
        whatIsWrong(error, database.name);
        return [];
      }
    },
  };
}

/** `otherwise` on a read-only file system, where SQLite does not tell the use of the WAL. */
function unlessReadOnly<Value>(read: () => Value, otherwise: Value): Value {
  try {
    return read();
  } catch (error) {
    if (sqliteCode(error)?.startsWith('SQLITE_READONLY') === true) return otherwise;
    throw error;
  }
}

/** Those of davit take milliseconds, more only on a very slow disk; and its writer waits 5 s for those of others. */
const TRANSACTION_MAX_MS = 2_000;

/**
 * The write transaction that has kept all others waiting for 2 s; undefined: there is none, as this process could begin
 * one, which it ends at once, or another one has committed, for a busy service hardly leaves a gap. Blocks the thread.
 */
function keptTransaction(
  path: string,
  { monotonicMs, block }: Pick<Effects, 'monotonicMs' | 'block'>,
): KeptTransaction | undefined {
  const database = connect(path, { timeoutMs: 0 });
  try {
    const version = database.prepare('PRAGMA data_version').pluck();
    const versionBefore = version.get();
    const untilMs = monotonicMs() + TRANSACTION_MAX_MS;
    while (!canBegin(database)) {
      if (version.get() !== versionBefore) return undefined;
      if (monotonicMs() >= untilMs) return { processId: writerOf(path) };
      block(1);
    }
    return undefined;
  } finally {
    database.close();
  }
}

function canBegin(database: Database): boolean {
  try {
    database.exec('BEGIN IMMEDIATE; ROLLBACK');
    return true;
  } catch (error) {
    if (isLocked(error)) return false;
    throw error;
  }
}

/** The byte of the -shm that a write transaction locks, sqlite.org/walformat.html, section 2.3. */
const WRITE_LOCK_BYTE = 120;

/** The process that has a write transaction on the file, by the kernel's list of locks. */
function writerOf(path: string): number | null {
  const shm = statusOf(`${path}-shm`); // none while the file is not in WAL mode, as a restored one at first
  const [processId = 0] = shm === undefined ? [] : lockersOf(shm, WRITE_LOCK_BYTE);
  return processId > 0 ? processId : null;
}

function tableSizes(database: Database): TableSize[] {
  const tables = database
    .prepare<[], { name: string; bytes: number }>(`
      SELECT t.name, sum(b.pgsize) AS bytes
        FROM sqlite_schema t
        JOIN sqlite_schema s ON s.tbl_name = t.name
        JOIN dbstat b ON b.name = s.name AND b.aggregate = 1
       WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'
       GROUP BY t.rowid
       ORDER BY bytes DESC, t.rowid`)
    .all();
  const rowsOf = (table: string) =>
    Number(database.prepare<[], number>(`SELECT count(*) FROM "${table}"`).pluck().get());
  return tables.map(({ name, bytes }) => ({ name, rows: rowsOf(name), bytes }));
}
