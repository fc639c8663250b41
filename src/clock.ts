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
