import { readFileSync } from 'node:fs';

/** How many files this process may have open, by proc_pid_limits(5); Infinity: any number, or it cannot be read. */
export function openFilesMax(): number {
  try {
    const limits = readFileSync('/proc/self/limits', 'latin1');
    return Number(/^Max open files +(\d+)/m.exec(limits)?.[1] ?? Number.POSITIVE_INFINITY);
  } catch {
    return Number.POSITIVE_INFINITY;
  }
}
