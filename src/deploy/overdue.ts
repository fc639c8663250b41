import { createWatchedClock } from '../clock.ts';
import { MINUTE_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import type { ClockChange } from '../store/reports.ts';
import type { Store } from '../store/store.ts';

/** By less, a report is ended early or late: what was created before the clock was set cannot be told from the rest. */
const CLOCK_SET_MIN_MS = MINUTE_MS;

/**
 * Gives a function that ends deployments whose report is overdue, a batch at each call. A report is awaited for a time
 * that passed, whatever the clock says: when that is set, ahead or back, what is awaited is due as much later or earlier,
 * as no end can be taken back. It resolves to when it should be called next, in milliseconds since 1970; null: no report
 * is awaited. To be made before anything is created, and before the dispatcher records how the clock was set back while
 * davit did not run.
 */
export function createOverdue({ reads, writer }: Store, effects: Effects): () => Promise<number | null> {
  const startedAtMs = effects.now();
  const startSeq = reads.deployments.newestSeq();
  let lastSeq = startSeq;
  let setBackMs = reads.instance.setBackMs(startedAtMs);
  /**
   * By how much the clock may have been ahead at the start, as for so long, by it, nothing had happened. Set back by as
   * much, it may have been put right: then what was created before is due when it was.
   */
  let doubtedMs = reads.instance.quietMs(startedAtMs);
  /** How the clock was set, the oldest first, until that is written. */
  let unwritten: ClockChange[] = [];
  const now = createWatchedClock(effects, noteSetting);

  return async () => {
    const newestSeq = reads.deployments.newestSeq();
    const nowMs = now();
    lastSeq = newestSeq;
    // Only once it is recorded: the next start would find it out again, and move what is awaited twice.
    if (setBackMs > 0 && reads.instance.setBackMs(startedAtMs) === 0) {
      noteSetting(-setBackMs, startedAtMs);
      setBackMs = 0;
    }
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

  function noteSetting(byMs: number, atMs: number): void {
    if (Math.abs(byMs) < CLOCK_SET_MIN_MS) return;
    const putRightMs = Math.min(doubtedMs, Math.max(0, -byMs));
    doubtedMs -= putRightMs;
    unwritten.push({ byMs, earlierByMs: byMs + putRightMs, startSeq, atMs, lastSeq });
  }
}
