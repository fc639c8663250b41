import { createWatchedClock } from '../clock.ts';
import { MINUTE_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import type { NoticedSetting } from '../store/reports.ts';
import type { Store } from '../store/store.ts';

/** By less, a report is ended early or late: what was created before the clock was set cannot be told from the rest. */
const CLOCK_SET_MIN_MS = MINUTE_MS;

/**
 * Gives a function that ends deployments whose report is overdue, a batch at each call. A report is awaited for a time
 * that passed, whatever the clock says: when that is set, ahead or back, what is awaited is due as much later or earlier,
 * as no end can be taken back. It resolves to when it should be called next, in milliseconds since 1970; null: no report
 * is awaited.
 */
export function createOverdue({ reads, writer }: Store, effects: Effects): () => Promise<number | null> {
  let lastSeq = reads.deployments.newestSeq();
  /** How the clock was set, the oldest first, until that is written. */
  let unwritten: NoticedSetting[] = [];
  const now = createWatchedClock(effects, (byMs, atMs) => {
    if (Math.abs(byMs) >= CLOCK_SET_MIN_MS) unwritten.push({ byMs, atMs, lastSeq });
  });

  return async () => {
    const newestSeq = reads.deployments.newestSeq();
    const nowMs = now();
    lastSeq = newestSeq;
    for (const change of unwritten) {
      await writer.write('deployments.moveReportsDue', change);
      unwritten = unwritten.slice(1);
    }
    const dueAtMs = reads.deployments.nextReportDueAt();
    if (dueAtMs === null || dueAtMs > nowMs) return dueAtMs;
    await writer.write('deployments.endOverdue', { dueByMs: nowMs });
    // There may be more. They are left to the next call, as a stop waits for this one: 200,000 took 5.5 s.
    return nowMs;
  };
}
