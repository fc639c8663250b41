import type { Timestamp } from '../domain.ts';

const UNITS = [
  ['year', 365 * 86_400_000],
  ['day', 86_400_000],
  ['hour', 3_600_000],
  ['minute', 60_000],
  ['second', 1_000],
] as const;

const relative = new Intl.RelativeTimeFormat('en', { numeric: 'always', style: 'narrow' });

/** `3h ago`, `in 5d`, `now`: how far a moment is from `nowMs`, in its largest unit. */
export function fromNow(at: Timestamp, nowMs: number): string {
  const awayMs = Date.parse(at) - nowMs;
  const [unit, unitMs] = UNITS.find(([, size]) => Math.abs(awayMs) >= size) ?? [];
  return unit === undefined ? 'now' : relative.format(Math.trunc(awayMs / unitMs), unit);
}
