import { type ClockSettings, createWatchedClock } from '../clock.ts';
import type { Effects } from '../effects.ts';
import type { Store } from '../store/store.ts';

/** A clock that is set ahead by more was not just slow: it may be wrong now, and no report really overdue. */
const DOUBTED_FROM_MS = 60_000;
/** Long enough for the clock to be corrected, or, if the machine slept, for reports to come in. */
const DOUBTED_FOR_MS = 5 * 60_000;

/**
 * Gives a function that ends deployments whose report is overdue, a batch at each call, but none while the clock is in
 * doubt, as no end can be taken back. It resolves to when it should be called next, in milliseconds since 1970; null: no
 * report is awaited. `clockSettings`: how the clock was set before this start.
 */
export function createOverdue(
  { reads, writer }: Store,
  clockSettings: ClockSettings,
  effects: Effects,
): () => Promise<number | null> {
  let doubtedUntilMs = Number.NEGATIVE_INFINITY; // on the monotonic clock
  /** By how much the clock was set back, until that is written. */
  let setBackMs = 0;
  const now = createWatchedClock(effects, (byMs) => {
    doubt(byMs);
    if (byMs < 0) setBackMs -= byMs;
  });
  // A restart does not end the doubt.
  for (const { byMs, agoMs } of clockSettings.recent(DOUBTED_FOR_MS, effects.now())) doubt(byMs, agoMs);

  return async () => {
    const nowMs = now();
    if (setBackMs > 0) {
      await writer.write('deployments.setReportsBack', { byMs: setBackMs });
      setBackMs = 0;
    }
    const dueAtMs = reads.deployments.nextReportDueAt();
    if (dueAtMs === null || dueAtMs > nowMs) return dueAtMs;
    const doubtedForMs = doubtedUntilMs - effects.monotonicMs();
    if (doubtedForMs > 0) return nowMs + doubtedForMs;
    await writer.write('deployments.endOverdue', { dueByMs: nowMs });
    // There may be more. They are left to the next call, as a stop waits for this one: 200,000 took 5.5 s.
    return nowMs;
  };

  function doubt(setMs: number, agoMs = 0): void {
    if (setMs >= DOUBTED_FROM_MS) doubtedUntilMs = effects.monotonicMs() + DOUBTED_FOR_MS - agoMs;
  }
}
