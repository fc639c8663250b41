import { statSync } from 'node:fs';

/** How large the WAL of the file at `path` is, in bytes; 0 where there is none. */
export function walBytesOf(path: string): number {
  return statSync(`${path}-wal`, { throwIfNoEntry: false })?.size ?? 0;
}
