import type { Timestamp } from '../domain.ts';

const UNITS = [
  ['y', 365 * 86_400_000],
  ['d', 86_400_000],
  ['h', 3_600_000],
  ['m', 60_000],
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
