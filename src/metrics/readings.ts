import { setImmediate as nextTurn } from 'node:timers/promises';
import { type Metric, readMetric } from '../metric-cells.ts';
import { statusOf } from '../paths.ts';
import { COUNTED_MAX, type DueDeliveries, SEARCHED_MAX } from '../store/gauges.ts';
import type { Reads } from '../store/store.ts';
import { walBytesOf } from '../store/wal.ts';

/** The deliveries that are due at `nowMs`. Stops early once `isWanted` is false. */
export async function dueMetrics(
  { gauges }: Reads,
  nowMs: number,
  isWanted: () => boolean,
): Promise<Metric[]> {
  const dueCount = gauges.beginDueCount(nowMs);
  while (isWanted() && dueCount.step()) await nextTurn();
  const series = (value: (due: DueDeliveries) => number) =>
    Object.entries(dueCount.due).map(([receiver, due]) => ({ labels: { receiver }, value: value(due) }));
  return [
    readMetric(
      'gauge',
      {
        name: 'davit_deliveries_due',
        help: `Deliveries that are due, in flight or not, counted up to ${COUNTED_MAX}. A receiver is failing from a failed attempt to the next that succeeds.`,
      },
      series(({ count }) => count),
    ),
    readMetric(
      'gauge',
      {
        name: 'davit_delivery_oldest_due_age_seconds',
        help: 'How long the oldest due delivery has been due; 0 if none is.',
      },
      series(({ oldestAtMs }) => (oldestAtMs === null ? 0 : (nowMs - oldestAtMs) / 1000)),
    ),
  ];
}

/** The values of the label `runner`, each with whether another system reports its deployments. */
const RUNNERS = { davit: false, external: true };

/** Unfinished deployments by status and runner, and how many commands may run. */
export function deploymentMetrics({ gauges }: Reads, commandSlots: number): Metric[] {
  const unfinished = gauges.unfinished();
  const series = Object.entries(RUNNERS).flatMap(([runner, isReported]) =>
    (['queued', 'running', 'canceling'] as const).map((status) => ({
      labels: { status, runner },
      value: unfinished.find((row) => row.status === status && row.reported === isReported)?.count ?? 0,
    })),
  );
  return [
    readMetric(
      'gauge',
      {
        name: 'davit_deployments',
        help: `Deployments that are not over, by who carries them out: davit, or an external system that reports. External ones count only if they are among the ${SEARCHED_MAX} oldest deployments that are not over.`,
      },
      series,
    ),
    readMetric('gauge', { name: 'davit_command_slots', help: 'How many commands may run at a time.' }, [
      { value: commandSlots },
    ]),
  ];
}

/** How large the file and its WAL are. */
export function fileMetrics(dbPath: string): Metric[] {
  return [
    readMetric('gauge', { name: 'davit_database_size_bytes', help: 'The file, without its WAL.' }, [
      { value: statusOf(dbPath)?.size ?? 0 },
    ]),
    readMetric('gauge', { name: 'davit_wal_size_bytes', help: 'The WAL of the file.' }, [
      { value: walBytesOf(dbPath) },
    ]),
  ];
}
