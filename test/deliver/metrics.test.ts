import fc from 'fast-check';
import t, { type Test } from 'tap';
import { deliveryMetrics } from '../../src/deliver/metrics.ts';
import type { WebhookId, WebhookStatus } from '../../src/domain.ts';
import { newMetricsMemory } from '../../src/metric-cells.ts';
import { exposition } from '../../src/metrics/exposition.ts';
import type { Settlement } from '../../src/store/settlements.ts';
import { newWebhook, updateWebhook } from '../helpers/deliveries.ts';
import { deliverDue, testDispatcher } from '../helpers/dispatcher.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { movedOf, parseMetrics, type Scrape } from '../helpers/metrics.ts';
import { type Answer, hangUp, held, startReceiver, status } from '../helpers/receiver.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

const ATTEMPTS = 'davit_delivery_attempts_total';

t.test('attempts are counted by outcome', async (t) => {
  const { attempt, scrape } = await service(t, [
    hangUp(),
    status(302),
    status(410),
    status(503),
    status(204),
  ]);
  t.equal(
    scrape().value(ATTEMPTS, { outcome: 'failed', error: 'tls' }),
    0,
    'each class is there from the start',
  );
  t.strictSame(movedOf(scrape(), ATTEMPTS), []);
  for (let made = 0; made < 5; made++) await attempt();
  const after = scrape();
  t.strictSame(movedOf(after, ATTEMPTS), [
    ['delivered', 1],
    ['failed connection_closed', 1],
    ['failed http_3xx', 1],
    ['failed http_4xx', 1],
    ['failed http_5xx', 1],
  ]);
  t.strictSame(movedOf(after, 'davit_delivery_attempt_duration_seconds_count'), [
    ['delivered', 1],
    ['failed', 4],
  ]);
  t.equal(after.value('davit_deliveries_in_flight'), 0);
  t.equal(after.value('davit_webhooks_disabled_total'), 1, 'by the 410');
});

t.test('an attempt is in flight until its answer', async (t) => {
  const { answer, release } = held(status(200));
  const { dispatcher, deploy, receiver, scrape } = await service(t, [answer]);
  await deploy();
  await dispatcher.tick();
  await receiver.next();
  t.equal(scrape().value('davit_deliveries_in_flight'), 1);
  release();
  await dispatcher.settled();
  t.equal(scrape().value('davit_deliveries_in_flight'), 0);
});

t.test('the wait is measured for first attempts, from the event', async (t) => {
  const { effects, dispatcher, deploy, scrape } = await service(t, [status(500), status(200)]);
  const WAIT = 'davit_delivery_wait_seconds';
  await deploy();
  effects.advance(2_000);
  await dispatcher.tick();
  await dispatcher.settled();
  t.strictSame(movedOf(scrape(), `${WAIT}_sum`), [['healthy', 2]]);
  t.equal(scrape().value(`${WAIT}_bucket`, { receiver: 'healthy', le: '1' }), 0);
  t.equal(scrape().value(`${WAIT}_bucket`, { receiver: 'healthy', le: '2.5' }), 1);

  effects.advance(60_000);
  await dispatcher.tick();
  await dispatcher.settled();
  t.strictSame(movedOf(scrape(), ATTEMPTS), [
    ['delivered', 1],
    ['failed http_5xx', 1],
  ]);
  t.strictSame(movedOf(scrape(), `${WAIT}_count`), [['healthy', 1]], 'a retry is no first attempt');
});

t.test(
  'the wait of an event that was held is measured once, from when its webhook was enabled',
  async (t) => {
    const { effects, dispatcher, deploy, scrape, store } = await service(t, [status(500)]);
    const [{ id } = { id: '' as WebhookId }] = store.query<{ id: WebhookId }>('SELECT id FROM webhooks');
    const setStatus = (status: WebhookStatus) => updateWebhook(store, id, { status });
    await setStatus('disabled');
    await deploy();
    for (let times = 0; times < 3; times++) {
      effects.advance(60_000);
      await setStatus('enabled');
      effects.advance(2_000);
      await deliverDue(dispatcher, effects);
      await setStatus('disabled');
    }
    t.strictSame(movedOf(scrape(), ATTEMPTS), [['failed http_5xx', 3]]);
    t.strictSame(movedOf(scrape(), 'davit_delivery_wait_seconds_count'), [['healthy', 1]]);
    t.strictSame(movedOf(scrape(), 'davit_delivery_wait_seconds_sum'), [['healthy', 2]]);
  },
);

t.test('waits for failing webhooks are counted apart', async (t) => {
  const { effects, dispatcher, deploy, scrape } = await service(t, [status(500)]);
  await deploy();
  await dispatcher.tick();
  await dispatcher.settled();
  await deploy();
  effects.advance(1_000);
  await dispatcher.tick();
  await dispatcher.settled();
  t.strictSame(movedOf(scrape(), 'davit_delivery_wait_seconds_count'), [
    ['failing', 1],
    ['healthy', 1],
  ]);
});

t.test('a delivery that ran out of attempts counts as exhausted', async (t) => {
  const { effects, dispatcher, deploy, scrape } = await service(t, [status(500)]);
  await deploy();
  for (;;) {
    await dispatcher.tick();
    await dispatcher.settled();
    const nextAtMs = await dispatcher.tick();
    if (nextAtMs === null) break;
    effects.advance(Math.max(0, nextAtMs - effects.now()));
  }
  t.equal(scrape().value('davit_deliveries_exhausted_total'), 1);
  t.equal(scrape().value(ATTEMPTS, { outcome: 'failed', error: 'http_5xx' }), 11);
});

t.test('exhausted counts what was recorded, not what was planned', async (t) => {
  const { answer, release } = held(status(500));
  const { effects, dispatcher, deploy, receiver, scrape, store } = await service(t, [answer, status(500)]);
  const exhausted = () => scrape().value('davit_deliveries_exhausted_total');
  await deploy();
  store.execute('UPDATE deliveries SET ladder_attempts = 50');
  await dispatcher.tick();
  await receiver.next();
  store.execute('UPDATE deliveries SET ladder_started_at = ladder_started_at + 1, ladder_attempts = 0');
  release();
  await dispatcher.settled();
  t.equal(exhausted(), 0, 'another ladder began meanwhile');

  store.execute('UPDATE deliveries SET attempt_count = 999');
  effects.advance(60_000);
  await dispatcher.tick();
  await dispatcher.settled();
  t.equal(exhausted(), 1, 'it has had all its attempts');
});

t.test('the set of series never changes, whatever receivers do', async (t) => {
  const metrics = deliveryMetrics(newMetricsMemory());
  const scrape = () => parseMetrics(exposition(metrics.all));
  const names = () => scrape().series.map(({ name, labels }) => [name, labels]);
  const before = names();
  const words = fc.constantFrom('tls', 'tls: ', 'connection_failed: ', 'dns', 'timeout', '__proto__', '');
  const how = fc.oneof(
    fc.record({ statusCode: fc.integer({ min: 100, max: 999 }), error: fc.constant(null) }),
    fc.record({
      statusCode: fc.constant(null),
      error: fc.tuple(words, fc.string()).map((parts) => parts.join('')),
    }),
  );
  const attempts = fc.sample(how, 1_000);
  for (const attempt of attempts) {
    const settlement = { attempt: { ...attempt, durationMs: 3 }, next: { kind: 'retry', atMs: 1 } };
    metrics.settled(settlement as Settlement, 'pending');
  }
  t.strictSame(names(), before);
  t.equal(
    movedOf(scrape(), ATTEMPTS).reduce((sum, [, value]) => sum + value, 0),
    1_000,
  );
});

t.test('an error is counted by its kind, and an unknown one as other', async (t) => {
  const metrics = deliveryMetrics(newMetricsMemory());
  for (const error of [
    'tls: CERT_HAS_EXPIRED',
    'connection_failed: EPIPE',
    'timeout',
    'tlsx',
    'a surprise: at\nlast',
  ]) {
    const settlement = { attempt: { error, statusCode: null, durationMs: 3 }, next: { kind: 'exhausted' } };
    metrics.settled(settlement as Settlement, 'exhausted');
  }
  const scrape = parseMetrics(exposition(metrics.all));
  t.strictSame(movedOf(scrape, ATTEMPTS), [
    ['failed connection_failed', 1],
    ['failed other', 2],
    ['failed timeout', 1],
    ['failed tls', 1],
  ]);
  t.equal(scrape.value('davit_deliveries_exhausted_total'), 5);
});

t.test('a redelivery is not a first attempt', async (t) => {
  const { effects, dispatcher, deploy, scrape, store } = await service(t, [status(200)]);
  await deploy();
  store.execute("UPDATE deliveries SET ladder_trigger = 'redeliver'");
  effects.advance(2_000);
  await dispatcher.tick();
  await dispatcher.settled();
  t.strictSame(movedOf(scrape(), ATTEMPTS), [['delivered', 1]]);
  t.strictSame(movedOf(scrape(), 'davit_delivery_wait_seconds_count'), []);
});

async function service(t: Test, answers: [Answer, ...Answer[]]) {
  const effects: FakeEffects = fakeEffects();
  const store: TestStore = testStore(t, effects);
  const metrics = deliveryMetrics(newMetricsMemory());
  const dispatcher = testDispatcher(t, store, effects, { metrics });
  const receiver = await startReceiver(t, { answers });
  const { keyId } = await store.key();
  await newWebhook(store, keyId, { url: receiver.url });
  const projectId = await store.project();
  const deploy = () => store.writer.write('deployments.create', newDeployment(projectId));
  return {
    store,
    effects,
    dispatcher,
    receiver,
    deploy,
    /** An event and its first attempt; what is left of those before is forgotten. */
    async attempt() {
      store.execute(`
        DELETE FROM attempts;
        DELETE FROM deliveries;
        UPDATE webhooks SET status = 'enabled', status_reason = NULL`);
      await deploy();
      effects.advance(60_000);
      await dispatcher.tick();
      await dispatcher.settled();
    },
    scrape: (): Scrape => parseMetrics(exposition(metrics.all)),
  };
}
