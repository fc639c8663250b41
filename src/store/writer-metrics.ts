import { lagHistogram } from '../event-loop.ts';
import {
  createCounter,
  createGauge,
  createHistogram,
  type Histogram,
  type Metric,
  sharedCells,
} from '../metric-cells.ts';

export type CheckpointKind = 'background' | 'catch_up';

/** The metrics of the writer's thread; durations in milliseconds. */
export interface WriterMetrics {
  committed(writes: number, durationMs: number): void;
  commitFailed(): void;
  queued(writes: number): void;
  checkpointed(kind: CheckpointKind, durationMs: number): void;
  lag: Histogram;
  all: Metric[];
}

const CHECKPOINT = {
  name: 'davit_checkpoint_duration_seconds',
  help: 'Copying the WAL into the file: beside the writer, or by the writer itself when that falls behind.',
  bounds: [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10],
};

/** The metrics in `memory`, which the writer's thread and the one that serves the metrics share. */
export function writerMetrics(memory: SharedArrayBuffer): WriterMetrics {
  const cells = sharedCells(memory);
  const duration = createHistogram(cells, {
    name: 'davit_commit_duration_seconds',
    help: 'One transaction of the writer: all writes that arrived together, and the commit with its fsync.',
    bounds: [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5],
  });
  const writes = createHistogram(cells, {
    name: 'davit_commit_writes',
    help: 'How many writes shared one transaction.',
    bounds: [1, 2, 4, 8, 16, 32, 64, 128, 256],
  });
  const failures = createCounter(cells, {
    name: 'davit_commit_failures_total',
    help: 'Transactions that the database did not take, because the disk is full for instance.',
  });
  const queued = createGauge(cells, {
    name: 'davit_writes_queued',
    help: 'Writes that waited for the next transaction when the last one ended.',
  });
  const checkpoints = {
    background: createHistogram(cells, CHECKPOINT, { kind: 'background' }),
    catch_up: createHistogram(cells, CHECKPOINT, { kind: 'catch_up' }),
  };
  const lag = lagHistogram(cells, 'writer');

  return {
    committed(count, durationMs) {
      duration.observe(durationMs / 1000);
      writes.observe(count);
    },
    commitFailed: () => failures.add(),
    queued: queued.set,
    checkpointed: (kind, durationMs) => checkpoints[kind].observe(durationMs / 1000),
    lag,
    all: [duration, writes, failures, queued, checkpoints.background, checkpoints.catch_up, lag],
  };
}
