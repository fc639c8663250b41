import type { Effects } from './effects.ts';
import { type Loop, startLoop } from './loop.ts';
import { type Cells, createHistogram, type Histogram } from './metric-cells.ts';

const MEASURE_EVERY_MS = 100;

/** How late a thread's timers fire. */
export function lagHistogram(cells: Cells, thread: 'http' | 'writer' | 'dispatcher'): Histogram {
  return createHistogram(
    cells,
    {
      name: 'davit_event_loop_lag_seconds',
      help: 'How late a timer of the thread fired, measured ten times a second: other work waits as long.',
      bounds: [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10],
    },
    { thread },
  );
}

/** Measures the lag of this thread from now on. */
export function watchLag(lag: Histogram, effects: Effects): Loop {
  let dueAtMs: number | undefined;
  return startLoop(
    async () => {
      const nowMs = effects.monotonicMs();
      if (dueAtMs !== undefined) lag.observe(Math.max(0, nowMs - dueAtMs) / 1000);
      dueAtMs = nowMs + MEASURE_EVERY_MS;
      return null;
    },
    // The tick cannot fail.
    { idleMs: MEASURE_EVERY_MS, effects, onError: () => undefined },
  );
}
