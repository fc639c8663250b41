import type { Effects } from './effects.ts';

/** How long davit that stops waits for the requests that are under way. */
export const LAST_REQUESTS_MS = 1_500;
/** For the files of the last commands. */
export const LAST_REMOVALS_MS = 1_000;
/**
 * How long attempts that are under way may go on when davit stops. Only those to receivers that hang do not end by then,
 * and are made again at the next start.
 */
export const LAST_ATTEMPTS_MS = 2_500;
/**
 * How long davit that stops waits for a recovery that had its 20 s: one more try of a record. The next start does the
 * rest. One that waits for a process that cannot be ended kept the file open until davit was killed.
 */
export const LAST_RECOVERY_MS = 1_500;

/**
 * What is waited for after the commands has less time than its limit above if one of them had all of its time: that is
 * 27 s of the 30 that a stop may take.
 */
const LAST_WAITS_UNTIL_MS = 27_500;

/** What is left of the time that a stop may take. */
interface StopTime {
  /** Davit begins to stop. */
  begin(): void;
  /** How long to wait for something: `waitMs`, or as long as is left. */
  atMost(waitMs: number): number;
}

/** Before it begins, all of the time is left. */
export function createStopTime(effects: Effects): StopTime {
  /** On the monotonic clock; undefined: it has not begun. */
  let sinceMs: number | undefined;
  return {
    begin() {
      sinceMs = effects.monotonicMs();
    },
    atMost(waitMs) {
      const passedMs = sinceMs === undefined ? 0 : effects.monotonicMs() - sinceMs;
      return Math.max(0, Math.min(waitMs, LAST_WAITS_UNTIL_MS - passedMs));
    },
  };
}
