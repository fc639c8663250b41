import { writeFileSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { pino } from 'pino';
import t from 'tap';
import { RECOVERY_WAIT_MS } from '../../src/app.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { startMetrics } from '../../src/metrics/metrics.ts';
import type { Reads } from '../../src/store/store.ts';
import { namedPipe, until } from '../helpers/commands.ts';
import { newDeliveries, newWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { connectRaw } from '../helpers/http.ts';
import { movedOf, parseMetrics, type Scrape } from '../helpers/metrics.ts';
import { startReceiver, status } from '../helpers/receiver.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';
import { startWholeService, type WholeService } from '../helpers/whole-service.ts';

const METRICS_ON = { metricsListen: { host: '127.0.0.1', port: 0 } };

t.test('a deployment, its delivery and the requests for them are counted', async (t) => {
  const service = await startWholeService(t, METRICS_ON);
  const receiver = await startReceiver(t, { answers: [status(200)] });
  const { secret } = await service.key();
  const projectId = await service.project({ command: ['/bin/false'] });
  const before = await scrape(service);
  t.strictSame(movedOf(before, 'davit_delivery_attempts_total'), []);
  t.strictSame(movedOf(before, 'davit_deployments_finished_total'), []);

  const headers = { authorization: `Bearer ${secret}`, 'content-type': 'application/json' };
  const post = (path: string, body: unknown) =>
    fetch(`${service.url}${path}`, { method: 'POST', headers, body: JSON.stringify(body) });
  await post('/v2/webhooks', { url: receiver.url, events: ['deployment.failed'] });
  await post(`/v2/projects/${projectId}/deployments`, { ref: 'main' });
  await post('/v2/projects/prj_unknown/deployments', { ref: 'main' });
  await fetch(`${service.url}/v2/no/such/thing`, { method: 'PATCH' });
  await receiver.next();
  const after = await scrapeUntil(
    service,
    ({ value }) => value('davit_delivery_attempts_total', { outcome: 'delivered', error: '' }) === 1,
  );

  t.strictSame(movedOf(after, 'davit_deployments_finished_total'), [['failed exit_code', 1]]);
  t.strictSame(movedOf(after, 'davit_deployment_duration_seconds_count'), [['failed', 1]]);
  t.strictSame(movedOf(after, 'davit_delivery_wait_seconds_count'), [['healthy', 1]]);
  t.strictSame(movedOf(after, 'davit_delivery_attempt_duration_seconds_count'), [['delivered', 1]]);
  t.strictSame(
    movedOf(after, 'davit_http_requests_total').filter(([labels]) => !labels.includes('openapi')),
    [
      ['/v2/projects/{project_id}/deployments POST 201', 1],
      ['/v2/projects/{project_id}/deployments POST 404', 1],
      ['/v2/webhooks POST 201', 1],
      ['unmatched PATCH 404', 1],
    ],
  );
  const durations = { route: '/v2/projects/{project_id}/deployments', method: 'POST' };
  t.equal(after.value('davit_http_request_duration_seconds_count', durations), 2);
  const grew = (name: string) => t.ok(after.value(name) > before.value(name), name);
  grew('davit_commit_duration_seconds_count');
  grew('davit_commit_writes_sum');
  grew('process_cpu_seconds_total');
  t.notOk(
    after.series.some(({ labels }) => /whk_|prj_|dpl_|dlv_|key_|127\.0\.0\.1/.test(JSON.stringify(labels))),
    'no label grows with what is stored',
  );

  const { origin } = new URL(String(service.metricsUrl));
  t.equal((await fetch(`${service.url}/metrics`)).status, 404);
  for (const path of ['/v2/projects', '/healthz', '/readyz', '/docs', '/v2/openapi.json']) {
    t.equal((await fetch(`${origin}${path}`, { headers })).status, 404, path);
  }
});

t.test('gauges show the current state', async (t) => {
  const service = await startWholeService(t, { ...METRICS_ON, maxConcurrent: 3 });
  const { secret } = await service.key();
  const pipe = namedPipe(t);
  const projectId = await service.project({ command: ['/bin/cat', pipe] });
  const elsewhere = await service.project({ command: null });
  for (const id of [projectId, projectId, projectId, elsewhere]) {
    await deploy(service, secret, id);
  }
  const { value, series } = await scrapeUntil(
    service,
    (now) => now.value('davit_deployments', { status: 'running', runner: 'davit' }) === 1,
  );
  t.equal(value('davit_deployments', { status: 'queued', runner: 'davit' }), 2);
  t.equal(value('davit_deployments', { status: 'queued', runner: 'external' }), 1);
  t.equal(value('davit_command_slots'), 3);
  t.equal(value('davit_deliveries_in_flight'), 0);
  t.equal(value('davit_deliveries_due', { receiver: 'healthy' }), 0);
  t.equal(value('davit_delivery_oldest_due_age_seconds', { receiver: 'failing' }), 0);
  for (const name of [
    'davit_database_size_bytes',
    'davit_wal_size_bytes',
    'process_resident_memory_bytes',
    'process_open_fds',
    'process_max_fds',
    'process_start_time_seconds',
  ]) {
    t.ok(value(name) > 0, name);
  }
  t.match(
    series.find(({ name }) => name === 'davit_build_info'),
    { labels: { version: /^\d/, node: process.versions.node }, value: 1 },
  );
  await scrapeUntil(service, (now) =>
    ['http', 'writer', 'dispatcher'].every(
      (thread) => now.value('davit_event_loop_lag_seconds_count', { thread }) > 0,
    ),
  );
  await service.admin.writer.write('projects.archive', { id: projectId });
  writeFileSync(pipe, '');
});

t.test('metrics are served until davit has stopped', async (t) => {
  const service = await startWholeService(t, { ...METRICS_ON, shutdownGraceMs: 20_000 });
  const { secret } = await service.key();
  const pipe = namedPipe(t);
  await deploy(service, secret, await service.project({ command: ['/bin/cat', pipe] }));
  await scrapeUntil(
    service,
    (now) => now.value('davit_deployments', { status: 'running', runner: 'davit' }) === 1,
  );
  const stopped = service.stop();
  const { value } = await scrape(service);
  t.equal(value('davit_deployments', { status: 'running', runner: 'davit' }), 1);
  let answers = 0;
  const scrapes = Promise.allSettled(
    Array.from({ length: 20 }, async () => {
      for (;;) {
        const response = await fetch(String(service.metricsUrl));
        parseMetrics(await response.text());
        answers += 1;
      }
    }),
  );
  await until(() => answers > 20);
  writeFileSync(pipe, '');
  await stopped;
  t.match(
    await scrapes,
    Array.from({ length: 20 }, () => ({ reason: { message: /fetch failed|terminated/ } })),
  );
});

t.test('scrapes at the same time are one, which reads nothing any more once it is stopped', async (t) => {
  const store = testStore(t, realEffects);
  const reads = { begun: 0, steps: 0, last: 0 };
  const { gauges } = store.reads;
  let isMore = true;
  t.teardown(() => {
    isMore = false;
  });
  const step = () => {
    reads.steps += 1;
    return isMore;
  };
  const endless: typeof gauges = {
    ...gauges,
    beginDueCount(nowMs) {
      reads.begun += 1;
      return { ...gauges.beginDueCount(nowMs), step };
    },
    unfinished() {
      reads.last += 1;
      return gauges.unfinished();
    },
  };
  const metrics = await startOn(store, { gauges: endless });
  const { send } = await connectRaw(metrics.listen.port);
  send('GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n'.repeat(3));
  await until(() => reads.steps > 0);
  const closed = metrics.close();
  const before = { ...reads };
  await closed;
  for (let turn = 0; turn < 3; turn++) await nextTurn();
  t.match(reads, before);
  t.match(before, { begun: 1, last: 0 });
});

t.test('a scrape that fails, as the database cannot be read, does not spoil the next one', async (t) => {
  const store = testStore(t, realEffects);
  const { gauges } = store.reads;
  const problems = [new Error('disk I/O error')];
  const failing: typeof gauges = {
    ...gauges,
    eventsAfter(...range) {
      const problem = problems.pop();
      if (problem !== undefined) throw problem;
      return gauges.eventsAfter(...range);
    },
  };
  const metrics = await startOn(store, { gauges: failing });
  t.teardown(metrics.close);
  await t.rejects(scrape({ metricsUrl: metrics.url }), /could not be read/);
  await scrape({ metricsUrl: metrics.url });
});

t.test('each scrape tells what is due by then, and since when davit runs', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { id } = await newWebhook(store, (await store.key()).keyId);
  await newDeliveries(store, id, 1);
  const startedAt = effects.now() / 1000;
  const metrics = await startOn(store, store.reads, effects);
  t.teardown(metrics.close);
  for (const ageSeconds of [0, 60, 120]) {
    const { value } = await scrape({ metricsUrl: metrics.url });
    t.equal(value('davit_delivery_oldest_due_age_seconds', { receiver: 'healthy' }), ageSeconds);
    t.equal(value('process_start_time_seconds'), startedAt);
    effects.advance(60_000);
  }
});

t.test('a deployment that a crash interrupted is in the first scrape', async (t) => {
  const store = testStore(t, realEffects);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await store.writer.write('deployments.claim', undefined);
  // On a machine that is held up, the recovery may take longer than a start waits for it.
  const patient: Effects = {
    ...realEffects,
    after: (delayMs, action) =>
      delayMs === RECOVERY_WAIT_MS ? () => undefined : realEffects.after(delayMs, action),
  };
  const service = await startWholeService(t, { ...METRICS_ON, dbPath: store.path }, patient);
  t.strictSame(movedOf(await scrape(service), 'davit_deployments_finished_total'), [
    ['failed interrupted', 1],
  ]);
});

t.test('without --metrics-listen no metrics are served', async (t) => {
  const { url, metricsUrl } = await startWholeService(t);
  t.equal(metricsUrl, null);
  t.equal((await fetch(`${url}/metrics`)).status, 404);
});

/** The metrics of this store alone, with what is read for its gauges. */
function startOn(store: TestStore, { gauges }: Pick<Reads, 'gauges'>, effects: Effects = realEffects) {
  return startMetrics({
    listen: METRICS_ON.metricsListen,
    reads: { ...store.reads, gauges },
    dbPath: store.path,
    metrics: [],
    commandSlots: 1,
    effects,
    logger: pino({ level: 'silent' }),
  });
}

async function deploy({ url }: WholeService, secret: string, projectId: string): Promise<void> {
  const response = await fetch(`${url}/v2/projects/${projectId}/deployments`, {
    method: 'POST',
    headers: { authorization: `Bearer ${secret}`, 'content-type': 'application/json' },
    body: JSON.stringify({ ref: 'main' }),
  });
  if (response.status !== 201) throw new Error(await response.text());
}

async function scrape({ metricsUrl }: Pick<WholeService, 'metricsUrl'>): Promise<Scrape> {
  const response = await fetch(String(metricsUrl));
  const text = await response.text();
  if (response.status !== 200) throw new Error(text);
  return parseMetrics(text);
}

async function scrapeUntil(service: WholeService, condition: (now: Scrape) => boolean): Promise<Scrape> {
  for (;;) {
    const now = await scrape(service);
    if (condition(now)) return now;
  }
}
