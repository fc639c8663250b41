import { checkDatabase, type FileCheck, identify, withDatabase } from './check.ts';
import { type Database, pragmaNumber } from './database.ts';

/**
 * Copies what is committed at this moment into the empty file `to`, compacted and without a WAL; then checks the copy.
 * Neither delays writers nor is disturbed by them: SQLite's backup API, which is why it is not used, starts over whenever
 * another process commits, and at 500 commits a second it never ends. Blocks the thread.
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
    database.prepare('VACUUM INTO ?').run(to);
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
