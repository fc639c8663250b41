import { setImmediate as nextTurn } from 'node:timers/promises';
import { type Figure, readFigure } from '../figures.ts';
import { COUNTED_MAX, type DueDeliveries, LOOKED_AT_MAX } from '../store/gauges.ts';
import { statusOf } from '../store/place.ts';
import type { Reads } from '../store/store.ts';
import { walBytesOf } from '../store/wal.ts';

/** Deliveries whose time has come, at `nowMs`. Ends early once `isWanted` no longer says so. */
export async function dueFigures(
  { gauges }: Reads,
  nowMs: number,
  isWanted: () => boolean,
): Promise<Figure[]> {
  const look = gauges.lookAtDue(nowMs);
  while (isWanted() && look.step()) await nextTurn();
  const series = (value: (due: DueDeliveries) => number) =>
    Object.entries(look.due).map(([receiver, due]) => ({ labels: { receiver }, value: value(due) }));
  return [
    readFigure(
      'gauge',
      {
        name: 'davit_deliveries_due',
        help: `Deliveries whose time has come, those in flight among them, counted up to ${COUNTED_MAX}. A receiver is failing from a failed attempt to the next that succeeds.`,
      },
      series(({ count }) => count),
    ),
    readFigure(
      'gauge',
      {
        name: 'davit_delivery_oldest_due_age_seconds',
        help: 'For how long the delivery that is due first has been due; 0 if none is.',
      },
      series(({ oldestAtMs }) => (oldestAtMs === null ? 0 : Math.max(0, nowMs - oldestAtMs) / 1000)),
    ),
  ];
}

const RUNNERS = { davit: false, external: true };

/** Deployments by state, and how many commands may run. */
export function deploymentFigures({ gauges }: Reads, commandSlots: number): Figure[] {
  const unfinished = gauges.unfinished();
  const series = Object.entries(RUNNERS).flatMap(([runner, isReported]) =>
    (['queued', 'running', 'canceling'] as const).map((status) => ({
      labels: { status, runner },
      value: unfinished.find((row) => row.status === status && row.reported === isReported)?.count ?? 0,
    })),
  );
  return [
    readFigure(
      'gauge',
      {
        name: 'davit_deployments',
        help: `Deployments that are not over, by who carries them out: davit, or another system that reports; of those the ones among the ${LOOKED_AT_MAX} oldest deployments that are not over.`,
      },
      series,
    ),
    readFigure('gauge', { name: 'davit_command_slots', help: 'How many commands may run at a time.' }, [
      { value: commandSlots },
    ]),
  ];
}

/** How large the file and its WAL are. */
export function fileFigures(dbPath: string): Figure[] {
  return [
    readFigure('gauge', { name: 'davit_database_size_bytes', help: 'The file, without its WAL.' }, [
      { value: statusOf(dbPath)?.size ?? 0 },
    ]),
    readFigure('gauge', { name: 'davit_wal_size_bytes', help: 'The WAL of the file.' }, [
      { value: walBytesOf(dbPath) },
    ]),
  ];
}
