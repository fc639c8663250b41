/*
 * The metrics: counters, gauges and histograms. Their cells may be in memory that two threads share: then
 * counting takes nanoseconds and no message, and a scrape waits for no thread, so it also reports on one that hangs.
 * Only one thread writes to a cell; its 8 aligned bytes are read and written atomically on x64 and arm64.
 *
 * Why not prom-client: its histograms accept single observations only, so each observation of another thread would need
 * a message, or each thread a prom-client (112 KB of code, 1.6 MB of heap, 0.35 µs an observation).
 */

export type Labels = Readonly<Record<string, string>>;

/** One line of the exposition format, without the name of its family. */
export interface Sample {
  suffix: '' | '_bucket' | '_sum' | '_count';
  labels: Labels;
  value: number;
}

interface Definition {
  /** By Prometheus' conventions: base units, `_total` for counters, `_seconds`, `_bytes`. */
  name: string;
  help: string;
}

/** One or more series of a family; several metrics may share the family's name. */
export interface Metric extends Definition {
  type: 'counter' | 'gauge' | 'histogram';
  samples(): Sample[];
}

export interface Counter extends Metric {
  add(count?: number): void;
}

interface Gauge extends Metric {
  set(value: number): void;
  add(difference: number): void;
}

export interface Histogram extends Metric {
  observe(value: number): void;
}

export interface Cells {
  /** The next `count` cells, initially 0. */
  allocate(count: number): Float64Array;
}

/** Enough for the metrics of one thread. */
const SHARED_CELLS = 512;

/** Memory for the metrics of a thread that another thread reads. */
export function newMetricsMemory(): SharedArrayBuffer {
  return new SharedArrayBuffer(SHARED_CELLS * Float64Array.BYTES_PER_ELEMENT);
}

/** Cells in `memory`. Two threads that allocate the same counts in the same order share the same cells. */
export function sharedCells(memory: SharedArrayBuffer): Cells {
  const all = new Float64Array(memory);
  let allocated = 0;
  return {
    allocate(count) {
      allocated += count;
      if (allocated > all.length) throw new Error('there are more metrics than the memory for them holds');
      return all.subarray(allocated - count, allocated);
    },
  };
}

/** Cells for metrics that are counted and read in the same thread. */
export const ownCells: Cells = { allocate: (count) => new Float64Array(count) };

/** A value that only grows. */
export function createCounter(cells: Cells, definition: Definition, labels: Labels = {}): Counter {
  const cell = cells.allocate(1);
  return {
    ...definition,
    type: 'counter',
    samples: () => [{ suffix: '', labels, value: onlyOf(cell) }],
    add: (count = 1) => addTo(cell, 0, count),
  };
}

/** A value that goes up and down. */
export function createGauge(cells: Cells, definition: Definition): Gauge {
  const cell = cells.allocate(1);
  return {
    ...definition,
    type: 'gauge',
    samples: () => [{ suffix: '', labels: {}, value: onlyOf(cell) }],
    set: (value) => void cell.fill(value),
    add: (difference) => addTo(cell, 0, difference),
  };
}

/** The distribution of values. `bounds` are the inclusive upper bounds of the buckets, in ascending order. */
export function createHistogram(
  cells: Cells,
  { bounds, ...definition }: Definition & { bounds: readonly number[] },
  labels: Labels = {},
): Histogram {
  const counts = cells.allocate(bounds.length + 1);
  const sum = cells.allocate(1);

  return { ...definition, type: 'histogram', samples, observe };

  function observe(value: number): void {
    let index = 0;
    while (value > (bounds[index] ?? Number.POSITIVE_INFINITY)) index += 1;
    addTo(counts, index, 1);
    addTo(sum, 0, value);
  }

  function samples(): Sample[] {
    let total = 0;
    const buckets = Array.from(counts, (count, index): Sample => {
      total += count;
      const le = bounds[index] === undefined ? '+Inf' : String(bounds[index]);
      return { suffix: '_bucket', labels: { ...labels, le }, value: total };
    });
    return [
      ...buckets,
      { suffix: '_sum', labels, value: onlyOf(sum) },
      { suffix: '_count', labels, value: total },
    ];
  }
}

/** A metric whose values were read for this scrape, rather than counted. */
export function readMetric(
  type: 'counter' | 'gauge',
  definition: Definition,
  series: readonly { labels?: Labels; value: number }[],
): Metric {
  const samples = series.map(({ labels = {}, value }): Sample => ({ suffix: '', labels, value }));
  return { ...definition, type, samples: () => samples };
}

function onlyOf(cell: Float64Array): number {
  return cell[0] ?? 0;
}

function addTo(cells: Float64Array, index: number, difference: number): void {
  cells[index] = (cells[index] ?? 0) + difference;
}
