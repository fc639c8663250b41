import t from 'tap';
import type { Delivery, DeliveryId, DeliveryStatus, Webhook, WebhookId } from '../../src/domain.ts';
import { ADMINISTRATOR } from '../../src/store/administrator.ts';
import { type DeliveryFilter, deliveryReads, storedStatuses } from '../../src/store/deliveries.ts';
import { type ListPage, SLICE_ROWS } from '../../src/store/list-page.ts';
import {
  copyDeliveries,
  copyWaiting,
  endDeliveries,
  newDeliveries,
  newWebhook,
  storeWithWebhook,
  updateWebhook,
} from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import { caller, none, type TestStore, testStore } from '../helpers/store.ts';

const ALL: DeliveryFilter = { statuses: null, eventTypes: null, createdAfterMs: null, createdBeforeMs: null };

t.test('a pending delivery of a disabled webhook is shown as held, and without a time', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  t.match(store.reads.deliveries.get(delivery), {
    status: 'pending',
    next_attempt_at: '2026-11-21T08:00:00.000Z',
  });
  await updateWebhook(store, id, { status: 'disabled' });
  t.match(store.reads.deliveries.get(delivery), { status: 'held', next_attempt_at: null });
  t.match(await pageOf(store, id), [{ status: 'held', next_attempt_at: null }]);
  t.match(store.query('SELECT status FROM deliveries'), [{ status: 'pending' }], 'stored as pending');
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
  t.test(`the filter ${asked} on a webhook ${webhook} selects the stored status [${stored}]`, async (t) => {
    t.strictSame(storedStatuses(asked, webhook), stored);
  });
}

t.test('a page is filtered by each filter alone and by several together', async (t) => {
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
  const [first = none(), second = none(), third = none(), fourth = none()] = created;
  const [deployment = none()] = store.query<{ id: never }>(
    'SELECT id FROM deployments ORDER BY seq DESC LIMIT 1',
  );
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

t.test('a page finds rare matches slice by slice, with turns for others in between', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const [first = none(), second] = await newDeliveries(store, id, 2);
  copyDeliveries(store, 2 * SLICE_ROWS + 10);
  endDeliveries(store, [first], 'exhausted');
  t.match(await pageOf(store, id, { statuses: ['exhausted'] }), [{ id: first }]);
  t.match(await pageOf(store, id, { statuses: ['exhausted', 'pending'] }), [{ id: second }, { id: first }]);

  const { pages, looks } = counted(store, id);
  t.strictSame(await pages({ eventTypes: ['deployment.failed'] }, 10), [[]]);
  t.equal(looks(), 4, 'others had their turn in between');
});

t.test('few pending deliveries are found at once, however many others there are', async (t) => {
  const { store, effects, keyId, id } = await storeWithWebhook(t);
  const [first = none(), second = none()] = await newDeliveries(store, id, 2);
  copyDeliveries(store, 3 * SLICE_ROWS);
  effects.advance(1_000);
  await newWebhook(store, keyId);
  const [third = none()] = await newDeliveries(store, id, 1);
  // So that they are due in another order than they are listed in.
  store.execute(`UPDATE deliveries SET next_attempt_at = next_attempt_at + 60000 WHERE id = '${first}'`);
  const { pages, looks } = counted(store, id);
  const pending = { statuses: ['pending'] } as const;
  t.strictSame(await pages(pending, 10), [[third, second, first]]);
  t.equal(looks(), 2, 'one finds them, and one reads them');
  t.strictSame(await pages(pending, 2), [[third, second], [first]]);
  t.strictSame(await pages({ ...pending, createdBeforeMs: effects.now() }, 10), [[second, first]]);
  t.strictSame(await pages({ ...pending, createdAfterMs: effects.now() - 1 }, 10), [[third]]);
  t.strictSame(await pages({ ...pending, eventTypes: ['deployment.failed'] }, 10), [[]]);
  await updateWebhook(store, id, { status: 'disabled' });
  t.strictSame(await pages(pending, 10), [[]]);
  t.strictSame(await pages({ statuses: ['held', 'pending'] }, 10), [[third, second, first]]);
});

t.test('pending deliveries are each shown once, be they few or many', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { id } = await newWebhook(store, (await store.key()).keyId);
  await newDeliveries(store, id, 1);
  copyWaiting(store, SLICE_ROWS - 1, effects.now() + 60_000);
  copyDeliveries(store, 2 * SLICE_ROWS);
  const { pages, looks } = counted(store, id);
  const pending = () =>
    store
      .query<{ id: string }>("SELECT id FROM deliveries WHERE status = 'pending' ORDER BY seq DESC")
      .map(({ id }) => id);
  t.strictSame((await pages({ statuses: ['pending'] }, SLICE_ROWS)).flat(), pending());
  t.equal(looks(), 2);
  await newDeliveries(store, id, 1);
  t.equal(pending().length, SLICE_ROWS + 1);
  t.strictSame((await pages({ statuses: ['pending'] }, 700)).flat(), pending());
});

/** All pages of the webhook's list, as the ids on each; and in how many turns they were read. */
function counted(store: TestStore, id: WebhookId) {
  const database = store.openReader();
  let looks = 0;
  const counting = async <Result>(look: () => Result) => {
    looks += 1;
    return look();
  };
  const { page } = deliveryReads(database, { inTurn: counting, inSpareTurn: counting });
  return {
    looks: () => looks,
    async pages(filter: Partial<DeliveryFilter>, limit: number) {
      const webhook = store.reads.webhooks.get(id) as Webhook;
      const pages: string[][] = [];
      for (let before: number | null = Number.MAX_SAFE_INTEGER; before !== null; ) {
        const asked = { ...ALL, ...filter };
        const { items, goOnAt }: ListPage<Delivery> = await page(
          ADMINISTRATOR,
          webhook,
          asked,
          before,
          limit,
        );
        pages.push(items.map((delivery) => delivery.id));
        before = goOnAt;
      }
      return pages;
    },
  };
}

t.test('a page shows its webhook as it is at the end of the search', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const [oldest = none()] = await newDeliveries(store, id, 1);
  copyDeliveries(store, SLICE_ROWS);
  store.execute(`UPDATE deliveries SET event_type = 'deployment.failed' WHERE id = '${oldest}'`);
  const webhook = store.reads.webhooks.get(id) as Webhook;
  const database = store.openReader();
  const { page } = deliveryReads(database, {
    inSpareTurn: async (look) => {
      await updateWebhook(store, id, { status: 'disabled' });
      return look();
    },
  });
  const found = async (statuses: DeliveryFilter['statuses']) => {
    const filter: DeliveryFilter = { ...ALL, eventTypes: ['deployment.failed'], statuses };
    return (await page(ADMINISTRATOR, webhook, filter, Number.MAX_SAFE_INTEGER, 10)).items;
  };
  t.match(await found(null), [{ id: oldest, status: 'held', next_attempt_at: null }]);
  await updateWebhook(store, id, { status: 'enabled' });
  t.strictSame(await found(['exhausted', 'pending']), [], 'it is no longer as requested');
});

t.test('a page that was searched for a second ends, and the next one goes on there', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const [oldest = none()] = await newDeliveries(store, id, 1);
  copyDeliveries(store, 3 * SLICE_ROWS);
  const [newest] = await pageOf(store, id, {}, 1);
  endDeliveries(store, [oldest, newest?.id ?? none()], 'exhausted');
  const database = store.openReader();
  const webhook = store.reads.webhooks.get(id) as Webhook;
  let ms = 0; // two slices for each page
  const { page } = deliveryReads(database, { monotonicMs: () => (ms += 500) });
  const walk = async (filter: DeliveryFilter, limit: number) => {
    const counts: number[] = [];
    for (let before: number | null = Number.MAX_SAFE_INTEGER; before !== null; ) {
      const { items, goOnAt }: ListPage<Delivery> = await page(ADMINISTRATOR, webhook, filter, before, limit);
      counts.push(items.length);
      before = goOnAt;
    }
    return counts;
  };
  t.strictSame(await walk({ ...ALL, statuses: ['exhausted'] }, 10), [1, 1]);
  t.strictSame(await walk({ ...ALL, eventTypes: ['deployment.failed'] }, 10), [0, 0]);
  t.strictSame(await walk({ ...ALL, statuses: ['held'] }, 10), [0]);
  t.strictSame(
    await walk({ ...ALL, statuses: ['exhausted'] }, 1),
    [1, 0, 1],
    'a full page is searched no further',
  );
  t.strictSame(await walk(ALL, 3_000), [3_000, 3_000, 1]);
});

t.test('each delivery of a long list is shown once, wherever a page or a slice ends', async (t) => {
  const { store, keyId, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 1);
  copyDeliveries(store, 2 * SLICE_ROWS + 10);
  const other = await newWebhook(store, keyId);
  await newDeliveries(store, other.id, 1);
  const all = store
    .query<{ id: string }>('SELECT id FROM deliveries WHERE webhook_id = ? ORDER BY seq DESC', id)
    .map(({ id }) => id);
  const webhook = store.reads.webhooks.get(id) as Webhook;
  for (const limit of [1, SLICE_ROWS - 1, SLICE_ROWS, SLICE_ROWS + 1, all.length + 1]) {
    const first = await store.reads.deliveries.page(
      ADMINISTRATOR,
      webhook,
      ALL,
      Number.MAX_SAFE_INTEGER,
      limit,
    );
    const rest = await store.reads.deliveries.page(
      ADMINISTRATOR,
      webhook,
      ALL,
      first.goOnAt ?? 0,
      all.length,
    );
    t.equal(first.items.length, Math.min(limit, all.length));
    t.strictSame(
      [...first.items, ...rest.items].map(({ id }) => id),
      all,
    );
  }
});

t.test(
  'a delivery shows all its attempts, however many, with the response bodies of the latest 20 only',
  async (t) => {
    const { store, keyId, id } = await storeWithWebhook(t);
    const [delivery = none()] = await newDeliveries(store, id, 1);
    const numbers = Array.from({ length: 23 }, (_, index) => index + 1);
    for (const number of numbers) {
      store.execute(
        `INSERT INTO attempts VALUES ('${delivery}', ${number}, 0, 200, NULL, 1, NULL, 'ok', 'redeliver')`,
      );
    }
    store.execute(`UPDATE deliveries SET attempt_count = 23 WHERE id = '${delivery}'`);
    const attempts = store.reads.deliveries.detailsVisibleTo(caller({ keyId }), delivery)?.attempts ?? [];
    t.strictSame(
      attempts.map(({ number, response_body }) => [number, response_body]),
      numbers.map((number) => [number, number <= 3 ? null : 'ok']),
    );
  },
);

t.test('the details of a delivery have its payload and its own attempts, in order', async (t) => {
  const { store, effects, keyId, id } = await storeWithWebhook(t);
  const [delivery = none(), other = none()] = await newDeliveries(store, id, 2);
  store.execute(`
    INSERT INTO attempts VALUES ('${other}', 1, ${effects.now()}, 200, NULL, 12, '192.0.2.2', 'not yours', 'schedule');
    INSERT INTO attempts VALUES ('${delivery}', 2, ${effects.now() + 5_000}, 200, NULL, 12, '192.0.2.1', 'ok', 'redeliver');
    INSERT INTO attempts VALUES ('${delivery}', 1, ${effects.now()}, NULL, 'timeout', 10000, NULL, NULL, 'schedule')`);
  const details = store.reads.deliveries.detailsVisibleTo(caller({ keyId }), delivery);
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
  const [delivery = none()] = await newDeliveries(store, id, 1);
  t.match(store.reads.deliveries.visibleTo(caller({ keyId }), delivery), { id: delivery });
  t.equal(store.reads.deliveries.visibleTo(caller(stranger), delivery), undefined);
  t.equal(store.reads.deliveries.detailsVisibleTo(caller(stranger), delivery), undefined);
});

for (const before of ['delivered', 'exhausted', 'pending'] as const) {
  t.test(
    `a ${before} delivery that is redelivered is due now, on a new ladder, in the same row`,
    async (t) => {
      const { store, effects, id } = await storeWithWebhook(t);
      const [delivery = none()] = await newDeliveries(store, id, 1);
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

t.test('a delivery that has 1,000 attempts is not sent again, by redelivery or replay', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  endDeliveries(store, [delivery], 'delivered');
  store.execute('UPDATE deliveries SET attempt_count = 1000');
  const before = store.dump();
  await t.rejects(store.writer.write('deliveries.redeliver', { id: delivery }), {
    code: 'conflict',
    message: 'the delivery has 1000 attempts already: it is not sent again',
  });
  t.strictSame(store.dump(), before);
  const all = { webhookId: id, sinceMs: 0, untilMs: effects.now(), storedStatus: null, lastSeq: 1 };
  t.equal(await store.reads.replays.count(all), 0, 'a replay passes it over');

  store.execute('UPDATE deliveries SET attempt_count = 999');
  t.equal(await store.reads.replays.count(all), 1);
  t.match(await store.writer.write('deliveries.redeliver', { id: delivery }), { status: 'pending' });
});

t.test('a delivery of a disabled webhook that is redelivered is held until it is enabled', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  endDeliveries(store, [delivery], 'exhausted');
  await updateWebhook(store, id, { status: 'disabled' });
  t.match(await store.writer.write('deliveries.redeliver', { id: delivery }), {
    status: 'held',
    next_attempt_at: null,
  });
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
  await updateWebhook(store, id, { status: 'enabled' });
  t.match(store.reads.outbox.pendingWebhooks(), [{ webhook_id: id }]);
});

t.test(
  'new deliveries wake the dispatcher, but not those of a disabled webhook, which it may not send',
  async (t) => {
    const { store, id } = await storeWithWebhook(t);
    const heard: string[] = [];
    store.writer.onCommit((changes) => heard.push(...changes));
    await newDeliveries(store, id, 1);
    t.ok(heard.includes(id));
    await updateWebhook(store, id, { status: 'disabled' });
    heard.length = 0;

    await newDeliveries(store, id, 1);

    t.notOk(heard.includes(id));
    t.equal(store.query("SELECT 1 FROM deliveries WHERE status = 'pending'").length, 2, 'they are held');
  },
);

t.test('an attempt that fails after a redelivery was asked for does not end the new ladder', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  effects.advance(1);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  const underWay = claimed(store, id, effects.now());
  const heard: string[] = [];
  store.writer.onCommit((changes) => heard.push(...changes));
  await store.writer.write('deliveries.redeliver', { id: delivery });
  t.strictSame(heard, ['outbox']);
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

t.test('a failed attempt on the ladder begun by enabling does not end a later redelivery', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  await updateWebhook(store, id, { status: 'disabled' });
  effects.advance(60_000);
  await updateWebhook(store, id, { status: 'enabled' });
  const underWay = claimed(store, id, effects.now());
  await store.writer.write('deliveries.redeliver', { id: delivery });
  await settle(store, underWay, effects.now(), 'exhausted');
  t.match(store.query('SELECT status, ladder_trigger FROM deliveries'), [
    { status: 'pending', ladder_trigger: 'redeliver' },
  ]);
});

t.test('an attempt that succeeds after a redelivery was asked for is the last', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  const underWay = claimed(store, id, effects.now());
  await store.writer.write('deliveries.redeliver', { id: delivery });
  await settle(store, underWay, effects.now(), 'delivered');
  t.match(store.query('SELECT status, attempt_count, next_attempt_at FROM deliveries'), [
    { status: 'delivered', attempt_count: 1, next_attempt_at: null },
  ]);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
});

t.test('a delivery that is unknown or of a deleted webhook cannot be redelivered', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  await store.writer.write('webhooks.remove', { id });
  const before = store.dump();
  for (const missing of [delivery, 'dlv_0000000000000000000000' as DeliveryId]) {
    await t.rejects(store.writer.write('deliveries.redeliver', { id: missing }), { code: 'not_found' });
  }
  t.strictSame(store.dump(), before);
});

async function pageOf(store: TestStore, id: WebhookId, filter: Partial<DeliveryFilter> = {}, limit = 10) {
  const webhook = store.reads.webhooks.get(id) as Webhook;
  const { items } = await store.reads.deliveries.page(
    ADMINISTRATOR,
    webhook,
    { ...ALL, ...filter },
    Number.MAX_SAFE_INTEGER,
    limit,
  );
  return items;
}

function claimed(store: TestStore, id: WebhookId, nowMs: number) {
  const [due = none()] = dueOf(store, id, nowMs, 1);
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
