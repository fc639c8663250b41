import { existsSync, statSync } from 'node:fs';
import { bootId, hasBootId } from '../boot-id.ts';
import type { Timestamp } from '../domain.ts';
import { AppError } from '../errors.ts';
import { statusOf } from '../paths.ts';
import { hasOpened, holdersOf, openFilesOf, readProc } from '../proc.ts';
import { connect, type Database } from './database.ts';
import { lockersOf } from './file-locks.ts';
import { identifyFiles, isOnReadOnlyFileSystem, lockPath, sharedMemoryPath } from './place.ts';
import { isDamaged, openingProblem, sqliteCode } from './sqlite-errors.ts';

/* Who serves a file, as its lock and the lock file tell: see lock.ts. */

/** A service that serves the file; null fields could not be read. */
export interface Serving {
  process_id: number | null;
  since: Timestamp | null;
  /** How many commands it runs at a time. */
  max_concurrent: number | null;
}

/** Waits out processes that hold the lock only to read who serves the file, which takes less than a millisecond. */
export const LOCK_PROBE_TIMEOUT_MS = 250;

/**
 * The service that serves the file now; null if none does. Tests the lock itself, as the row that a service wrote
 * outlives it, and never creates a lock file. Throws AppError `conflict` where this user may not open the lock file.
 */
export function servedBy(path: string): Serving | null {
  const holder = holderOf(path);
  if (holder === null) {
    const process_id = servedWithoutLock(path);
    return process_id === undefined ? null : { process_id, since: null, max_concurrent: null };
  }
  const { boot_id: _, ...serving } = holder;
  return serving;
}

/**
 * The process of a service that runs although its lock file was deleted, as a leftover perhaps; undefined: there is none,
 * as far as this user can see. It goes on, and a new lock file in its place does not exclude it.
 */
export function servedWithoutLock(path: string): number | undefined {
  const lock = lockPath(path);
  // A clean stop leaves the lock and no -shm. Then the search, 5 ms or more with many processes, is skipped.
  const mayBeServed = existsSync(sharedMemoryPath(path)) || (existsSync(path) && !existsSync(lock));
  if (!mayBeServed) return undefined;
  // In a mount namespace of its own, any user's process may have had a file of that name.
  const files = identifyFiles(path);
  return holdersOf(removed(lock)).find((processId) => hasOpened(processId, files));
}

/** How a file that was removed is listed by the processes that have it open, proc_pid_fd(5). */
export function removed(file: string): string {
  return `${file} (deleted)`;
}

/**
 * Throws AppError `conflict` if another machine serves the file. Machines do not share SQLite's `-shm`, even on a
 * common file system, so that using a file that another machine serves would damage it. To be called before the file is
 * opened.
 */
export function refuseOtherMachine(path: string): void {
  const holder = holderOf(path);
  if (holder === null || holder.boot_id === null || !hasBootId() || holder.boot_id === bootId()) return;
  if (isLockedHere(lockPath(path))) return;
  throw new AppError(
    'conflict',
    `${path} is served${holderText(holder)} on another machine: run davit there, as to use the file from two would damage it`,
  );
}

/**
 * Whether a program on this machine holds the lock, as some containers report a boot id of their own. The locks of
 * other machines on a network file system belong to kernel threads, which have no command line.
 */
function isLockedHere(file: string): boolean {
  return lockersOf(statSync(file), RESERVED_BYTE).some((id) => Boolean(readProc(`/proc/${id}/cmdline`)));
}

/** A service and the boot id of its machine; null if that could not be read. */
interface Holder extends Serving {
  boot_id: string | null;
}

function holderOf(path: string): Holder | null {
  const file = lockPath(path);
  if (!existsSync(file)) return null;
  // Waited out in full by each command where a service holds the lock.
  const lock = connect(file, { timeoutMs: LOCK_PROBE_TIMEOUT_MS / 10 });
  try {
    lock.exec('BEGIN IMMEDIATE');
    // Where SQLite can open the file for reading only, that locks nothing, and is never refused.
    const holder = isOnReadOnlyFileSystem(path) ? holderByLocks(file) : null;
    return holder && { ...holder, ...readHolder(lock) };
  } catch (error) {
    // A service repairs the file before it locks it: if one holds the lock, the file was overwritten after that.
    if (isDamaged(error)) return holderByLocks(file);
    if (sqliteCode(error) !== 'SQLITE_BUSY') throw openingProblem(file, error);
    return readHolder(lock) ?? { process_id: null, since: null, max_concurrent: null, boot_id: null };
  } finally {
    lock.close();
  }
}

/** The holder by the kernel's list of locks, where SQLite cannot tell. */
function holderByLocks(file: string): Holder | null {
  const [processId] = lockersOf(statSync(file), RESERVED_BYTE);
  if (processId === undefined) return null;
  return { process_id: processId > 0 ? processId : null, since: null, max_concurrent: null, boot_id: null };
}

/** The byte that a write transaction of SQLite locks, sqlite.org/fileformat2.html, section 1.3.1. */
const RESERVED_BYTE = 0x40000001;

/**
 * Whether this process is the service that holds the lock of the file. False for one of another PID namespace, where
 * ids differ. Not every system tells who has a lock, nor which files a process with capabilities has open: either will
 * do.
 */
export function isServedByProcess(processId: number, path: string): boolean {
  const stats = statusOf(lockPath(path));
  if (stats !== undefined && lockersOf(stats, RESERVED_BYTE).includes(processId)) return true;
  return includesLock(openFilesOf(processId), path);
}

/** Whether the lock file of the database `path` is among the open files of a process, also if it was removed. */
export function includesLock(openFiles: readonly string[], path: string): boolean {
  const lock = lockPath(path);
  return openFiles.includes(lock) || openFiles.includes(removed(lock));
}

/** Writes into the lock file which service of this machine holds the lock. */
export function writeHolder(lock: Database, { process_id, since, max_concurrent }: Serving): void {
  lock.exec('BEGIN IMMEDIATE');
  // Recreated, as another version of davit may have made it with other columns.
  lock.exec(`
    DROP TABLE IF EXISTS holder;
    CREATE TABLE holder (process_id INTEGER NOT NULL, since TEXT NOT NULL, max_concurrent INTEGER, boot_id TEXT) STRICT`);
  lock
    .prepare('INSERT INTO holder (process_id, since, max_concurrent, boot_id) VALUES (?, ?, ?, ?)')
    .run(process_id, since, max_concurrent, hasBootId() ? bootId() : null);
  lock.exec('COMMIT');
}

/** What the lock file says; undefined: nothing that can be read. */
export function readHolder(lock: Database): Holder | undefined {
  try {
    const row = lock.prepare<[], Serving & Partial<Holder>>('SELECT * FROM holder').get();
    return row === undefined ? undefined : { ...row, boot_id: row.boot_id ?? null }; // an older davit wrote none
  } catch {
    // The row is just being written, or another version of davit wrote it: no more is known than that the lock is held.
    return undefined;
  }
}

/** ` by process 12 since …`, as far as it is known. */
export function holderText(holder: Serving | null): string {
  if (holder === null || holder.process_id === null) return '';
  return ` by process ${holder.process_id}${holder.since === null ? '' : ` since ${holder.since}`}`;
}
