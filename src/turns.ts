import type { KeyId } from './domain.ts';
import { type Effects, realEffects } from './effects.ts';
import { createKeyedSlots } from './keyed-slots.ts';

/** For whom a task is run: a key, an administrator (null), or who reads what a command prints, by the pipe's descriptor. */
type Party = KeyId | number | null;

/** Runs `task` when its turn comes, and resolves to its result. Rejects with what it throws. */
type InTurn = <Result>(task: () => Result, party: Party) => Promise<Result>;

/**
 * How long tasks may occupy one turn of the event loop. With only one task in each turn, 64 connections got 1,500 lists
 * of 50 a second; with this limit, 3,200.
 */
export const TURN_MAX_MS = 5;

interface Waiter {
  party: Party;
  slot: number;
  run(): void;
}

/**
 * A queue of synchronous tasks that may take some milliseconds each, such as reads of the database. Parties take turns,
 * and the tasks of one run in the order of the calls: when all did, 500 lists of one key delayed those of others by 2 s.
 * Once they have used `turnMaxMs` of a turn of the event loop, the others wait for the next turn, so that other work runs
 * in between. An isolated task runs at once.
 */
export function createTurns({ monotonicMs }: Pick<Effects, 'monotonicMs'>, turnMaxMs = TURN_MAX_MS): InTurn {
  const waiting = createKeyedSlots(({ party }: Waiter) => party);
  let usedMs = 0;
  let ending = false;

  return (task, party) =>
    new Promise((resolve, reject) => {
      const waiter = { party, slot: 0, run };
      waiter.slot = waiting.put(waiter);
      runWaiting();

      function run(): void {
        try {
          resolve(task());
        } catch (error) {
          reject(error);
        }
      }
    });

  function runWaiting(): void {
    if (usedMs < turnMaxMs) runSome();
    if (ending) return;
    ending = true;
    setImmediate(() => {
      ending = false;
      usedMs = 0;
      if (waiting.size > 0) runWaiting();
    });
  }

  function runSome(): void {
    for (const { slot, run } of waiting) {
      const beganAtMs = monotonicMs();
      waiting.take(slot);
      run();
      usedMs += monotonicMs() - beganAtMs;
      if (usedMs >= turnMaxMs) return;
    }
  }
}

/** The queue of this thread: all of its tasks share one event loop. */
export const inTurn = createTurns(realEffects);

/**
 * The queue of this thread for long work in short tasks, which get 1 ms of each turn: all of an idle thread, and little
 * of a busy one. With ten searches of half a million rows a second in the other queue, each list of 50 took 12 ms, not 3.
 */
export const inSpareTurn = createTurns(realEffects, 1);
