import { createWatchedClock } from '../clock.ts';
import type { Effects } from '../effects.ts';
import type { Store } from '../store/store.ts';

/** No clock is set ahead by so much for being slow: it may be wrong, and a report that is too late now was not. */
const DOUBTED_FROM_MS = 60_000;
/** Long enough for a clock to be set right again, or for what a machine was told while it slept. */
const DOUBTED_FOR_MS = 5 * 60_000;

/**
 * Ends the deployments whose report did not come in time, whenever what it gives is called; none while the clock is in
 * doubt, as no end is taken back. That resolves to the moment when the next one will be due, milliseconds since 1970; null
 * when none is waited for.
 */
export function createOverdue({ reads, writer }: Store, effects: Effects): () => Promise<number | null> {
  let doubtedUntilMs = Number.NEGATIVE_INFINITY; // on the clock that never jumps
  const now = createWatchedClock(effects, (byMs) => {
    if (byMs >= DOUBTED_FROM_MS) doubtedUntilMs = effects.monotonicMs() + DOUBTED_FOR_MS;
  });

  return async () => {
    for (;;) {
      const nowMs = now();
      const dueAtMs = reads.deployments.nextReportDueAt();
      if (dueAtMs === null || dueAtMs > nowMs) return dueAtMs;
      const doubtedForMs = doubtedUntilMs - effects.monotonicMs();
      if (doubtedForMs > 0) return nowMs + doubtedForMs;
      await writer.write('deployments.endOverdue', undefined);
    }
  };
}
