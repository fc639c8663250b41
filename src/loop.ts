import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Effects } from './effects.ts';
import { isUnavailable } from './errors.ts';

/** How often to check for writes of other processes, most often `davit admin`. */
export const POLL_OTHER_PROCESSES_EVERY_MS = 500;

export interface Loop {
  /** Something may have changed: tick now, or again right after the current tick. */
  wake(): void;
  /** How long ago the last successful tick began. While the loop works, this does not grow far beyond `idleMs`. */
  quietMs(): number;
  /** Resolves when the current tick has ended; no other one follows. */
  stop(): Promise<void>;
}

/**
 * Calls `tick` repeatedly. After each call it sleeps until the time that `tick` returned (milliseconds since 1970; null:
 * none is known), until `wake`, or for `idleMs`, whichever is first; `idleMs` bounds how late writes of other processes
 * are found. A tick that throws does not end the loop: `onError` is told, but of a database that takes no writes only
 * once until a tick succeeds.
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
        // Capped, so that a clock that is set back delays the next tick by no more than `idleMs`.
        if (untilNextMs > 0) await sleep(Math.min(untilNextMs, idleMs));
      }
      // Several wakes in one turn of the event loop cause one tick, and consecutive ticks let other work run in between.
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
