import {
  closeSync,
  constants,
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
import { timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, codeOf } from '../errors.ts';
import { connect } from './database.ts';
import {
  holderText,
  LOCK_PROBE_TIMEOUT_MS,
  readHolder,
  type Serving,
  servedBy,
  writeHolder,
} from './holder.ts';
import { lockPath } from './place.ts';
import { isDamaged, openingProblem, sqliteCode } from './sqlite-errors.ts';

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

/** Turns `error` into an AppError `conflict` that names the holder of the lock, if that is the problem. */
function holdingProblem(path: string, error: unknown): unknown {
  if (sqliteCode(error) !== 'SQLITE_BUSY') return openingProblem(lockPath(path), error);
  const message = `${path} is served already${holderText(servedBy(path))}: stop that one first, or serve another file`;
  return new AppError('conflict', message, { cause: error });
}
