import t from 'tap';
import type { DeliveryId, DeliveryStatus, KeyId, Webhook, WebhookId } from '../../src/domain.ts';
import { type DeliveryFilter, SLICE_ROWS, storedStatuses } from '../../src/store/deliveries.ts';
import type { Caller } from '../../src/store/keys.ts';
import { copyDeliveries, endDeliveries, newDeliveries, newWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

const ALL: DeliveryFilter = { statuses: null, eventTypes: null, createdAfterMs: null, createdBeforeMs: null };

t.test('a pending delivery of a disabled webhook is shown as held, and without a time', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
  t.match(store.reads.deliveries.get(delivery), {
    status: 'pending',
    next_attempt_at: '2026-11-21T08:00:00.000Z',
  });
  await setStatus(store, id, 'disabled');
  t.match(store.reads.deliveries.get(delivery), { status: 'held', next_attempt_at: null });
  t.match(await pageOf(store, id), [{ status: 'held', next_attempt_at: null }]);
  t.match(store.query('SELECT status FROM deliveries'), [{ status: 'pending' }], 'one row says it for all');
});

const STATUSES: { webhook: 'enabled' | 'disabled'; asked: DeliveryStatus[]; stored: string[] }[] = [
  { webhook: 'enabled', asked: ['pending'], stored: ['pending'] },
  { webhook: 'enabled', asked: ['held'], stored: [] },
  { webhook: 'enabled', asked: ['held', 'delivered'], stored: ['delivered'] },
  { webhook: 'disabled', asked: ['held'], stored: ['pending'] },
  { webhook: 'disabled', asked: ['pending'], stored: [] },
  { webhook: 'disabled', asked: ['exhausted', 'held'], stored: ['exhausted', 'pending'] },
];
for (const { webhook, asked, stored } of STATUSES) {
  t.test(`of a webhook that is ${webhook}, ${asked} is what is stored as ${stored}`, async (t) => {
    t.strictSame(storedStatuses(asked, webhook), stored);
  });
}

t.test('a page is narrowed by each filter alone and by all together', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId, { events: ['deployment.created', 'deployment.canceled'] });
  const startMs = effects.now();
  const created = [];
  for (let second = 0; second < 4; second++) {
    created.push(...(await newDeliveries(store, id, 1)));
    effects.advance(1_000);
  }
  const [first = noDelivery(), second = noDelivery(), third = noDelivery(), fourth = noDelivery()] = created;
  const [deployment] = store.query<{ id: never }>('SELECT id FROM deployments ORDER BY seq DESC LIMIT 1');
  if (deployment === undefined) throw new Error('no deployment was made');
  await store.writer.write('deployments.cancel', { id: deployment.id });
  const [canceled] = (await pageOf(store, id)).map((delivery) => delivery.id);
  endDeliveries(store, [first, second], 'delivered');
  endDeliveries(store, [third], 'exhausted');

  const cases: [Partial<DeliveryFilter>, (DeliveryId | undefined)[]][] = [
    [{}, [canceled, fourth, third, second, first]],
    [{ statuses: ['delivered'] }, [second, first]],
    [{ statuses: ['exhausted', 'pending'] }, [canceled, fourth, third]],
    [{ statuses: ['held'] }, []],
    [{ eventTypes: ['deployment.canceled'] }, [canceled]],
    [{ eventTypes: ['deployment.started'] }, []],
    [{ createdAfterMs: startMs + 1_000 }, [canceled, fourth, third]],
    [{ createdBeforeMs: startMs + 1_000 }, [first]],
    [{ createdAfterMs: startMs, createdBeforeMs: startMs + 3_000, statuses: ['exhausted'] }, [third]],
  ];
  for (const [filter, expected] of cases) {
    t.strictSame(
      (await pageOf(store, id, filter)).map((delivery) => delivery.id),
      expected,
      JSON.stringify(filter),
    );
  }
});

t.test('few that fit are found among many that do not, slice by slice', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [first = noDelivery(), second] = await newDeliveries(store, id, 2);
  copyDeliveries(store, 2 * SLICE_ROWS + 10);
  endDeliveries(store, [first], 'exhausted');
  t.match(await pageOf(store, id, { statuses: ['exhausted'] }), [{ id: first }]);
  t.match(await pageOf(store, id, { statuses: ['exhausted', 'pending'] }), [{ id: second }, { id: first }]);

  let turns = 0;
  const counting = setImmediate(function count() {
    turns += 1;
    setImmediate(count).unref();
  });
  await pageOf(store, id, { eventTypes: ['deployment.failed'] });
  clearImmediate(counting);
  t.ok(turns >= 2, 'others had their turn in between');
});

t.test('a delivery alone has what was sent and every attempt, in order', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
  store.execute(`
    INSERT INTO attempts VALUES ('${delivery}', 2, ${effects.now() + 5_000}, 200, NULL, 12, '192.0.2.1', 'ok', 'redeliver');
    INSERT INTO attempts VALUES ('${delivery}', 1, ${effects.now()}, NULL, 'timeout', 10000, NULL, NULL, 'schedule')`);
  const details = store.reads.deliveries.detailsVisibleTo(caller(keyId), delivery);
  t.match(details, { id: delivery, event_type: 'deployment.created', webhook_id: id });
  t.strictSame(details?.attempts, [
    {
      number: 1,
      at: '2026-11-21T08:00:00.000Z',
      status_code: null,
      error: 'timeout',
      duration_ms: 10_000,
      remote_address: null,
      response_body: null,
      trigger: 'schedule',
    },
    {
      number: 2,
      at: '2026-11-21T08:00:05.000Z',
      status_code: 200,
      error: null,
      duration_ms: 12,
      remote_address: '192.0.2.1',
      response_body: 'ok',
      trigger: 'redeliver',
    },
  ]);
  const [event] = store.query<{ payload: string }>('SELECT payload FROM events');
  t.equal(JSON.stringify(details?.payload), event?.payload, 'byte for byte');
});

t.test('only the key that registered the webhook sees its deliveries', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const stranger = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
  t.match(store.reads.deliveries.visibleTo(caller(keyId), delivery), { id: delivery });
  t.equal(store.reads.deliveries.visibleTo(caller(stranger.keyId), delivery), undefined);
  t.equal(store.reads.deliveries.detailsVisibleTo(caller(stranger.keyId), delivery), undefined);
});

for (const before of ['delivered', 'exhausted', 'pending'] as const) {
  t.test(
    `a ${before} delivery that is redelivered is due now, on a new ladder, in the same row`,
    async (t) => {
      const effects = fakeEffects();
      const store = testStore(t, effects);
      const { keyId } = await store.key();
      const { id } = await newWebhook(store, keyId);
      const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
      if (before !== 'pending') endDeliveries(store, [delivery], before);
      effects.advance(3_600_000);
      t.match(await store.writer.write('deliveries.redeliver', { id: delivery }), {
        id: delivery,
        status: 'pending',
        next_attempt_at: '2026-11-21T09:00:00.000Z',
        delivered_at: null,
      });
      t.match(dueOf(store, id, effects.now(), 10), [
        { id: delivery, ladder_attempts: 0, ladder_started_at: effects.now(), ladder_trigger: 'redeliver' },
      ]);
      t.equal(store.query('SELECT * FROM deliveries').length, 1);
    },
  );
}

t.test('a delivery of a disabled webhook that is redelivered is held until it is enabled', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
  endDeliveries(store, [delivery], 'exhausted');
  await setStatus(store, id, 'disabled');
  t.match(await store.writer.write('deliveries.redeliver', { id: delivery }), {
    status: 'held',
    next_attempt_at: null,
  });
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
  await setStatus(store, id, 'enabled');
  t.match(store.reads.outbox.pendingWebhooks(), [{ webhook_id: id }]);
});

t.test('an attempt that fails after a redelivery was asked for does not end the new ladder', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
  const underWay = claimed(store, id, effects.now());
  await store.writer.write('deliveries.redeliver', { id: delivery });
  await settle(store, underWay, effects.now(), 'exhausted');
  t.match(store.query('SELECT status, attempt_count, ladder_attempts, ladder_trigger FROM deliveries'), [
    { status: 'pending', attempt_count: 1, ladder_attempts: 0, ladder_trigger: 'redeliver' },
  ]);
  t.equal(store.query('SELECT * FROM attempts').length, 1, 'it is recorded all the same');

  effects.advance(1);
  await settle(store, claimed(store, id, effects.now()), effects.now(), 'exhausted');
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'exhausted', attempt_count: 2 },
  ]);
});

t.test('an attempt that succeeds after a redelivery was asked for is the last', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
  const underWay = claimed(store, id, effects.now());
  await store.writer.write('deliveries.redeliver', { id: delivery });
  await settle(store, underWay, effects.now(), 'delivered');
  t.match(store.query('SELECT status, attempt_count, next_attempt_at FROM deliveries'), [
    { status: 'delivered', attempt_count: 1, next_attempt_at: null },
  ]);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
});

t.test('what is not there is not redelivered', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  const [delivery = noDelivery()] = await newDeliveries(store, id, 1);
  await store.writer.write('webhooks.remove', { id });
  const before = store.dump();
  for (const missing of [delivery, 'dlv_0000000000000000000000' as DeliveryId]) {
    await t.rejects(store.writer.write('deliveries.redeliver', { id: missing }), { code: 'not_found' });
  }
  t.strictSame(store.dump(), before);
});

async function pageOf(store: TestStore, id: WebhookId, filter: Partial<DeliveryFilter> = {}, limit = 10) {
  const webhook = store.reads.webhooks.get(id) as Webhook;
  const rows = await store.reads.deliveries.page(
    webhook,
    { ...ALL, ...filter },
    Number.MAX_SAFE_INTEGER,
    limit,
  );
  return rows.map(({ item }) => item);
}

function setStatus(store: TestStore, id: WebhookId, status: 'enabled' | 'disabled') {
  return store.writer.write('webhooks.update', { id, status, disableReason: 'disabled by a test' });
}

function claimed(store: TestStore, id: WebhookId, nowMs: number) {
  const [due] = dueOf(store, id, nowMs, 1);
  if (due === undefined) throw new Error('nothing is due');
  return due;
}

async function settle(
  store: TestStore,
  due: ReturnType<typeof claimed>,
  atMs: number,
  kind: 'delivered' | 'exhausted',
): Promise<void> {
  await store.writer.write('outbox.settle', settlementOf(due, atMs, { kind }));
}

function caller(keyId: KeyId): Caller {
  return { keyId, name: 'ci', scopes: [], allProjects: true, lastUsedAtMs: null };
}

function noDelivery(): never {
  throw new Error('no delivery arose');
}
