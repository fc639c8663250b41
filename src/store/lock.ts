import {
  closeSync,
  constants,
  existsSync,
  fchmodSync,
  fchownSync,
  fstatSync,
  ftruncateSync,
  openSync,
  readFileSync,
  readSync,
  type Stats,
  statSync,
} from 'node:fs';
import { bootId, hasBootId } from '../boot-id.ts';
import { type Timestamp, timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, codeOf } from '../errors.ts';
import { connect, type Database, isDamaged, openingProblem, sqliteCode } from './database.ts';
import { realPath } from './place.ts';

/** A service that has the file; what is null could not be read at that moment. */
export interface Serving {
  process_id: number | null;
  since: Timestamp | null;
  /** How many commands it runs at a time. */
  max_concurrent: number | null;
}

/** Others hold the lock only to look who has it, for less than a millisecond: that is no reason to refuse. */
export const LOOKS_TIMEOUT_MS = 250;

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
  // A power cut may leave it so.
  emptyLock(file);
  try {
    return holdLock(file, serving);
  } catch (error) {
    throw holdingProblem(path, error);
  }
}

/** Makes it, if it is not there, for the owner of the database alone: whoever can read it could hold up a commit. */
function prepareLock(file: string, path: string): void {
  withPlainFile(file, constants.O_RDWR | constants.O_CREAT, (descriptor, { mode, uid, nlink }) => {
    if (nlink !== 1) return; // somebody's copy, or somebody else's file
    const database = process.getuid?.() === 0 ? statSync(path, { throwIfNoEntry: false }) : undefined;
    if (database !== undefined) fchownSync(descriptor, database.uid, database.gid);
    if ((mode & 0o077) !== 0 && (process.getuid?.() === 0 || uid === process.getuid?.())) {
      fchmodSync(descriptor, 0o600);
    }
  });
}

/** Cuts it off. It is not removed: it stays the file that another davit would lock as well. */
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
 * Whoever may write in the directory may have put anything there, which is then left alone. Not to be called while this
 * process holds the lock: closing the file would let go of it, fcntl(2).
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
  return new AppError('conflict', `${file} is no lock of davit's, which must be there: move it away`);
}

/** How each of SQLite's files begins. */
const SQLITE_HEAD = Buffer.from('SQLite format 3\0');

function holdLock(file: string, { process_id, since, max_concurrent }: Serving): () => void {
  const lock = connect(file, { timeoutMs: LOOKS_TIMEOUT_MS });
  try {
    // No journal file beside it; what is in it may be lost at any time.
    lock.pragma('journal_mode = MEMORY');
    lock.pragma('synchronous = OFF');
    lock.exec('BEGIN IMMEDIATE');
    // Anew: another davit may have made it with other columns.
    lock.exec(`
      DROP TABLE IF EXISTS holder;
      CREATE TABLE holder (process_id INTEGER NOT NULL, since TEXT NOT NULL, max_concurrent INTEGER, boot_id TEXT) STRICT`);
    lock
      .prepare('INSERT INTO holder (process_id, since, max_concurrent, boot_id) VALUES (?, ?, ?, ?)')
      .run(process_id, since, max_concurrent, hasBootId() ? bootId() : null);
    lock.exec('COMMIT');
    // RESERVED, not EXCLUSIVE: who is refused can still read who holds it.
    lock.exec('BEGIN IMMEDIATE');
  } catch (error) {
    lock.close();
    throw error;
  }
  return () => lock.close();
}

/** `error` as an AppError `conflict` that says who is in the way. */
function holdingProblem(path: string, error: unknown): unknown {
  if (sqliteCode(error) !== 'SQLITE_BUSY') return openingProblem(lockPath(path), error);
  const message = `${path} is served already${holderText(servedBy(path))}: stop that one first, or serve another file`;
  return new AppError('conflict', message, { cause: error });
}

/**
 * The service that has the file at this moment; null when none has. Asks the operating system, as what a service
 * wrote outlives it, and never makes a lock. Throws AppError `conflict` where this user may not ask.
 */
export function servedBy(path: string): Serving | null {
  const holder = holderOf(path);
  if (holder === null) return null;
  const { boot_id: _, ...serving } = holder;
  return serving;
}

/**
 * What SQLite keeps in `-shm` two machines do not share, whatever file system both have mounted: who reads or writes
 * beside a service of another one damages the file. Throws AppError `conflict` then. To be asked before it is opened.
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

/** By a program of this kernel: some containers of this machine say another boot. A network's locks are kernel threads'. */
function isLockedHere(file: string): boolean {
  return locksOn(statSync(file)).some(
    ({ kind, start, processId }) => kind === 'WRITE' && start === RESERVED_BYTE && isProgram(processId),
  );
}

function isProgram(processId: number): boolean {
  try {
    return readFileSync(`/proc/${processId}/cmdline`).length > 0;
  } catch {
    return false;
  }
}

/** A service, and on which machine it runs; null if that could not be read. */
interface Holder extends Serving {
  boot_id: string | null;
}

function holderOf(path: string): Holder | null {
  const file = lockPath(path);
  if (!existsSync(file)) return null;
  const lock = connect(file, { timeoutMs: LOOKS_TIMEOUT_MS / 10 });
  try {
    lock.exec('BEGIN IMMEDIATE');
    return null;
  } catch (error) {
    // A service mends it first, so what is in it now came later, if there is one.
    if (isDamaged(error)) return holderOfOverwritten(file);
    if (sqliteCode(error) !== 'SQLITE_BUSY') throw openingProblem(file, error);
    return readHolder(lock) ?? { process_id: null, since: null, max_concurrent: null, boot_id: null };
  } finally {
    lock.close();
  }
}

/** SQLite cannot say who has locked what is no file of its own any more. */
function holderOfOverwritten(file: string): Holder | null {
  const holder = locksOn(statSync(file)).find(
    ({ kind, start }) => kind === 'WRITE' && start === RESERVED_BYTE,
  );
  if (holder === undefined) return null;
  const processId = holder.processId > 0 ? holder.processId : null;
  return { process_id: processId, since: null, max_concurrent: null, boot_id: null };
}

/** What whoever is about to write has locked, sqlite.org/fileformat2.html, section 1.3.1. */
const RESERVED_BYTE = 0x40000001;

/** Who has locked which part of a file, proc_locks(5). Of processes in other PID namespaces the id is not known. */
export function locksOn({ ino }: Stats): { kind: string; processId: number; start: number }[] {
  const lines = readFileSync('/proc/locks', 'utf8').matchAll(
    / (\w+) +(-?\d+) [\da-f]+:[\da-f]+:(\d+) (\d+) /g,
  );
  return [...lines]
    .filter(([, , , inode]) => Number(inode) === ino)
    .map(([, kind = '', processId, , start]) => ({
      kind,
      processId: Number(processId),
      start: Number(start),
    }));
}

/** The file that whoever serves a database has open all the time. */
export function lockPath(path: string): string {
  return `${realPath(path)}-lock`;
}

function readHolder(lock: Database): Holder | undefined {
  try {
    const row = lock.prepare<[], Serving & Partial<Holder>>('SELECT * FROM holder').get();
    return row === undefined ? undefined : { ...row, boot_id: row.boot_id ?? null }; // an older davit says no machine
  } catch {
    // It is being written this very moment, or another davit wrote it: that somebody holds it is all there is to say.
    return undefined;
  }
}

/** ` by process 12 since …`, or nothing where nothing is known. */
export function holderText(holder: Serving | null): string {
  return holder === null || holder.process_id === null
    ? ''
    : ` by process ${holder.process_id} since ${holder.since}`;
}
