import { NO_ROOM } from '../errors.ts';
import { checkDatabase, type FileCheck, identify, withDatabase } from './check.ts';
import { type Database, pragmaNumber } from './database.ts';
import { sqliteCode } from './sqlite-errors.ts';

/**
 * Copies what is committed at this moment into the empty file `to`, compacted and without a WAL; then checks the copy.
 * Neither delays writers nor is disturbed by them: SQLite's backup API, which is why it is not used, starts over whenever
 * another process commits, and at 500 commits a second it never ends. Blocks the thread. Throws an Error with the code of
 * SQLite if the disk of `to` takes no copy.
 */
export function copyDatabase(
  from: string,
  to: string,
  { onBegin, onCopied }: { onBegin(bytes: number): void; onCopied(): void },
): FileCheck {
  const problem = withDatabase(from, (database) => {
    const found = identify(database);
    if (found !== undefined) return found;
    onBegin(compactBytes(database));
    copyInto(database, to);
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

function copyInto(database: Database, to: string): void {
  try {
    database.prepare('VACUUM INTO ?').run(to);
  } catch (error) {
    const code = sqliteCode(error) ?? '';
    if (!NO_ROOM.has(code)) throw error;
    // Not as SQLite's own error, which would be taken for one of the disk that is copied from.
    throw Object.assign(new Error('the copy could not be written', { cause: error }), { code });
  }
}
