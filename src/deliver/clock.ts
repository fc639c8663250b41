import type { Effects } from '../effects.ts';

/** Slewing and the time between two readings stay far below. */
const STEP_MS = 1_000;

/**
 * The wall clock, watched. Calls `onSetBack` when it finds, at a reading, that the clock was set back since the last
 * one, before that reading returns. A clock that was set forward is believed: after a suspended machine wakes up that
 * is the truth.
 */
export function createWatchedClock(effects: Effects, onSetBack: (byMs: number) => void): () => number {
  let originMs = effects.now() - effects.monotonicMs();
  return () => {
    const nowMs = effects.now();
    const setBackMs = originMs - (nowMs - effects.monotonicMs());
    originMs -= setBackMs;
    if (setBackMs > STEP_MS) onSetBack(Math.round(setBackMs));
    return nowMs;
  };
}
