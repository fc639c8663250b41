import { checkDatabase, type FileCheck, identify, withDatabase } from './check.ts';
import { type Database, pragmaNumber } from './database.ts';

/**
 * Copies what is committed at this moment into the empty file `to`, compact, and without a WAL; then checks the
 * copy. Nobody who writes meanwhile waits, and nobody's writes disturb it: SQLite's backup API begins anew
 * whenever another process commits, and at 500 commits a second it never ends. Blocks the thread.
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

/** What a copy without gaps takes, about. */
function compactBytes(database: Database): number {
  const pages = pragmaNumber(database, 'page_count') - pragmaNumber(database, 'freelist_count');
  return pages * pragmaNumber(database, 'page_size');
}
