import { type Effects, realEffects } from './effects.ts';

/** Resolves to what `look` gives, as soon as it had its turn. Rejects with what it throws. */
type InTurn = <Result>(look: () => Result) => Promise<Result>;

/**
 * So long looks may hold up a turn of the event loop. With one look in each, however short, lists of 50 were 1,500 a
 * second to 64 connections, and 3,200 like this.
 */
export const TURN_MAX_MS = 5;

/**
 * For looks into the file that may take some milliseconds each: first come first served, and no more in one turn of the
 * event loop than have begun within `TURN_MAX_MS`, so that whatever else has arrived gets on in between. Who comes alone
 * does not wait.
 */
export function createTurns({ monotonicMs }: Pick<Effects, 'monotonicMs'>): InTurn {
  const waiting: (() => void)[] = [];
  let usedMs = 0;
  let ending = false;

  return (look) =>
    new Promise((resolve, reject) => {
      waiting.push(() => {
        try {
          resolve(look());
        } catch (error) {
          reject(error);
        }
      });
      goOn();
    });

  function goOn(): void {
    while (waiting.length > 0 && usedMs < TURN_MAX_MS) {
      const beganAtMs = monotonicMs();
      waiting.shift()?.();
      usedMs += monotonicMs() - beganAtMs;
    }
    if (ending) return;
    ending = true;
    setImmediate(() => {
      ending = false;
      usedMs = 0;
      if (waiting.length > 0) goOn();
    });
  }
}

/** Of this thread, whose event loop all its looks share. */
export const inTurn = createTurns(realEffects);
