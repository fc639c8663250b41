import { closeSync, fstatSync, fsyncSync, openSync, writeSync } from 'node:fs';
import { checkDatabase, type FileCheck, identify, withDatabase } from './check.ts';
import { type Database, pragmaNumber, sqliteCode } from './database.ts';

/**
 * Copies what is committed at this moment into the empty file `to`, compacted and without a WAL; then checks the copy.
 * Neither delays writers nor is disturbed by them: SQLite's backup API, which is why it is not used, starts over whenever
 * another process commits, and at 500 commits a second it never ends. Blocks the thread. Throws the system's error if
 * the disk of `to` takes no copy.
 */
export function copyDatabase(
  from: string,
  to: string,
  { onBegin, onCopied }: { onBegin(bytes: number): void; onCopied(): void },
): FileCheck {
  const problem = withDatabase(from, (database) => {
    const found = identify(database);
    if (found !== undefined) return found;
    const bytes = compactBytes(database);
    onBegin(bytes);
    copyInto(database, to, bytes);
    return undefined;
  });
  if (problem !== undefined) return problem;
  onCopied();
  return checkDatabase(to);
}

/** The approximate size of a copy without unused pages. */
function compactBytes(database: Database): number {
  const pages = pragmaNumber(database, 'page_count') - pragmaNumber(database, 'freelist_count');
  return pages * pragmaNumber(database, 'page_size');
}

function copyInto(database: Database, to: string, bytes: number): void {
  try {
    database.prepare('VACUUM INTO ?').run(to);
  } catch (error) {
    const code = sqliteCode(error) ?? '';
    // As the system says it: SQLite's error would be taken for one of the disk that is copied from.
    if (code === 'SQLITE_FULL')
      throw Object.assign(new Error('the copy has no room', { cause: error }), { code: 'ENOSPC' });
    if (WRITE_FAILURES.has(code)) fill(to, bytes);
    throw error;
  }
}

const WRITE_FAILURES = new Set(['SQLITE_IOERR_WRITE', 'SQLITE_IOERR_FSYNC']);

const PIECE = Buffer.alloc(64 * 1024);

/**
 * Writes on to a failed copy until it has its size: SQLite does not tell a quota from other failures, and the system
 * does.
 */
function fill(path: string, bytes: number): void {
  const descriptor = openSync(path, 'r+');
  try {
    for (let at = fstatSync(descriptor).size; at < bytes; ) {
      at += writeSync(descriptor, PIECE, 0, PIECE.length, at);
    }
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
}
