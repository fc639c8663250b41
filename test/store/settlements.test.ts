import t, { type Test } from 'tap';
import type { WebhookId } from '../../src/domain.ts';
import { DAY_MS, HOUR_MS } from '../../src/durations.ts';
import type { DueDelivery } from '../../src/store/outbox.ts';
import type { PendingPosition, Settlement } from '../../src/store/settlements.ts';
import { inSteps } from '../../src/store/steps.ts';
import type { WebhookUpdate } from '../../src/store/webhooks.ts';
import { copyWaiting, newDeliveries, storeWithWebhook, updateWebhook } from '../helpers/deliveries.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { dueOf, newKeysWebhook, settlementOf } from '../helpers/outbox.ts';
import { newDeployment, none, type TestStore, testStore } from '../helpers/store.ts';

t.test('a retry is due at its time and not before', async (t) => {
  const { store, effects, webhookId, due } = await oneDue(t);
  const atMs = effects.now() + 5_000;
  await store.writer.write('outbox.settle', settlementOf(due, effects.now(), { kind: 'retry', atMs }));

  t.strictSame(dueOf(store, webhookId, atMs - 1, 10), []);
  t.match(dueOf(store, webhookId, atMs, 10), [{ id: due.id, ladder_attempts: 1 }]);
  t.match(store.query('SELECT number, status_code, error, trigger FROM attempts'), [
    { number: 1, status_code: 500, error: null, trigger: 'schedule' },
  ]);
  t.match(store.reads.webhooks.get(webhookId), {
    consecutive_failures: 1,
    last_failure_at: '2026-11-21T08:00:00.012Z',
  });
});

t.test('each attempt is announced, as a replay that waited for its receiver may go on', async (t) => {
  const { store, effects, due } = await oneDue(t);
  const heard: string[][] = [];
  store.writer.onCommit((changes) => heard.push([...changes]));
  await store.writer.write('outbox.settle', settlementOf(due, effects.now(), { kind: 'delivered' }));
  t.strictSame(heard, [['settled']]);
});

t.test('a webhook that has only failed for five days is disabled and says why', async (t) => {
  const { store, effects, webhookId, failOnce } = await failing(t);
  for (let failures = 0; failures < 2; failures++) {
    await failOnce();
    effects.advance(2.5 * DAY_MS - 1);
  }
  await failOnce();
  effects.advance(1);
  await failOnce();
  t.match(store.reads.webhooks.get(webhookId), { status: 'enabled' });
  effects.advance(1);
  await failOnce();
  t.match(store.reads.webhooks.get(webhookId), {
    status: 'disabled',
    status_reason: /5 days/,
    consecutive_failures: 5,
  });

  await store.writer.write('deployments.create', newDeployment(await store.project()));
  t.match(
    store.query("SELECT status FROM deliveries WHERE status = 'pending'"),
    [{ status: 'pending' }],
    'kept, not dropped',
  );
  t.strictSame(store.reads.outbox.pendingWebhooks(), [], 'and not sent');
});

t.test(
  'three days without an attempt restart the five days of failures after which a webhook is disabled',
  async (t) => {
    for (const quietDays of [3, 6, 40]) {
      const { store, effects, webhookId, failOnce } = await failing(t);
      await failOnce();
      effects.advance(quietDays * DAY_MS + 1);
      const againMs = effects.now();
      for (let day = 0; day < 5; day++) {
        await failOnce();
        t.equal(store.reads.outbox.history(webhookId).failing_since, againMs + 12);
        effects.advance(DAY_MS);
      }
      t.match(store.reads.webhooks.get(webhookId), { status: 'enabled', consecutive_failures: 6 });
      await failOnce();
      t.match(store.reads.webhooks.get(webhookId), { status: 'disabled' });
    }
  },
);

t.test('time asleep is not time without attempts, and failing_since is never in the future', async (t) => {
  const { store, effects, webhookId, failOnce } = await failing(t);
  const failingSince = () => store.reads.outbox.history(webhookId).failing_since;
  const startMs = effects.now() + 12;
  await failOnce();
  effects.advance(4 * DAY_MS);
  await failOnce(DAY_MS);
  t.equal(failingSince(), startMs);
  effects.jump(-5 * DAY_MS);
  await failOnce();
  t.equal(failingSince(), startMs - DAY_MS, 'the clock was set back');
});

/** A webhook whose deliveries fail once each, without a retry. */
async function failing(t: Test) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await newKeysWebhook(store);
  const projectId = await store.project();
  const failOnce = async (skippedMs = 0) => {
    await store.writer.write('deployments.create', newDeployment(projectId, { maxQueued: null }));
    const [due = none()] = dueOf(store, webhookId, effects.now(), 1);
    const settlement = settlementOf(due, effects.now(), { kind: 'exhausted' });
    const neverPassedMs = { inFiveDays: skippedMs, inThreeDays: skippedMs };
    await store.writer.write('outbox.settle', { ...settlement, neverPassedMs });
  };
  return { store, effects, webhookId, failOnce };
}

t.test('a delivery has a thousand attempts at most, however often its webhook is enabled anew', async (t) => {
  const { store, effects, webhookId } = await oneDue(t);
  const failAfter = async (attempts: number) => {
    store.execute(`UPDATE deliveries SET attempt_count = ${attempts}`);
    for (const status of ['disabled', 'enabled'] as const) {
      await updateWebhook(store, webhookId, { status });
    }
    const [due = none()] = dueOf(store, webhookId, effects.now(), 1);
    const next = { kind: 'retry', atMs: effects.now() } as const;
    const settled = await store.writer.write('outbox.settle', settlementOf(due, effects.now(), next));
    return [
      settled,
      ...store.query('SELECT status, attempt_count, next_attempt_at IS NULL AS is_over FROM deliveries'),
    ];
  };
  t.strictSame(await failAfter(998), ['pending', { status: 'pending', attempt_count: 999, is_over: 0 }]);
  t.strictSame(await failAfter(999), [
    'exhausted',
    { status: 'exhausted', attempt_count: 1_000, is_over: 1 },
  ]);
  t.strictSame(dueOf(store, webhookId, effects.now(), 1), []);
});

t.test('no body is kept of an attempt that twenty others followed, as nobody is shown it', async (t) => {
  const { store, effects, webhookId } = await oneDue(t);
  await newDeliveries(store, webhookId, 1);
  for (let time = 0; time < 23; time++) {
    for (const due of dueOf(store, webhookId, effects.now(), 2)) {
      const attempt = { responseBody: `${due.seq} ${time}` };
      await store.writer.write(
        'outbox.settle',
        settlementOf(due, effects.now(), { kind: 'delivered' }, attempt),
      );
      // The second one has three attempts less.
      if (time < 19 || due.seq === 1) await store.writer.write('deliveries.redeliver', { id: due.id });
    }
  }
  const bodiesOf = (seq: number) =>
    store
      .query<{ response_body: string | null }>(
        `SELECT response_body FROM attempts
          WHERE delivery_id = (SELECT id FROM deliveries WHERE seq = ${seq}) ORDER BY number`,
      )
      .map(({ response_body }) => response_body);
  const times = Array.from({ length: 20 }, (_, index) => index);
  t.strictSame(bodiesOf(1), [null, null, null, ...times.map((time) => `1 ${time + 3}`)]);
  t.strictSame(
    bodiesOf(2),
    times.map((time) => `2 ${time}`),
  );
});

t.test('a success ends a row of failures', async (t) => {
  const { store, effects, webhookId, due } = await oneDue(t);
  await store.writer.write(
    'outbox.settle',
    settlementOf(due, effects.now(), { kind: 'retry', atMs: effects.now() }),
  );
  await store.writer.write('outbox.settle', settlementOf(due, effects.now(), { kind: 'delivered' }));
  t.match(store.reads.webhooks.get(webhookId), {
    consecutive_failures: 0,
    last_success_at: '2026-11-21T08:00:00.012Z',
  });
  t.equal(store.reads.outbox.history(webhookId).failing_since, null);
  t.match(store.query('SELECT status, attempt_count, next_attempt_at FROM deliveries'), [
    { status: 'delivered', attempt_count: 2, next_attempt_at: null },
  ]);
});

t.test('of two attempts, the one that ended last counts, in whichever order they are settled', async (t) => {
  const next = { failed: { kind: 'exhausted' }, succeeded: { kind: 'delivered' } } as const;
  const at = (ms: number) => new Date(ms).toISOString();
  for (const [first, last] of [
    ['succeeded', 'succeeded'],
    ['succeeded', 'failed'],
    ['failed', 'succeeded'],
    ['failed', 'failed'],
  ] as const) {
    const { store, effects, webhookId, due } = await oneDue(t);
    const settle = (end: 'succeeded' | 'failed', atMs: number) =>
      store.writer.write('outbox.settle', settlementOf(due, atMs, next[end]));
    const firstMs = effects.now();
    const lastMs = firstMs + 5_000;
    effects.advance(10_000);
    await settle(last, lastMs);
    await settle(first, firstMs);
    const endMs = { [first]: firstMs + 12, [last]: lastMs + 12 };
    t.match(
      store.reads.webhooks.get(webhookId),
      {
        last_success_at: endMs['succeeded'] === undefined ? null : at(endMs['succeeded']),
        last_failure_at: endMs['failed'] === undefined ? null : at(endMs['failed']),
        consecutive_failures: last === 'succeeded' ? 0 : first === 'succeeded' ? 1 : 2,
      },
      `${first}, then ${last}`,
    );
    const failingSince = store.reads.outbox.history(webhookId).failing_since;
    t.equal(failingSince, last === 'succeeded' ? null : first === 'failed' ? firstMs + 12 : lastMs + 12);

    effects.jump(-HOUR_MS);
    const setBackMs = effects.now();
    effects.advance(1_000);
    await settle(last, setBackMs);
    const { last_success_at, last_failure_at } = store.reads.webhooks.get(webhookId) ?? {};
    t.equal(
      last === 'succeeded' ? last_success_at : last_failure_at,
      at(setBackMs + 12),
      'the clock was set back',
    );
  }
});

t.test(
  'a success that is settled last ends the row of the failures before it, and of no later ones',
  async (t) => {
    for (const [successMs, failuresMs, count, sinceMs] of [
      [5_000, [0, 10_000], 1, 10_012],
      [0, [5_000, 10_000], 2, 5_012],
    ] as const) {
      const { store, effects, webhookId, due } = await oneDue(t);
      const startMs = effects.now();
      effects.advance(20_000);
      const settle = (afterMs: number, kind: 'exhausted' | 'delivered') =>
        store.writer.write('outbox.settle', settlementOf(due, startMs + afterMs, { kind }));
      for (const failureMs of failuresMs) await settle(failureMs, 'exhausted');
      await settle(successMs, 'delivered');
      t.match(store.reads.webhooks.get(webhookId), { consecutive_failures: count });
      t.equal(store.reads.outbox.history(webhookId).failing_since, startMs + sinceMs);
    }
  },
);

t.test('a failed attempt does not replace the reason of a webhook that is disabled already', async (t) => {
  const { store, effects, webhookId, due } = await oneDue(t);
  await store.writer.write('webhooks.update', { id: webhookId, status: 'disabled', disableReason: 'tired' });
  const failed = {
    ...settlementOf(due, effects.now(), { kind: 'exhausted' }),
    disableReason: 'it answered 410',
  };
  await store.writer.write('outbox.settle', failed);
  effects.advance(6 * DAY_MS);
  await store.writer.write('outbox.settle', settlementOf(due, effects.now(), { kind: 'exhausted' }));
  t.match(store.reads.webhooks.get(webhookId), { status_reason: 'tired', consecutive_failures: 2 });
});

t.test('an attempt of a delivery that was pruned meanwhile is not recorded', async (t) => {
  const { store, effects, due } = await oneDue(t);
  store.execute('DELETE FROM deliveries');
  const before = store.dump();
  for (const next of [{ kind: 'delivered' }, { kind: 'exhausted' }] as const) {
    t.equal(await store.writer.write('outbox.settle', settlementOf(due, effects.now(), next)), 'gone');
  }
  t.strictSame(store.dump(), before);
});

/** `missed`: the deliveries that failed; after the webhook was enabled they have the whole ladder ahead. */
const OTHER_RECEIVERS: {
  name: string;
  setMs?: number;
  changes: Partial<WebhookUpdate>[];
  isDeleted?: true;
  missed: [object, object];
}[] = [
  {
    name: 'has another url',
    changes: [{ url: 'https://other.example/hook' }],
    missed: [
      { status: 'pending', ladder_attempts: 1 },
      { status: 'exhausted', ladder_attempts: 1 },
    ],
  },
  {
    name: 'was enabled again',
    changes: [{ status: 'disabled' }, { status: 'enabled' }],
    missed: [
      { status: 'pending', ladder_attempts: 0 },
      { status: 'pending', ladder_attempts: 0 },
    ],
  },
  {
    name: 'was enabled again, by a clock that was set back',
    setMs: -DAY_MS,
    changes: [{ status: 'disabled' }, { status: 'enabled' }],
    missed: [
      { status: 'pending', ladder_attempts: 0 },
      { status: 'pending', ladder_attempts: 0 },
    ],
  },
  {
    name: 'was deleted',
    changes: [],
    isDeleted: true,
    missed: [
      { status: 'pending', ladder_attempts: 1 },
      { status: 'exhausted', ladder_attempts: 1 },
    ],
  },
];
const OUTCOMES: { next: Settlement['next']; disableReason: string | null }[] = [
  { next: { kind: 'retry', atMs: Date.parse('2026-11-22T08:00:00Z') }, disableReason: 'it answered 410' },
  { next: { kind: 'exhausted' }, disableReason: null },
  { next: { kind: 'delivered' }, disableReason: null },
];
for (const { name, setMs = 0, changes, isDeleted = false, missed } of OTHER_RECEIVERS) {
  t.test(`an attempt from before counts neither for nor against a webhook that ${name}`, async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const id = await newKeysWebhook(store);
    await newDeliveries(store, id, OUTCOMES.length);
    const due = dueOf(store, id, effects.now(), OUTCOMES.length);
    effects.advance(1_000);
    effects.jump(setMs);
    for (const change of changes) {
      await updateWebhook(store, id, change);
    }
    if (isDeleted) await store.writer.write('webhooks.remove', { id });
    // The webhook as it is now has failed, too: one more failure would disable it.
    store.execute(
      `UPDATE webhooks SET consecutive_failures = 1, failing_since = ${effects.now() - 5 * DAY_MS}`,
    );
    const before = store.query('SELECT * FROM webhooks');
    for (const { next, disableReason } of OUTCOMES) {
      const delivery = due.shift() ?? none();
      const settlement = settlementOf(delivery, effects.now(), next);
      const settled = await store.writer.write('outbox.settle', { ...settlement, disableReason });
      t.type(settled, 'string', 'nothing is said to be disabled');
    }
    t.strictSame(store.query('SELECT * FROM webhooks'), before);
    t.match(store.query('SELECT status, ladder_attempts, attempt_count FROM deliveries ORDER BY seq'), [
      { ...missed[0], attempt_count: 1 },
      { ...missed[1], attempt_count: 1 },
      { status: 'delivered', ladder_attempts: 1, attempt_count: 1 },
    ]);
    t.equal(store.query('SELECT * FROM attempts').length, OUTCOMES.length);
  });
}

t.test(
  'when the clock is set back, retries move back as far, not before now; far-off ones become due',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    await newKeysWebhook(store);
    const projectId = await store.project();
    for (let count = 0; count < 4; count++) {
      await store.writer.write('deployments.create', newDeployment(projectId));
    }
    const nowMs = effects.now();
    store.execute(`
    UPDATE deliveries SET next_attempt_at = ${nowMs} + CASE seq
      WHEN 1 THEN -5 WHEN 2 THEN ${HOUR_MS} + 5 WHEN 3 THEN 5 ELSE ${40 * HOUR_MS} END`);
    const after = null;
    t.equal(
      await store.writer.write('outbox.setBack', { byMs: HOUR_MS, furthestMs: 24 * HOUR_MS, after }),
      null,
    );
    t.strictSame(
      store
        .query<{ next_attempt_at: number }>('SELECT next_attempt_at FROM deliveries ORDER BY seq')
        .map((row) => row.next_attempt_at - nowMs),
      [-5, 5, 0, 0],
    );
  },
);

t.test('each retry of a long backlog is set back exactly once, in steps', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  for (let count = 0; count < 3; count++) await newKeysWebhook(store);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const nowMs = effects.now();
  // Of each webhook some are due, and of the others many wait for the same moment.
  store.execute(`
    WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 700)
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at,
                            ladder_started_at, ladder_trigger)
    SELECT 'dlv_' || webhook_id || number, event_id, event_type, webhook_id, 'pending',
           ${nowMs} + iif(number % 3 = 0, -number, ${2 * HOUR_MS} + number % 7), created_at, ladder_started_at, ladder_trigger
      FROM numbers, deliveries`);
  const planned = () =>
    store
      .query<{ at: number }>('SELECT next_attempt_at AS at FROM deliveries ORDER BY seq')
      .map(({ at }) => at);
  const before = planned();
  let steps = 0;
  await inSteps<PendingPosition>((after) => {
    steps++;
    return store.writer.write('outbox.setBack', { byMs: HOUR_MS, furthestMs: 24 * HOUR_MS, after });
  });
  t.equal(steps, 17);
  t.strictSame(
    planned(),
    before.map((atMs) => (atMs > nowMs ? atMs - HOUR_MS : atMs)),
  );
});

t.test(
  'enabling a webhook makes its waiting retries due, in steps, except those that failed since',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const [id, other] = [await newKeysWebhook(store), await newKeysWebhook(store)];
    await store.writer.write('deployments.create', newDeployment(await store.project()));
    const [nowMs, enabledAtMs] = [effects.now(), effects.now() + 1_000];
    copyWaiting(store, 299, nowMs + HOUR_MS);
    store.execute(`
    UPDATE webhooks SET enabled_at = ${enabledAtMs};
    UPDATE deliveries SET ladder_started_at = ${enabledAtMs} WHERE next_attempt_at % 10 = 0 AND next_attempt_at > ${nowMs}`);
    effects.advance(2_000);
    const heard: string[] = [];
    store.writer.onCommit((changes) => heard.push(...changes));
    await inSteps<PendingPosition>((after) =>
      store.writer.write('outbox.retryNow', { webhookId: id, after }),
    );
    t.strictSame(heard, [id, id, id], 'in three steps, of each of which the dispatcher is told');
    const due = (webhookId: WebhookId, startedBefore: number) =>
      store.query(
        `SELECT count(*) AS count, sum(next_attempt_at <= ?) AS due FROM deliveries
        WHERE webhook_id = ? AND ladder_started_at < ?`,
        effects.now(),
        webhookId,
        startedBefore,
      );
    t.strictSame(due(id, enabledAtMs), [{ count: 270, due: 270 }]);
    t.strictSame(due(id, enabledAtMs + 1), [{ count: 300, due: 270 }], 'none of those since then');
    t.strictSame(due(other, enabledAtMs + 1), [{ count: 300, due: 1 }], 'none of another webhook');
  },
);

/** A store with one delivery, which is due, of one webhook. */
async function oneDue(
  t: Test,
): Promise<{ store: TestStore; effects: FakeEffects; webhookId: WebhookId; due: DueDelivery }> {
  const { store, effects, id: webhookId } = await storeWithWebhook(t);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const [due = none()] = dueOf(store, webhookId, effects.now(), 1);
  return { store, effects, webhookId, due };
}
