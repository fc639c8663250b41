import { setImmediate as nextTurn } from 'node:timers/promises';
import { REASONS, type Reason, type TerminalStatus } from '../domain.ts';
import { type Counter, createCounter, createHistogram, type Metric, ownCells } from '../metric-cells.ts';
import type { EventEnd } from '../store/gauges.ts';
import type { Reads } from '../store/store.ts';

/** Events read in one turn of the event loop, which takes 2 ms. */
const EVENTS_AT_ONCE = 1_000;

/** All combinations that occur, so that each series is exported, at 0, before it first counts. */
const REASONS_OF: Record<TerminalStatus, (Reason | null)[]> = {
  succeeded: [null],
  failed: REASONS.filter((reason) => reason !== 'user' && reason !== 'superseded'),
  canceled: ['user', 'superseded'],
};

const FINISHED = {
  name: 'davit_deployments_finished_total',
  help: 'Deployments that ended, by status and reason; reason is empty for those that succeeded.',
};
const DURATION = {
  name: 'davit_deployment_duration_seconds',
  help: 'From the start of a deployment to its end; those that were canceled before they started do not count.',
  bounds: [1, 5, 15, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600],
};

/**
 * Counts the deployments that end from now on. Their events are read at each scrape: this costs nothing when one
 * ends, and also counts those that `davit admin` ends in its own process.
 */
export function createEndings({ gauges }: Pick<Reads, 'gauges'>) {
  const finished = new Map<string, Counter>();
  const durations = {
    succeeded: createHistogram(ownCells, DURATION, { status: 'succeeded' }),
    failed: createHistogram(ownCells, DURATION, { status: 'failed' }),
    canceled: createHistogram(ownCells, DURATION, { status: 'canceled' }),
  };
  let seenSeq = gauges.lastEventSeq();
  for (const [status, reasons] of Object.entries(REASONS_OF)) {
    for (const reason of reasons) counterOf(status, reason);
  }

  return {
    /** Counts what has ended since the last call. Stops early once `isWanted` is false. */
    async catchUp(isWanted: () => boolean): Promise<void> {
      while (isWanted()) {
        const events = gauges.eventsAfter(seenSeq, EVENTS_AT_ONCE);
        for (const event of events) count(event);
        if (events.length < EVENTS_AT_ONCE) return;
        await nextTurn();
      }
    },
    metrics: (): Metric[] => [...finished.values(), ...Object.values(durations)],
  };

  function count({ seq, status, reason, started_at, finished_at }: EventEnd): void {
    seenSeq = seq;
    // The event is not the end of a deployment, or its deployment is pruned already.
    if (status === null || finished_at === null) return;
    counterOf(status, reason).add();
    if (started_at === null) return;
    durations[status].observe(Math.max(0, finished_at - started_at) / 1000);
  }

  function counterOf(status: string, reason: Reason | null): Counter {
    const key = `${status} ${reason}`;
    const known = finished.get(key);
    if (known !== undefined) return known;
    const counter = createCounter(ownCells, FINISHED, { status, reason: reason ?? '' });
    finished.set(key, counter);
    return counter;
  }
}
