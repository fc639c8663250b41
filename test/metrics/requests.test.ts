import t from 'tap';
import { exposition } from '../../src/metrics/exposition.ts';
import { createRequestMetrics } from '../../src/metrics/requests.ts';
import { movedOf, parseMetrics } from '../helpers/metrics.ts';

t.test('requests are counted by route, method and status, and timed by route and method', async (t) => {
  const requests = createRequestMetrics();
  t.strictSame(requests.metrics(), []);
  const route = '/v2/projects/{project_id}';
  for (const [method, status, durationMs] of [
    ['GET', 200, 4],
    ['GET', 200, 2_000],
    ['GET', 404, 1],
    ['HEAD', 200, 1],
    ['DELETE', 204, 1],
  ] as const) {
    requests.count({ route, method, status, durationMs });
  }
  const scrape = parseMetrics(exposition(requests.metrics()));
  t.strictSame(movedOf(scrape, 'davit_http_requests_total'), [
    [`${route} DELETE 204`, 1],
    [`${route} GET 200`, 2],
    [`${route} GET 404`, 1],
    [`${route} HEAD 200`, 1],
  ]);
  const duration = 'davit_http_request_duration_seconds';
  t.equal(scrape.value(`${duration}_sum`, { route, method: 'GET' }), 2.005);
  t.equal(scrape.value(`${duration}_bucket`, { route, method: 'GET', le: '1' }), 2);
  t.equal(scrape.value(`${duration}_bucket`, { route, method: 'GET', le: '2.5' }), 3);
});

t.test('unknown methods and routes share one series', async (t) => {
  const requests = createRequestMetrics();
  for (const method of ['OPTIONS', 'PROPFIND', 'M-SEARCH', '__proto__', 'get']) {
    requests.count({ route: null, method, status: 404, durationMs: 1 });
  }
  t.strictSame(movedOf(parseMetrics(exposition(requests.metrics())), 'davit_http_requests_total'), [
    ['unmatched other 404', 5],
  ]);
});
