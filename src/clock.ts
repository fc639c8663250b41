import type { Effects } from './effects.ts';

/** Slewing and the time between two readings stay far below. */
const STEP_MS = 1_000;

/**
 * The wall clock, watched. Calls `onSet` when it finds, at a reading, that the clock was set since the last one,
 * before that reading returns: ahead by so much, or back if it is negative. A suspended machine that wakes up looks
 * like one whose clock was set ahead.
 */
export function createWatchedClock(effects: Effects, onSet: (byMs: number) => void): () => number {
  let originMs = effects.now() - effects.monotonicMs();
  return () => {
    const nowMs = effects.now();
    const setMs = nowMs - effects.monotonicMs() - originMs;
    originMs += setMs;
    if (Math.abs(setMs) > STEP_MS) onSet(Math.round(setMs));
    return nowMs;
  };
}

/** More than anybody sets a clock in the time of a ladder of retries. */
export const SETTINGS_MAX = 100;

export interface ClockSetting {
  /** What the clock said just after, milliseconds since 1970. */
  atMs: number;
  /** Ahead, or back if it is negative. */
  byMs: number;
}

/** What of the time between two moments never passed, as the clock was set in between. */
export interface ClockSettings {
  /** The clock says `nowMs` now, and was just set by so much. */
  add(byMs: number, nowMs: number): void;
  /** By how much it was set since it said `sinceMs`: ahead, or back if it is negative. */
  since(sinceMs: number): number;
  /**
   * How it was set in the last so long, the oldest first, each with how long ago that is. By the time that passed,
   * whatever the clock said meanwhile.
   */
  lately(withinMs: number, nowMs: number): LateSetting[];
}

interface LateSetting {
  agoMs: number;
  /** As in `ClockSetting`. */
  byMs: number;
}

/** Remembers how a clock was set, the latest hundred times; `earlier`, the oldest first, before this process was. */
export function createClockSettings(earlier: readonly ClockSetting[] = []): ClockSettings {
  let settings = [...earlier];
  return {
    add(byMs, nowMs) {
      settings = [...settings.slice(1 - SETTINGS_MAX), { atMs: nowMs, byMs }];
    },
    since(sinceMs) {
      let sumMs = 0;
      // From the latest: a clock that was ahead for a while was set at moments that are still to come.
      for (const { atMs, byMs } of settings.toReversed()) {
        if (sinceMs >= atMs) break;
        sumMs += byMs;
      }
      return sumMs;
    },
    lately(withinMs, nowMs) {
      const late: LateSetting[] = [];
      let sumMs = 0;
      for (const { atMs, byMs } of settings.toReversed()) {
        const agoMs = nowMs - atMs - sumMs;
        if (agoMs >= withinMs) break;
        late.unshift({ agoMs, byMs });
        sumMs += byMs;
      }
      return late;
    },
  };
}
