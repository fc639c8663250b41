import { HOUR_MS } from '../durations.ts';

/** When failed deliveries are retried: the ladder. `delaysMs` may be empty. */
export interface RetrySchedule {
  /** The gaps between attempts. */
  readonly delaysMs: readonly number[];
  /** From the ladder's first attempt to its last one. */
  readonly windowMs: number;
}

/** By how much gaps are lengthened at random, at most, so that deliveries that failed together come back spread out. */
const JITTER = 0.1;

const RETRY_AFTER_LENGTHENS_AT_MOST_MS = HOUR_MS;

type NextAttempt = { kind: 'retry'; atMs: number } | { kind: 'exhausted' };

export interface FailedAttempt {
  /**
   * When the ladder's first attempt was made. In milliseconds since 1970, as `nowMs` is. After `nowMs` if the clock was
   * set back by an amount that nobody knows.
   */
  ladderStartedAtMs: number;
  /** Whether that may have been earlier, as the clock was set back; one after `nowMs` is doubtful in itself. */
  isStartDoubtful: boolean;
  /** Attempts made on this ladder, including the one that has just failed. */
  ladderAttempts: number;
  nowMs: number;
  /** The header as the receiver sent it. */
  retryAfter: string | null;
  /** From 0 to 1. */
  randomFraction: number;
  schedule: RetrySchedule;
}

/**
 * What follows a failed attempt. A gap that would end beyond the window, and the one after the last delay, ends at the
 * end of the window, where the last attempt is made. Whatever the clock does, the next attempt is at most one window
 * away, and a ladder has at most two attempts more than delays.
 */
export function nextAttempt(failed: FailedAttempt): NextAttempt {
  const { ladderAttempts, nowMs, schedule } = failed;
  const lastAtMs = Math.min(failed.ladderStartedAtMs, nowMs - leastAgeMs(failed)) + schedule.windowMs;
  if (nowMs >= lastAtMs || ladderAttempts > schedule.delaysMs.length + 1) return { kind: 'exhausted' };
  const delayMs = schedule.delaysMs[ladderAttempts - 1];
  const atMs = delayMs === undefined ? lastAtMs : nowMs + gapMs(delayMs, failed);
  return { kind: 'retry', atMs: Math.min(atMs, lastAtMs) };
}

/**
 * How long ago the ladder began at least, as it seems to begin later if the clock was set back since. Its gaps have
 * passed: they are taken to have been as long as chance can make them, so that the last attempt is not made after the
 * window. By how much Retry-After lengthened them is not known any more: the last attempt may be that much later.
 */
function leastAgeMs(failed: FailedAttempt): number {
  const { isStartDoubtful, ladderStartedAtMs, nowMs, ladderAttempts, schedule } = failed;
  if (!isStartDoubtful && ladderStartedAtMs <= nowMs) return 0;
  const gapsMs = schedule.delaysMs
    .slice(0, ladderAttempts - 1)
    .reduce((sumMs, delayMs) => sumMs + delayMs, 0);
  return Math.ceil(gapsMs * (1 + JITTER));
}

function gapMs(delayMs: number, { nowMs, retryAfter, randomFraction }: FailedAttempt): number {
  const ownMs = Math.round(delayMs * (1 + JITTER * randomFraction));
  const wantedMs = retryAfter === null ? undefined : parseRetryAfter(retryAfter, nowMs);
  if (wantedMs === undefined || wantedMs <= ownMs) return ownMs;
  return Math.min(wantedMs, ownMs + RETRY_AFTER_LENGTHENS_AT_MOST_MS);
}

/**
 * The wait that a Retry-After header asks for, in milliseconds from `nowMs`, never below 0: seconds or one of
 * the three forms of an HTTP date (RFC 9110, sections 10.2.3 and 5.6.7), Infinity for more seconds than a number holds.
 * Undefined if it is neither.
 */
export function parseRetryAfter(header: string, nowMs: number): number | undefined {
  const value = header.trim();
  if (/^\d+$/.test(value)) return Number(value) * 1_000;
  const atMs = parseHttpDate(value);
  return atMs === undefined ? undefined : Math.max(0, atMs - nowMs);
}

const IMF_FIXDATE = /^[A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT$/;
const RFC_850 = /^[A-Z][a-z]{5,8}, \d{2}-[A-Z][a-z]{2}-\d{2} \d{2}:\d{2}:\d{2} GMT$/;
const ASCTIME = /^[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2} \d{4}$/;

/** Milliseconds since 1970. `Date.parse` reads all three forms, but also much that is no date here. */
function parseHttpDate(value: string): number | undefined {
  if (!IMF_FIXDATE.test(value) && !RFC_850.test(value) && !ASCTIME.test(value)) return undefined;
  // The last form means UTC without saying so, and would be parsed as local time.
  const atMs = Date.parse(value.endsWith('GMT') ? value : `${value} GMT`);
  return Number.isNaN(atMs) ? undefined : atMs;
}
