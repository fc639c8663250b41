import type { Timestamp } from '../domain.ts';
import { DAY_MS, formatDuration, HOUR_MS, MINUTE_MS } from '../durations.ts';
import type { CommandContext } from './command.ts';

/** On a terminal such as `3h ago`, else ISO 8601; empty for null, a moment that has not come. */
export function moment({ terminal, effects }: CommandContext, at: Timestamp | null): string {
  if (at === null) return '';
  return terminal.columns === null ? at : fromNow(at, effects.now());
}

/** ISO 8601, and on a terminal also how long ago that is. */
export function exactMoment(context: CommandContext, at: Timestamp): string {
  return context.terminal.columns === null ? at : `${at} (${moment(context, at)})`;
}

/** `exactMoment` for moments that may not have come: null stays null. */
export function exactMomentOf(context: CommandContext): (at: Timestamp | null) => string | null {
  return (at) => (at === null ? null : exactMoment(context, at));
}

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

/** How long something took: `1m30s`, `250ms`. */
export function tookText(durationMs: number): string {
  return durationMs < 1_000 ? `${durationMs}ms` : formatDuration(durationMs);
}
