import { randomBytes } from 'node:crypto';
import type { Test } from 'tap';
import type { Effects } from '../../src/effects.ts';

export interface FakeEffects extends Effects {
  /** Moves both clocks forward and runs what falls due, in order. */
  advance(byMs: number): void;
  /** Moves only the wall clock, as an administrator or NTP does. */
  jump(byMs: number): void;
}

/** A clock that stands until a test moves it. Randomness is real. */
export function fakeEffects(startMs = Date.parse('2026-11-21T08:00:00.000Z')): FakeEffects {
  let wallMs = startMs;
  let monotonicMs = 0;
  const timers = new Set<{ atMs: number; action: () => void }>();

  return {
    now: () => wallMs,
    monotonicMs: () => monotonicMs,
    randomBytes,
    after(delayMs, action) {
      const timer = { atMs: monotonicMs + delayMs, action };
      timers.add(timer);
      return () => timers.delete(timer);
    },
    advance(byMs) {
      const untilMs = monotonicMs + byMs;
      for (;;) {
        const next = [...timers].filter(({ atMs }) => atMs <= untilMs).sort((a, b) => a.atMs - b.atMs)[0];
        if (next === undefined) break;
        timers.delete(next);
        wallMs += next.atMs - monotonicMs;
        monotonicMs = next.atMs;
        next.action();
      }
      wallMs += untilMs - monotonicMs;
      monotonicMs = untilMs;
    },
    block(durationMs) {
      wallMs += durationMs;
      monotonicMs += durationMs;
    },
    jump(byMs) {
      wallMs += byMs;
    },
  };
}

/** A fake clock that advances to each timer on the next turn of the event loop. */
export function hurried(effects: FakeEffects): Effects {
  return {
    ...effects,
    after(delayMs, action) {
      setImmediate(() => effects.advance(delayMs));
      return effects.after(delayMs, action);
    },
  };
}

/** Keeps the process alive, which timers of effects do not: for a test that waits for nothing else. */
export function stayAlive(t: Test): void {
  const held = setInterval(() => {}, 60_000);
  t.teardown(() => clearInterval(held));
}
