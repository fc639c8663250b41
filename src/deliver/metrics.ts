import { lagHistogram } from '../event-loop.ts';
import {
  type Counter,
  createCounter,
  createGauge,
  createHistogram,
  type Histogram,
  type Metric,
  sharedCells,
} from '../metric-cells.ts';
import type { DueDelivery } from '../store/outbox.ts';
import type { Settled, Settlement } from '../store/settlements.ts';

/** The metrics of the dispatcher thread. */
export interface DeliveryMetrics {
  /** An attempt begins. `atMs`: since 1970; `isFailing`: the receiver's previous attempt failed. */
  began(delivery: DueDelivery, isFailing: boolean, atMs: number): void;
  /** An attempt has ended, whatever its result. */
  ended(): void;
  /** The result of an attempt is recorded, which does not happen for one that was stopped. */
  settled(settlement: Settlement, settled: Settled): void;
  /** A webhook was disabled by the result of an attempt. */
  disabled(): void;
  lag: Histogram;
  all: Metric[];
}

/** The label for an attempt's `error` or status, so that the labels stay few whatever receivers do. */
const ERROR_CLASSES = [
  'http_3xx',
  'http_4xx',
  'http_5xx',
  'timeout',
  'dns',
  'address_refused',
  'url_refused',
  'connection_refused',
  'connection_reset',
  'connection_closed',
  'connection_failed',
  'unreachable',
  'tls',
  'invalid_response',
  'other',
] as const;
type ErrorClass = (typeof ERROR_CLASSES)[number];

const ATTEMPTS = {
  name: 'davit_delivery_attempts_total',
  help: 'Attempts to deliver an event, by outcome; error is empty for those that were delivered.',
};
const ATTEMPT_DURATION = {
  name: 'davit_delivery_attempt_duration_seconds',
  help: 'From the start of an attempt to the status of the answer, or to its failure.',
  bounds: [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10],
};
const WAIT = {
  name: 'davit_delivery_wait_seconds',
  help: 'From an event, in the transaction that records it, to the first attempt to deliver it; if the event was held, from when its webhook was enabled.',
  bounds: [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 300],
};

/** Creates the metrics in `memory`, which the dispatcher thread writes and another reads. */
export function deliveryMetrics(memory: SharedArrayBuffer): DeliveryMetrics {
  const cells = sharedCells(memory);
  const inFlight = createGauge(cells, {
    name: 'davit_deliveries_in_flight',
    help: 'Delivery attempts that are under way.',
  });
  const exhausted = createCounter(cells, {
    name: 'davit_deliveries_exhausted_total',
    help: 'Deliveries whose last attempt has failed.',
  });
  const disabled = createCounter(cells, {
    name: 'davit_webhooks_disabled_total',
    help: 'Webhooks that davit disabled, for an answer of 410 or five days of nothing but failures.',
  });
  const delivered = createCounter(cells, ATTEMPTS, { outcome: 'delivered', error: '' });
  const failed = Object.fromEntries(
    ERROR_CLASSES.map((error) => [error, createCounter(cells, ATTEMPTS, { outcome: 'failed', error })]),
  ) as Record<ErrorClass, Counter>;
  const duration = {
    delivered: createHistogram(cells, ATTEMPT_DURATION, { outcome: 'delivered' }),
    failed: createHistogram(cells, ATTEMPT_DURATION, { outcome: 'failed' }),
  };
  const wait = {
    healthy: createHistogram(cells, WAIT, { receiver: 'healthy' }),
    failing: createHistogram(cells, WAIT, { receiver: 'failing' }),
  };
  const lag = lagHistogram(cells, 'dispatcher');

  return {
    began(delivery, isFailing, atMs) {
      inFlight.add(1);
      if (delivery.attempt_count > 0 || delivery.ladder_trigger !== 'schedule') return;
      wait[isFailing ? 'failing' : 'healthy'].observe(Math.max(0, atMs - delivery.ladder_started_at) / 1000);
    },
    ended: () => inFlight.add(-1),
    settled({ attempt, next }, settled) {
      const wasDelivered = next.kind === 'delivered';
      (wasDelivered ? delivered : failed[errorClass(attempt)]).add();
      duration[wasDelivered ? 'delivered' : 'failed'].observe(attempt.durationMs / 1000);
      if (settled === 'exhausted') exhausted.add();
    },
    disabled: () => disabled.add(),
    lag,
    all: [
      inFlight,
      exhausted,
      disabled,
      delivered,
      ...Object.values(failed),
      ...Object.values(duration),
      ...Object.values(wait),
      lag,
    ],
  };
}

function errorClass({ statusCode, error }: Settlement['attempt']): ErrorClass {
  // `tls: <what>` and `connection_failed: <code>` may say anything after the colon.
  const name = error === null ? `http_${String(statusCode).charAt(0)}xx` : error.replace(/:.*/s, '');
  return ERROR_CLASSES.find((known) => known === name) ?? 'other';
}
