import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Effects } from './effects.ts';
import { isUnavailable } from './errors.ts';

/** What other processes wrote, `davit admin` as a rule, is found at the latest after this. */
export const LOOK_OUTSIDE_EVERY_MS = 500;

export interface Loop {
  /** Something may have changed: look now, or right after the look that is under way. */
  wake(): void;
  /** How long ago the last look began that did not fail. A loop that turns never lets this grow far beyond `idleMs`. */
  quietMs(): number;
  /** Resolves when the look that is under way has ended; there is none after it. */
  stop(): Promise<void>;
}

/**
 * Looks for work over and over: `await tick()`, then sleep until the moment that it returned (milliseconds
 * since 1970; null: nothing is known to come), a wake, or `idleMs`, whichever is first. `idleMs` is what
 * finds the writes of other processes. A tick that throws is a bug: `onError` hears of it, and the loop goes on. Of a
 * database that takes no writes it hears once, until a tick succeeds.
 */
export function startLoop(
  tick: () => Promise<number | null>,
  options: { idleMs: number; effects: Effects; onError: (error: unknown) => void },
): Loop {
  const { idleMs, effects, onError } = options;
  let stopped = false;
  let woken = false;
  let endSleep: (() => void) | undefined;
  let unavailable = false;
  let turnedAtMs = effects.monotonicMs();
  const ended = run();

  return {
    wake() {
      woken = true;
      endSleep?.();
    },
    quietMs: () => effects.monotonicMs() - turnedAtMs,
    stop() {
      stopped = true;
      endSleep?.();
      return ended;
    },
  };

  async function run(): Promise<void> {
    while (!stopped) {
      woken = false;
      const nextAtMs = await tickSafely();
      if (!stopped && !woken) {
        const untilNextMs = nextAtMs === null ? idleMs : nextAtMs - effects.now();
        // Capped, so that a clock that jumps backwards delays nothing for longer than an idle look.
        if (untilNextMs > 0) await sleep(Math.min(untilNextMs, idleMs));
      }
      // All that one turn of the event loop brings is one look's work, and no row of looks keeps others waiting.
      await nextTurn();
    }
  }

  async function tickSafely(): Promise<number | null> {
    const beganAtMs = effects.monotonicMs();
    try {
      const nextAtMs = await tick();
      turnedAtMs = beganAtMs;
      unavailable = false;
      return nextAtMs;
    } catch (error) {
      if (!(unavailable && isUnavailable(error))) onError(error);
      unavailable = isUnavailable(error);
      return null;
    }
  }

  function sleep(delayMs: number): Promise<void> {
    return new Promise((resolve) => {
      const cancel = effects.after(delayMs, resolve);
      endSleep = () => {
        cancel();
        resolve();
      };
    });
  }
}
