import type { Timestamp } from '../domain.ts';
import { DAY_MS, HOUR_MS, MINUTE_MS } from '../durations.ts';

const UNITS = [
  ['y', 365 * DAY_MS],
  ['d', DAY_MS],
  ['h', HOUR_MS],
  ['m', MINUTE_MS],
  ['s', 1_000],
] as const;

/** `3h ago`, `in 5d`, `now`: how far a moment is from `nowMs`, in its largest unit. */
export function fromNow(at: Timestamp, nowMs: number): string {
  const awayMs = Date.parse(at) - nowMs;
  const [unit, unitMs] = UNITS.find(([, size]) => Math.abs(awayMs) >= size) ?? [];
  if (unit === undefined) return 'now';
  const distance = `${Math.floor(Math.abs(awayMs) / unitMs)}${unit}`;
  return awayMs < 0 ? `${distance} ago` : `in ${distance}`;
}
