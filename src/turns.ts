import { type Effects, realEffects } from './effects.ts';

/** Runs `task` when its turn comes, and resolves to its result. Rejects with what it throws. */
type InTurn = <Result>(task: () => Result) => Promise<Result>;

/**
 * How long tasks may occupy one turn of the event loop. With only one task in each turn, 64 connections got 1,500 lists
 * of 50 a second; with this limit, 3,200.
 */
export const TURN_MAX_MS = 5;

/**
 * A queue of synchronous tasks that may take some milliseconds each, such as reads of the database. They run in the
 * order of the calls. Once they have used `turnMaxMs` of a turn of the event loop, the others wait for the next turn,
 * so that other work runs in between. An isolated task runs at once.
 */
export function createTurns({ monotonicMs }: Pick<Effects, 'monotonicMs'>, turnMaxMs = TURN_MAX_MS): InTurn {
  const waiting: (() => void)[] = [];
  let usedMs = 0;
  let ending = false;

  return (task) =>
    new Promise((resolve, reject) => {
      waiting.push(() => {
        try {
          resolve(task());
        } catch (error) {
          reject(error);
        }
      });
      runWaiting();
    });

  function runWaiting(): void {
    while (waiting.length > 0 && usedMs < turnMaxMs) {
      const beganAtMs = monotonicMs();
      waiting.shift()?.();
      usedMs += monotonicMs() - beganAtMs;
    }
    if (ending) return;
    ending = true;
    setImmediate(() => {
      ending = false;
      usedMs = 0;
      if (waiting.length > 0) runWaiting();
    });
  }
}

/** The queue of this thread: all of its tasks share one event loop. */
export const inTurn = createTurns(realEffects);

/**
 * The queue of this thread for long work in short tasks, which get 1 ms of each turn: all of an idle thread, and little
 * of a busy one. With ten searches of half a million rows a second in the other queue, each list of 50 took 12 ms, not 3.
 */
export const inSpareTurn = createTurns(realEffects, 1);
