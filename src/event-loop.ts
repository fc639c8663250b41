import type { Effects } from './effects.ts';
import { type Cells, createHistogram, type Histogram } from './figures.ts';
import { type Loop, startLoop } from './loop.ts';

const LOOK_EVERY_MS = 100;

/** How late timers of a thread are. */
export function lagFigure(cells: Cells, thread: 'http' | 'writer' | 'dispatcher'): Histogram {
  return createHistogram(
    cells,
    {
      name: 'davit_event_loop_lag_seconds',
      help: 'How late a timer of the thread was, ten times a second: for so long whatever else comes waits too.',
      bounds: [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10],
    },
    { thread },
  );
}

/** Observes the lag of this thread from now on. */
export function watchLag(lag: Histogram, effects: Effects): Loop {
  let dueAtMs: number | undefined;
  return startLoop(
    async () => {
      const nowMs = effects.monotonicMs();
      if (dueAtMs !== undefined) lag.observe(Math.max(0, nowMs - dueAtMs) / 1000);
      dueAtMs = nowMs + LOOK_EVERY_MS;
      return null;
    },
    // There is nothing in it that could fail.
    { idleMs: LOOK_EVERY_MS, effects, onError: () => undefined },
  );
}
