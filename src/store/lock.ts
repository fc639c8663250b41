import { existsSync, realpathSync } from 'node:fs';
import { type Timestamp, timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { connect, type Database, sqliteCode } from './database.ts';

/** A service that has the file; what is null could not be read at that moment. */
export interface Serving {
  process_id: number | null;
  since: Timestamp | null;
  /** How many commands it runs at a time. */
  max_concurrent: number | null;
}

/** Others hold the lock only to look who has it, for less than a millisecond: that is no reason to refuse. */
const LOOKS_TIMEOUT_MS = 250;

/**
 * Makes this process the only server of the file, until the returned function is called or the process
 * dies, however that happens: the lock is the operating system's, held by an open transaction on
 * `<path>-lock`. What is there besides the process is for others to read: see `Serving`. Throws AppError `conflict`
 * that names the holder.
 */
export function lockForServing(
  path: string,
  processId: number,
  effects: Effects,
  maxConcurrent: number | null = null,
): () => void {
  const lock = connect(lockPath(path), { timeoutMs: LOOKS_TIMEOUT_MS });
  try {
    // No journal file beside it; what is in it may be lost at any time.
    lock.pragma('journal_mode = MEMORY');
    lock.pragma('synchronous = OFF');
    lock.exec('BEGIN IMMEDIATE');
    // Anew: another davit may have made it with other columns.
    lock.exec(`
      DROP TABLE IF EXISTS holder;
      CREATE TABLE holder (process_id INTEGER NOT NULL, since TEXT NOT NULL, max_concurrent INTEGER) STRICT`);
    lock
      .prepare('INSERT INTO holder (process_id, since, max_concurrent) VALUES (?, ?, ?)')
      .run(processId, timestamp(effects.now()), maxConcurrent);
    lock.exec('COMMIT');
    // RESERVED, not EXCLUSIVE: who is refused can still read who holds it.
    lock.exec('BEGIN IMMEDIATE');
  } catch (error) {
    const busy = sqliteCode(error) === 'SQLITE_BUSY';
    const holder = busy ? readHolder(lock) : undefined;
    lock.close();
    if (!busy) throw error;
    throw new AppError(
      'conflict',
      `${path} is served already${describe(holder)}: stop that one first, or serve another file`,
      {
        cause: error,
      },
    );
  }
  return () => lock.close();
}

/**
 * The service that has the file at this moment; null when none has. Asks the operating system, as what a service
 * wrote outlives it, and never makes a lock.
 */
export function servedBy(path: string): Serving | null {
  if (!existsSync(lockPath(path))) return null;
  const lock = connect(lockPath(path), { timeoutMs: LOOKS_TIMEOUT_MS / 10 });
  try {
    lock.exec('BEGIN IMMEDIATE');
    return null;
  } catch (error) {
    if (sqliteCode(error) !== 'SQLITE_BUSY') throw error;
    return readHolder(lock) ?? { process_id: null, since: null, max_concurrent: null };
  } finally {
    lock.close();
  }
}

/** The file that whoever serves a database has open all the time. */
export function lockPath(path: string): string {
  return `${realPath(path)}-lock`;
}

/** One file has one lock, by whichever link it is reached. */
function realPath(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    return path; // not made yet
  }
}

function readHolder(lock: Database): Serving | undefined {
  try {
    return lock.prepare<[], Serving>('SELECT process_id, since, max_concurrent FROM holder').get();
  } catch {
    // It is being written this very moment, or another davit wrote it: that somebody holds it is all there is to say.
    return undefined;
  }
}

function describe(holder: Serving | undefined): string {
  return holder === undefined ? '' : ` by process ${holder.process_id} since ${holder.since}`;
}
