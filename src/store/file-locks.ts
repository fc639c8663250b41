import type { Stats } from 'node:fs';
import { readProc } from '../proc.ts';

/** The processes that have locked this byte of a file for writing. */
export function lockersOf(file: Stats, byte: number): number[] {
  return locksOn(file)
    .filter(({ kind, start }) => kind === 'WRITE' && start === byte)
    .map(({ processId }) => processId);
}

/** Which other processes have the database open: SQLite holds a lock on a part of the file then. */
export function openersOf(stats: Stats): Set<number> {
  const processIds = locksOn(stats).map(({ processId }) => processId);
  return new Set(processIds.filter((processId) => processId > 0 && processId !== process.pid));
}

/** One of them, for a message: `process 12`, or `another process` where the system does not tell. */
export function openerOf(stats: Stats): string {
  const [opener] = openersOf(stats);
  return opener === undefined ? 'another process' : `process ${opener}`;
}

/**
 * Which process has locked which byte of a file, proc_locks(5); none where the system does not tell. Ids of other PID
 * namespaces are not positive.
 */
function locksOn({ ino }: Stats): { kind: string; processId: number; start: number }[] {
  const lines = (readProc('/proc/locks') ?? '').matchAll(/ (\w+) +(-?\d+) [\da-f]+:[\da-f]+:(\d+) (\d+) /g);
  return [...lines]
    .filter(([, , , inode]) => Number(inode) === ino)
    .map(([, kind = '', processId, , start]) => ({
      kind,
      processId: Number(processId),
      start: Number(start),
    }));
}
