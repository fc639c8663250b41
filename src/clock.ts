import type { Effects } from './effects.ts';

/** A larger difference between the two clocks means that the wall clock was set; slewing stays far below. */
export const STEP_MS = 1_000;

/**
 * A wall clock that detects when it was set. Each reading compares it with the monotonic clock; if it was set since the
 * last reading, `onSet` is called before the reading returns, with a positive number if it was set ahead and a negative
 * one if back, and with what the reading returns. A machine that wakes from suspend looks like one whose clock was set
 * ahead.
 */
export function createWatchedClock(
  effects: Effects,
  onSet: (byMs: number, nowMs: number) => void,
): () => number {
  let originMs = effects.now() - effects.monotonicMs();
  return () => {
    const nowMs = effects.now();
    const setMs = nowMs - effects.monotonicMs() - originMs;
    originMs += setMs;
    if (Math.abs(setMs) > STEP_MS) onSet(Math.round(setMs), nowMs);
    return nowMs;
  };
}

/** More settings than anybody makes while a delivery is retried. */
export const SETTINGS_MAX = 100;

export interface ClockSetting {
  /** The clock's new time, milliseconds since 1970. */
  atMs: number;
  /** Positive: set ahead; negative: set back. */
  byMs: number;
}

/** How the clock was set: how much of a span on the wall clock never passed. */
export interface ClockHistory {
  /** The clock was just set by `byMs`, and now says `nowMs`. */
  add(byMs: number, nowMs: number): void;
  /** By how much the clock was set in total since it said `sinceMs`; negative: back. */
  since(sinceMs: number): number;
  /**
   * The settings of the last `withinMs`, the oldest first, each with how long ago it was. Both durations are of time
   * that really passed, whatever the clock said meanwhile.
   */
  recent(withinMs: number, nowMs: number): RecentSetting[];
  /** Whether one of these set the clock back past `saidMs`: then it may have said that twice. */
  saidTwice(saidMs: number, withinMs: number, nowMs: number): boolean;
}

interface RecentSetting extends ClockSetting {
  agoMs: number;
}

/**
 * Remembers the last hundred settings of a clock; `earlier`: those of before this process started, the oldest first.
 */
export function createClockHistory(earlier: readonly ClockSetting[]): ClockHistory {
  let settings = [...earlier];
  return {
    add(byMs, nowMs) {
      settings = [...settings.slice(1 - SETTINGS_MAX), { atMs: nowMs, byMs }];
    },
    since(sinceMs) {
      let sumMs = 0;
      // From the latest: the moments need not be in order, as a clock that was ahead was later set back.
      for (const { atMs, byMs } of settings.toReversed()) {
        if (isAfter(sinceMs, atMs)) break;
        sumMs += byMs;
      }
      return sumMs;
    },
    recent,
    saidTwice: (saidMs, withinMs, nowMs) =>
      recent(withinMs, nowMs).some(
        ({ atMs, byMs }) => isAfter(saidMs, atMs) && saidMs <= atMs - byMs + STEP_MS,
      ),
  };

  function recent(withinMs: number, nowMs: number): RecentSetting[] {
    const recent: RecentSetting[] = [];
    let sumMs = 0;
    for (const { atMs, byMs } of settings.toReversed()) {
      const agoMs = nowMs - atMs - sumMs;
      if (agoMs >= withinMs) break;
      recent.unshift({ agoMs, atMs, byMs });
      sumMs += byMs;
    }
    return recent;
  }
}

/**
 * Whether what began at `momentMs` began after a setting that was noticed at `atMs`. A ladder is dated one millisecond
 * before its first attempt, which may be made as soon as the setting is noticed.
 */
function isAfter(momentMs: number, atMs: number): boolean {
  return momentMs >= atMs - 1;
}
