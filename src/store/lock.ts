import {
  closeSync,
  constants,
  existsSync,
  fchmodSync,
  fchownSync,
  fstatSync,
  ftruncateSync,
  openSync,
  readSync,
  type Stats,
  statSync,
} from 'node:fs';
import { dirname } from 'node:path';
import { bootId, hasBootId } from '../boot-id.ts';
import { type Timestamp, timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, codeOf } from '../errors.ts';
import { realPath, statusOf } from '../paths.ts';
import { hasOpened, holdersOf, openFilesOf, readProc } from '../proc.ts';
import { connect, type Database, isDamaged, openingProblem, sqliteCode } from './database.ts';
import { lockersOf } from './file-locks.ts';
import { identifyFiles, sharedMemoryPath } from './place.ts';

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
 * Makes this process the only server of the file, until the returned function is called or the process dies in whatever
 * way: the lock is a POSIX lock that an open transaction on `<path>-lock` holds. That file also tells others about the
 * service, see `Serving`. Throws AppError `conflict` that names the holder.
 */
export function lockForServing(
  path: string,
  processId: number,
  effects: Effects,
  maxConcurrent: number | null = null,
): () => void {
  const serving: Serving = {
    process_id: processId,
    since: timestamp(effects.now()),
    max_concurrent: maxConcurrent,
  };
  const file = lockPath(path);
  prepareLock(file, path);
  try {
    return holdLock(file, serving);
  } catch (error) {
    if (!isDamaged(error)) throw holdingProblem(path, error);
  }
  // A power cut may have damaged the lock file.
  emptyLock(file);
  try {
    return holdLock(file, serving);
  } catch (error) {
    throw holdingProblem(path, error);
  }
}

/**
 * Creates the lock file, readable by the database's owner only: who can read it can lock it, and delay a commit on it.
 */
function prepareLock(file: string, path: string): void {
  withPlainFile(file, constants.O_RDWR | constants.O_CREAT, (descriptor, { mode, uid, nlink }) => {
    if (nlink !== 1) return; // may also be another file, whose owner and mode must not change
    const isRoot = process.getuid?.() === 0;
    if (isRoot) {
      // Where there is no database yet, its user is the directory's owner: a restore that fails leaves the lock file.
      const owner = statSync(path, { throwIfNoEntry: false }) ?? statSync(dirname(file));
      fchownSync(descriptor, owner.uid, owner.gid);
    }
    if ((mode & 0o077) !== 0 && (isRoot || uid === process.getuid?.())) {
      fchmodSync(descriptor, 0o600);
    }
  });
}

/** Truncates a damaged lock file. It is not removed, as another davit may have opened it to lock it. */
function emptyLock(file: string): void {
  withPlainFile(file, constants.O_RDWR, (descriptor, { nlink }) => {
    const head = Buffer.alloc(SQLITE_HEAD.length);
    readSync(descriptor, head, 0, head.length, 0);
    const isOurs = nlink === 1 && (head.equals(SQLITE_HEAD) || head.every((byte) => byte === 0));
    if (!isOurs) throw noLock(file);
    ftruncateSync(descriptor, 0);
  });
}

/**
 * Opens the lock file for `action`. Throws for what is not a regular file, which anybody who may write in the directory
 * could have put there. Not to be called while this process holds the lock: closing the file would release it,
 * fcntl(2).
 */
function withPlainFile(
  file: string,
  flags: number,
  action: (descriptor: number, stats: Stats) => void,
): void {
  let descriptor: number;
  try {
    descriptor = openSync(file, flags | constants.O_NOFOLLOW | constants.O_NONBLOCK, 0o600);
  } catch (error) {
    if (['ELOOP', 'EISDIR'].includes(codeOf(error))) throw noLock(file);
    const problem = codeOf(error) === 'EROFS' ? 'the file system is read-only' : "it must be this user's own";
    throw new AppError('conflict', `cannot open ${file} (${codeOf(error)}): ${problem}`, { cause: error });
  }
  try {
    const stats = fstatSync(descriptor);
    if (!stats.isFile()) throw noLock(file);
    action(descriptor, stats);
  } finally {
    closeSync(descriptor);
  }
}

function noLock(file: string): AppError {
  return new AppError('conflict', `${file} is not a lock file of davit, which needs that name: move it away`);
}

/** The first bytes of every SQLite database. */
const SQLITE_HEAD = Buffer.from('SQLite format 3\0');

function holdLock(file: string, serving: Serving): () => void {
  const lock = connect(file, { timeoutMs: LOCK_PROBE_TIMEOUT_MS });
  try {
    // No journal file; the content need not survive a crash.
    lock.pragma('journal_mode = MEMORY');
    lock.pragma('synchronous = OFF');
    for (;;) {
      writeHolder(lock, serving);
      // A RESERVED lock, not an EXCLUSIVE one: a process that is refused can still read who holds it.
      lock.exec('BEGIN IMMEDIATE');
      const written = readHolder(lock);
      if (written?.process_id === serving.process_id && written.since === serving.since) break;
      // Between the two transactions another start wrote its own row, and is refused now or has ended.
      lock.exec('ROLLBACK');
    }
  } catch (error) {
    lock.close();
    throw error;
  }
  return () => lock.close();
}

function writeHolder(lock: Database, { process_id, since, max_concurrent }: Serving): void {
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

/** Turns `error` into an AppError `conflict` that names the holder of the lock, if that is the problem. */
function holdingProblem(path: string, error: unknown): unknown {
  if (sqliteCode(error) !== 'SQLITE_BUSY') return openingProblem(lockPath(path), error);
  const message = `${path} is served already${holderText(servedBy(path))}: stop that one first, or serve another file`;
  return new AppError('conflict', message, { cause: error });
}

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

/**
 * Whether the file system of the database takes no writes. Tested by opening the lock file. access(2) does not notice
 * that the kernel has made a file system read-only after an error, and closing the database file itself would release
 * the locks that SQLite has on it, fcntl(2); so this is not for the process that serves the file.
 */
export function isOnReadOnlyFileSystem(path: string): boolean {
  try {
    closeSync(openSync(lockPath(path), 'r+'));
    return false;
  } catch (error) {
    return codeOf(error) === 'EROFS';
  }
}

/** The lock file of a database, which its service has open all the time. */
export function lockPath(path: string): string {
  return `${realPath(path)}-lock`;
}

function readHolder(lock: Database): Holder | undefined {
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
