import { MINUTE_MS } from '../durations.ts';
import type { Serving } from '../store/holder.ts';
import type { DiskTrial } from './doctor-disk.ts';

/** A file to check, and when. */
export interface Case {
  /** Absolute, and no link. */
  path: string;
  service: Serving | null;
  nowMs: number;
  /** Taken before the file was opened, as opening and closing it empties the WAL. */
  walBytes: number;
  diskTrial: DiskTrial;
}

/** Normally a start, an end or a retry is seconds late at most. */
export const OVERDUE_MS = 10 * MINUTE_MS;

/** Negative for a time in the future; minus infinity for null, which never comes. */
export function ageMs(at: string | null, nowMs: number): number {
  return at === null ? Number.NEGATIVE_INFINITY : nowMs - Date.parse(at);
}
