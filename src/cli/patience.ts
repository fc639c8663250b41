import { delay } from '../effects.ts';
import { AppError } from '../errors.ts';
import type { CommandContext } from './command.ts';
import { tookText } from './moments.ts';

/** The service was not reached, and there is no retry left, or none would help. */
export class GaveUp extends AppError {
  constructor(message: string, options: { cause?: unknown } = {}) {
    super('unavailable', message, options);
  }
}

/** The waits between retries. */
export interface Patience {
  /** To be called on success: the time for retries restarts with the next failure. */
  reset(): void;
  /**
   * Waits longer each time, at least what the service asks for, and at most what is left of the time for retries.
   * Throws GaveUp when that is over, or too short for what the service asks for. `unansweredSinceMs`: when what got no
   * answer had to be answered, on the monotonic clock; the time for retries begins then, if that is earlier than now.
   */
  wait(why: string, retryAfterMs?: number, unansweredSinceMs?: number): Promise<void>;
}

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15_000;

/** Retries for `limitMs` from the first failed try since a success on. Notes each wait. */
export function createPatience(
  limitMs: number,
  { effects, terminal }: Pick<CommandContext, 'effects' | 'terminal'>,
): Patience {
  let failures = 0;
  let sinceMs: number | undefined;

  return {
    reset() {
      failures = 0;
      sinceMs = undefined;
    },
    async wait(why, retryAfterMs = 0, unansweredSinceMs = Number.POSITIVE_INFINITY) {
      const nowMs = effects.monotonicMs();
      sinceMs ??= Math.min(unansweredSinceMs, nowMs);
      const [random = 0] = effects.randomBytes(1);
      // Up to a third less, so that jobs that a restart has cut off do not all come back at once.
      const ownMs = Math.min(FIRST_DELAY_MS * 2 ** failures, LONGEST_DELAY_MS) * (1 - random / 768);
      const leftMs = limitMs - (nowMs - sinceMs);
      failures += 1;
      if (leftMs <= 0) throw new GaveUp(`${why}, and --retry-for is over: gave up`);
      if (retryAfterMs > leftMs) {
        const asked = tookText(retryAfterMs);
        throw new GaveUp(`${why} and asks to wait ${asked}, longer than --retry-for leaves: gave up`);
      }
      // The last retry is made at the end of the time.
      const delayMs = Math.ceil(Math.min(Math.max(ownMs, retryAfterMs), leftMs));
      terminal.note(`${why}: trying again in ${tookText(delayMs)}`);
      await delay(delayMs, effects);
    },
  };
}
