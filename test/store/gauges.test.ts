import t, { type Test } from 'tap';
import type { WebhookId } from '../../src/domain.ts';
import { COUNTED_MAX, type DueCount } from '../../src/store/gauges.ts';
import { WEBHOOKS_OF_KEY_MAX } from '../../src/store/webhooks.ts';
import { newDeliveries, newWebhook, updateWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, reportFor, type TestStore, testStore } from '../helpers/store.ts';

const NONE = { count: 0, oldestAtMs: null };

t.test('due deliveries are counted separately for failing and for healthy webhooks', async (t) => {
  const { store, effects, webhook } = await place(t);
  t.strictSame(due(store, effects.now()), { healthy: NONE, failing: NONE });
  const createdAtMs = effects.now();
  const healthy = await webhook();
  const failing = await webhook();
  const disabled = await webhook();
  const deleted = await webhook();
  await newDeliveries(store, healthy, 2); // two for each of the four webhooks
  store.execute(`UPDATE webhooks SET failing_since = 1 WHERE id = '${failing}'`);
  store.execute(`UPDATE deliveries SET next_attempt_at = ${createdAtMs + 60_000}
                  WHERE seq = (SELECT max(seq) FROM deliveries WHERE webhook_id = '${failing}')`);
  await updateWebhook(store, disabled, { status: 'disabled' });
  await store.writer.write('webhooks.remove', { id: deleted });

  t.strictSame(due(store, createdAtMs - 1), { healthy: NONE, failing: NONE }, 'nothing is due yet');
  t.strictSame(due(store, createdAtMs + 59_999), {
    healthy: { count: 2, oldestAtMs: createdAtMs },
    failing: { count: 1, oldestAtMs: createdAtMs },
  });
  t.strictSame(due(store, createdAtMs + 60_000).failing, { count: 2, oldestAtMs: createdAtMs });
});

t.test('a delivery that was held has been due since its webhook was enabled', async (t) => {
  const { store, effects, webhook } = await place(t);
  const id = await webhook();
  await updateWebhook(store, id, { status: 'disabled' });
  await newDeliveries(store, id, 1);
  effects.advance(3_600_000);
  await updateWebhook(store, id, { status: 'enabled' });
  const enabledAtMs = effects.now();
  t.strictSame(due(store, enabledAtMs + 200).healthy, { count: 1, oldestAtMs: enabledAtMs });
});

t.test(
  'if the clock was set back since the webhook was enabled, they have been due since their own time',
  async (t) => {
    const { store, effects, webhook } = await place(t);
    const id = await webhook();
    effects.jump(-3_600_000);
    await newDeliveries(store, id, 1);
    const createdAtMs = effects.now();
    t.strictSame(due(store, createdAtMs + 200).healthy, { count: 1, oldestAtMs: createdAtMs });
    t.match(store.reads.backlog.webhook(id, createdAtMs + 200), {
      next_attempt_at: new Date(createdAtMs).toISOString(),
    });
  },
);

t.test('a webhook without pending deliveries has none due, whichever is looked at first', async (t) => {
  const { store, effects, webhook } = await place(t);
  const ids = [await webhook(), await webhook()];
  await newDeliveries(store, ids[0] as WebhookId, 1); // one for each
  for (const settled of ids) {
    store.execute(`UPDATE deliveries
                      SET status = iif(webhook_id = '${settled}', 'exhausted', 'pending'),
                          next_attempt_at = iif(webhook_id = '${settled}', NULL, created_at)`);
    t.strictSame(due(store, effects.now()), {
      healthy: { count: 1, oldestAtMs: effects.now() },
      failing: NONE,
    });
  }
});

t.test('more webhooks than fit into one step are looked at in several steps', async (t) => {
  const { store, effects, webhook } = await place(t);
  const ids: WebhookId[] = [];
  for (let made = 0; made < 450; made++) ids.push(await webhook());
  await newDeliveries(store, ids[0] as WebhookId, 1);
  const last = ids.toSorted().at(-1);
  store.execute(`UPDATE deliveries SET next_attempt_at = 5 WHERE webhook_id = '${last}';
                 UPDATE webhooks SET enabled_at = 1`);
  const count = store.reads.gauges.beginDueCount(effects.now());
  let steps = 0;
  while (count.step()) steps += 1;
  t.equal(steps, 3);
  t.strictSame(count.due, { healthy: { count: 450, oldestAtMs: 5 }, failing: NONE });
});

t.test('a long backlog is counted up to a maximum, but its age is that of the oldest', async (t) => {
  const { store, effects, webhook } = await place(t);
  const long = await webhook();
  const dead = await webhook();
  await newDeliveries(store, long, 1);
  store.execute(`UPDATE webhooks SET failing_since = 1 WHERE id = '${dead}';
                 UPDATE webhooks SET enabled_at = 1`);
  store.execute(`
    WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 15000)
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at,
                            ladder_started_at, ladder_trigger)
    SELECT 'dlv_copy' || number, event_id, event_type, '${dead}', 'pending', number, created_at, ladder_started_at,
           ladder_trigger
      FROM numbers, (SELECT * FROM deliveries LIMIT 1)`);
  t.strictSame(due(store, effects.now()), {
    healthy: { count: 1, oldestAtMs: effects.now() },
    failing: { count: COUNTED_MAX, oldestAtMs: 1 },
  });
  // The maximum is for all webhooks together, whichever is looked at first.
  store.execute(`UPDATE webhooks SET failing_since = 1;
                 UPDATE deliveries SET webhook_id = '${long}', next_attempt_at = 2 * seq
                  WHERE webhook_id = '${dead}' AND seq % 2 = 0`);
  const [{ oldest = 0 } = {}] = store.query<{ oldest: number }>(
    'SELECT min(next_attempt_at) AS oldest FROM deliveries',
  );
  t.strictSame(due(store, effects.now()), {
    healthy: NONE,
    failing: { count: COUNTED_MAX, oldestAtMs: oldest },
  });
  store.execute(`UPDATE deliveries SET next_attempt_at = iif(webhook_id = '${long}', 1, 2)`);
  t.equal(due(store, effects.now()).failing.oldestAtMs, 1);
  store.execute(`UPDATE deliveries SET next_attempt_at = iif(webhook_id = '${dead}', 1, 2)`);
  t.equal(due(store, effects.now()).failing.oldestAtMs, 1);
});

t.test('unfinished deployments are counted by status, those of other systems separately', async (t) => {
  const { store } = await place(t);
  const [one, two, elsewhere] = [
    await store.project(),
    await store.project(),
    await store.project({ command: null }),
  ];
  const create = async (projectId: typeof one) =>
    (await store.writer.write('deployments.create', newDeployment(projectId))).id;
  const counts = () =>
    Object.fromEntries(
      store.reads.gauges
        .unfinished()
        .map(({ status, reported, count }) => [`${status} ${reported ? 'external' : 'davit'}`, count]),
    );
  t.strictSame(counts(), { 'queued davit': 0, 'running davit': 0, 'canceling davit': 0 });
  for (const project of [one, one, one, two, elsewhere, elsewhere]) await create(project);
  const first = await store.writer.write('deployments.claim', undefined);
  await store.writer.write('deployments.claim', undefined);
  if (first !== null) await store.writer.write('deployments.cancel', { id: first.id });
  const reportedId = await create(elsewhere);
  await store.writer.write('deployments.report', reportFor(reportedId));
  t.strictSame(counts(), {
    'queued davit': 2,
    'running davit': 1,
    'canceling davit': 1,
    'queued external': 2,
    'running external': 1,
  });
});

async function place(t: Test) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  let made = 0;
  let { keyId } = await store.key();
  return {
    store,
    effects,
    async webhook() {
      made += 1;
      // A key may have no more webhooks.
      if (made % WEBHOOKS_OF_KEY_MAX === 0) ({ keyId } = await store.key());
      return (await newWebhook(store, keyId)).id;
    },
  };
}

function due(store: TestStore, nowMs: number): DueCount['due'] {
  const count = store.reads.gauges.beginDueCount(nowMs);
  while (count.step());
  return count.due;
}
