import {
  type Counter,
  createCounter,
  createHistogram,
  type Histogram,
  type Metric,
  ownCells,
} from '../metric-cells.ts';

/** A completed request to the API. */
export interface AnsweredRequest {
  /** The route's pattern, with the names of its parameters; null if no route matched. */
  route: string | null;
  method: string;
  status: number;
  durationMs: number;
}

/** Any other is counted as `other`: clients can invent methods, and labels must stay few. */
const METHODS = new Set(['GET', 'HEAD', 'POST', 'PUT', 'PATCH', 'DELETE']);

const REQUESTS = {
  name: 'davit_http_requests_total',
  help: 'Completed requests to the API; 499: the client disconnected before the answer.',
};
const DURATION = {
  name: 'davit_http_request_duration_seconds',
  help: 'From the head of a request to the end of the answer, including waits and followed logs.',
  bounds: [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60],
};

/** The metrics of one route and method. */
interface Endpoint {
  duration: Histogram;
  /** By status. */
  counters: Map<number, Counter>;
}

/**
 * Counts requests by route, method and status, which are few. Nested maps: building a string key of all three took
 * 0.86 µs a request, instead of 0.05.
 */
export function createRequestMetrics() {
  const routes = new Map<string, Map<string, Endpoint>>();

  return {
    count(request: AnsweredRequest): void {
      const { status, durationMs } = request;
      const route = request.route ?? 'unmatched';
      const method = METHODS.has(request.method) ? request.method : 'other';
      const { duration, counters } = getOrCreate(
        getOrCreate(routes, route, () => new Map<string, Endpoint>()),
        method,
        () => ({ duration: createHistogram(ownCells, DURATION, { route, method }), counters: new Map() }),
      );
      duration.observe(durationMs / 1000);
      getOrCreate(counters, status, () =>
        createCounter(ownCells, REQUESTS, { route, method, status: String(status) }),
      ).add();
    },
    metrics(): Metric[] {
      const endpoints = [...routes.values()].flatMap((methods) => [...methods.values()]);
      return endpoints.flatMap(({ duration, counters }) => [...counters.values(), duration]);
    },
  };
}

function getOrCreate<Key, Value>(values: Map<Key, Value>, key: Key, make: () => Value): Value {
  const known = values.get(key);
  if (known !== undefined) return known;
  const value = make();
  values.set(key, value);
  return value;
}
