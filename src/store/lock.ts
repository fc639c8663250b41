import { realpathSync } from 'node:fs';
import { timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { connect, type Database, sqliteCode } from './database.ts';

/**
 * Makes this process the only server of the file, until the returned function is called or the process
 * dies, however that happens: the lock is the operating system's, held by an open transaction on
 * `<path>-lock`. Throws AppError `conflict` that names the holder.
 */
export function lockForServing(path: string, processId: number, effects: Effects): () => void {
  const lock = connect(`${realPath(path)}-lock`, { timeoutMs: 0 });
  try {
    // No journal file beside it; what is in it may be lost at any time.
    lock.pragma('journal_mode = MEMORY');
    lock.pragma('synchronous = OFF');
    lock.exec('BEGIN IMMEDIATE');
    lock.exec('CREATE TABLE IF NOT EXISTS holder (process_id INTEGER NOT NULL, since TEXT NOT NULL) STRICT');
    lock.exec('DELETE FROM holder');
    lock
      .prepare('INSERT INTO holder (process_id, since) VALUES (?, ?)')
      .run(processId, timestamp(effects.now()));
    lock.exec('COMMIT');
    // RESERVED, not EXCLUSIVE: who is refused can still read who holds it.
    lock.exec('BEGIN IMMEDIATE');
  } catch (error) {
    const busy = sqliteCode(error) === 'SQLITE_BUSY';
    const holder = busy ? describeHolder(lock) : '';
    lock.close();
    if (!busy) throw error;
    throw new AppError(
      'conflict',
      `${path} is served already${holder}: stop that one first, or serve another file`,
      {
        cause: error,
      },
    );
  }
  return () => lock.close();
}

/** One file has one lock, by whichever link it is reached. */
function realPath(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    return path; // not made yet
  }
}

function describeHolder(lock: Database): string {
  try {
    const row = lock
      .prepare<[], { process_id: number; since: string }>('SELECT process_id, since FROM holder')
      .get();
    return row === undefined ? '' : ` by process ${row.process_id} since ${row.since}`;
  } catch {
    // It is being written this very moment: that somebody holds it is all there is to say.
    return '';
  }
}
