import {
  type Counter,
  createCounter,
  createHistogram,
  type Figure,
  type Histogram,
  ownCells,
} from '../figures.ts';

/** A request to the API that is over. */
export interface AnsweredRequest {
  /** As it was registered, with the names of its parameters; null: there is none. */
  route: string | null;
  method: string;
  status: number;
  durationMs: number;
}

/** Any other is no method of the API, and a client may make up what it likes. */
const METHODS = new Set(['GET', 'HEAD', 'POST', 'PUT', 'PATCH', 'DELETE']);

const REQUESTS = {
  name: 'davit_http_requests_total',
  help: 'Requests to the API that are over; 499: the client left before the answer.',
};
const DURATION = {
  name: 'davit_http_request_duration_seconds',
  help: 'From the head of a request to the end of the answer, waits and followed logs among them.',
  bounds: [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60],
};

/** What was asked of a route with one method. */
interface Endpoint {
  duration: Histogram;
  /** By status. */
  counters: Map<number, Counter>;
}

/**
 * Counts requests by route, method and status, all three of which are few. Looked up one by one: as a key of all
 * three, a new text each time, they cost 0.86 µs in place of 0.05.
 */
export function createRequestFigures() {
  const routes = new Map<string, Map<string, Endpoint>>();

  return {
    count(request: AnsweredRequest): void {
      const { status, durationMs } = request;
      const route = request.route ?? 'unmatched';
      const method = METHODS.has(request.method) ? request.method : 'other';
      const { duration, counters } = kept(
        kept(routes, route, () => new Map<string, Endpoint>()),
        method,
        () => ({ duration: createHistogram(ownCells, DURATION, { route, method }), counters: new Map() }),
      );
      duration.observe(durationMs / 1000);
      kept(counters, status, () =>
        createCounter(ownCells, REQUESTS, { route, method, status: String(status) }),
      ).add();
    },
    figures(): Figure[] {
      const endpoints = [...routes.values()].flatMap((methods) => [...methods.values()]);
      return endpoints.flatMap(({ duration, counters }) => [...counters.values(), duration]);
    },
  };
}

function kept<Key, Value>(values: Map<Key, Value>, key: Key, make: () => Value): Value {
  const known = values.get(key);
  if (known !== undefined) return known;
  const value = make();
  values.set(key, value);
  return value;
}
