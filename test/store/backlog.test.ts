import t from 'tap';
import type { DeliveryId, DeploymentId, ProjectId } from '../../src/domain.ts';
import { backlogReads } from '../../src/store/backlog.ts';
import { deploymentReads } from '../../src/store/deployments.ts';
import { webhookReads } from '../../src/store/webhooks.ts';
import {
  endDeliveries,
  newDeliveries,
  newReplay,
  newWebhook,
  storeWithWebhook,
  updateWebhook,
} from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import {
  countingRows,
  endOf,
  newDeployment,
  none,
  reportFor,
  type TestStore,
  testStore,
} from '../helpers/store.ts';

const NOW_MS = Date.parse('2026-11-21T08:00:00.000Z');

t.test('waiting deployments are listed in the order in which they are claimed', async (t) => {
  const effects = fakeEffects(NOW_MS);
  const store = testStore(t, effects);
  const projects: ProjectId[] = [];
  for (const name of ['one', 'two', 'three']) projects.push(await store.project({ name }));
  await deploy(store, projects[0]);
  const earlier = await store.writer.write('deployments.claim', undefined);
  await store.writer.write('deployments.finish', endOf(earlier?.id ?? none()));
  for (const [index, count] of [3, 1, 2].entries()) {
    for (let made = 0; made < count; made++) await deploy(store, projects[index]);
  }
  const expected = store.reads.backlog.all(NOW_MS, 100).waiting.items.map(({ id }) => id);
  t.equal(expected.length, 6);
  const claimed: DeploymentId[] = [];
  for (;;) {
    effects.advance(1_000);
    const next = await store.writer.write('deployments.claim', undefined);
    if (next === null) break;
    claimed.push(next.id);
    await store.writer.write('deployments.finish', endOf(next.id));
  }
  t.strictSame(claimed, expected);
});

t.test('waiting deployments of a paused project are listed last', async (t) => {
  const store = testStore(t);
  const [paused = none(), active] = [await store.project({ name: 'paused' }), await store.project()];
  for (const project of [paused, paused, active]) await deploy(store, project);
  await store.writer.write('projects.setStatus', { id: paused, status: 'paused' });
  t.strictSame(
    store.reads.backlog.all(NOW_MS, 100).waiting.items.map(({ project_name }) => project_name),
    ['website', 'paused', 'paused'],
  );
});

t.test('the backlog lists the first waiting and reported deployments, and counts all', async (t) => {
  const store = testStore(t);
  const [project, elsewhere] = [await store.project(), await store.project({ name: 'x', command: null })];
  for (let made = 0; made < 5; made++) {
    await deploy(store, project);
    await deploy(store, elsewhere);
  }
  store.execute(`UPDATE projects SET command = '["/bin/true"]'`);
  await deploy(store, elsewhere);
  const { waiting, reported } = store.reads.backlog.all(NOW_MS, 3);
  t.strictSame([waiting.count, reported.count], [6, 5]);
  t.strictSame(
    waiting.items.map(({ project_name, queue_position }) => [project_name, queue_position]),
    [
      ['website', 1],
      ['x', 1],
      ['website', 2],
    ],
  );
  t.strictSame(
    reported.items.map(({ id }) => ({ id })),
    store.query('SELECT id FROM deployments WHERE reported = 1 ORDER BY seq LIMIT 3'),
  );
});

t.test('the backlog counts each waiting deployment at most once for queue positions', async (t) => {
  const store = testStore(t);
  const projects = [await store.project(), await store.project()];
  for (let made = 0; made < 100; made++) await deploy(store, projects[made % 2]);
  const database = store.openReader();
  const counting = countingRows(database);
  const { items } = backlogReads(database, deploymentReads(counting.database), webhookReads(database)).all(
    NOW_MS,
    100,
  ).waiting;
  t.strictSame(
    items.map(({ queue_position }) => queue_position),
    Array.from({ length: 100 }, (_, index) => 1 + Math.floor(index / 2)),
  );
  const counted = counting.counted();
  t.ok(counted > 0 && counted <= 100, `${counted} were counted`);
});

t.test(
  'the backlog lists the first running deployments, webhooks and replays, too, and counts all',
  async (t) => {
    const store = testStore(t);
    for (let made = 0; made < 3; made++) {
      await deploy(store, await store.project());
      await store.writer.write('deployments.claim', undefined);
    }
    const { keyId } = await store.key();
    const [first, second] = [await newWebhook(store, keyId), await newWebhook(store, keyId)];
    await newWebhook(store, keyId, { events: ['deployment.failed'] });
    await newDeliveries(store, first.id, 1);
    for (const { id } of [first, second, second]) await newReplay(store, fakeEffects(), id);
    const [finished] = store.reads.replays.open();
    await store.writer.write('replays.step', { seq: finished?.seq ?? 0, seqs: [], doneSeq: null });
    await newReplay(store, fakeEffects(), first.id);

    const { running, webhooks, replays } = store.reads.backlog.all(NOW_MS, 1);
    t.match(
      [running, webhooks, replays],
      [{ count: 3 }, { count: 2 }, { count: 3 }],
      'finished replays and webhooks without pending deliveries do not count',
    );
    t.match([running.items, webhooks.items, replays.items], [{ length: 1 }, { length: 1 }, { length: 1 }]);
    t.match(replays.items, [{ webhook_id: second.id }]);
    t.strictSame(
      store.reads.backlog
        .webhooks(NOW_MS)
        .map(({ id }) => id)
        .slice(0, 2),
      [first.id, second.id],
    );
  },
);

t.test('a webhook shows the last error of its pending deliveries, and when the next is due', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const [one = none(), two = none(), delivered = none(), lost = none()] = await newDeliveries(store, id, 4);
  endDeliveries(store, [delivered], 'delivered');
  endDeliveries(store, [lost], 'exhausted');
  const attempt = (
    delivery: DeliveryId,
    number: number,
    atMs: number,
    status: number | null,
    error: string | null,
  ) =>
    store.execute(`
      UPDATE deliveries SET attempt_count = ${number}, next_attempt_at = next_attempt_at + 1000 * ${number}
       WHERE id = '${delivery}' AND status = 'pending';
      INSERT INTO attempts (delivery_id, number, at, status_code, error, duration_ms, trigger)
      VALUES ('${delivery}', ${number}, ${atMs}, ${status}, ${error === null ? null : `'${error}'`}, 1, 'schedule')`);
  t.match(store.reads.backlog.webhook(id, NOW_MS), { last_error: null });
  attempt(one, 1, 10, null, 'timeout');
  attempt(two, 4, 20, null, 'dns');
  t.match(store.reads.backlog.webhook(id, NOW_MS), { last_error: 'dns' });
  attempt(one, 2, 30, 500, null);
  attempt(delivered, 1, 40, 200, null);
  attempt(lost, 1, 50, 503, null);
  t.match(store.reads.backlog.webhook(id, NOW_MS), {
    pending_count: 2,
    last_error: '500',
    next_attempt_at: new Date(NOW_MS + 3_000).toISOString(),
  });
  t.strictSame(
    [one, two, delivered].map((delivery) => store.reads.deliveries.lastResult(delivery)),
    ['500', 'dns', '200'],
  );
});

t.test('the success of a delivery that was requested again is no error', async (t) => {
  const { store, id: webhookId } = await storeWithWebhook(t);
  const [id = none()] = await newDeliveries(store, webhookId, 1);
  endDeliveries(store, [id], 'delivered');
  store.execute(`
    UPDATE deliveries SET attempt_count = 2;
    INSERT INTO attempts (delivery_id, number, at, status_code, duration_ms, trigger)
    VALUES ('${id}', 1, 10, 503, 1, 'schedule'), ('${id}', 2, 20, 204, 1, 'schedule')`);
  await store.writer.write('deliveries.redeliver', { id });
  t.match(store.reads.backlog.webhook(webhookId, NOW_MS), { pending_count: 1, last_error: null });
});

t.test('held deliveries are due from when their webhook is enabled', async (t) => {
  const effects = fakeEffects(NOW_MS);
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  await updateWebhook(store, id, { status: 'disabled' });
  await newDeliveries(store, id, 1);
  effects.advance(3_600_000);
  t.match(store.reads.backlog.webhook(id, effects.now()), { held_count: 1, next_attempt_at: null });
  await updateWebhook(store, id, { status: 'enabled' });
  t.match(store.reads.backlog.webhook(id, effects.now()), {
    due_count: 1,
    next_attempt_at: new Date(effects.now()).toISOString(),
  });
  t.match(
    store.reads.backlog.webhook(id, NOW_MS),
    { next_attempt_at: new Date(NOW_MS).toISOString() },
    'the clock was set back since',
  );
});

t.test(
  'a waiting deployment names the one that runs before it, but none that another system carries out',
  async (t) => {
    const store = testStore(t);
    const project = await store.project({ command: null });
    const reported = await store.writer.write('deployments.create', newDeployment(project));
    await store.writer.write('deployments.report', reportFor(reported.id));
    store.execute(`UPDATE projects SET command = '["/bin/true"]'`);
    const runs = () => store.reads.backlog.all(NOW_MS, 1).waiting.items[0]?.project_runs;
    for (let made = 0; made < 2; made++) await deploy(store, project);
    t.equal(runs(), null);
    const id = (await store.writer.write('deployments.claim', undefined))?.id ?? none();
    t.equal(runs(), id);
    await store.writer.write('deployments.cancel', { id });
    t.equal(runs(), id, 'while it is canceling, too');
    await store.writer.write('deployments.finish', endOf(id));
    t.equal(runs(), null);
  },
);

t.test('webhooks are listed by their next attempt, disabled ones last', async (t) => {
  const effects = fakeEffects(NOW_MS);
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const ids = [];
  for (const path of ['disabled', 'later', 'sooner']) {
    ids.push((await newWebhook(store, keyId, { url: `https://${path}.test/` })).id);
    effects.advance(1_000);
  }
  const [disabled, later, sooner] = ids;
  const [last] = await newDeliveries(store, later ?? none(), 1);
  store.execute(`UPDATE deliveries SET next_attempt_at = next_attempt_at + 60000 WHERE id = '${last}'`);
  const id = disabled ?? none();
  await updateWebhook(store, id, { status: 'disabled' });
  const { webhooks, deliveries } = store.reads.backlog.all(effects.now(), 10);
  t.strictSame(
    webhooks.items.map((webhook) => webhook.id),
    [sooner, later, disabled],
  );
  t.strictSame(deliveries, { pending_count: 2, due_count: 1, held_count: 1 });
});

t.test('a deleted webhook is not in the backlog', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  t.match(store.reads.backlog.webhook(id, NOW_MS), { id, pending_count: 0, last_error: null });
  await store.writer.write('webhooks.remove', { id });
  t.equal(store.reads.backlog.webhook(id, NOW_MS), undefined);
  t.strictSame(store.reads.backlog.webhooks(NOW_MS), []);
});

async function deploy({ writer }: TestStore, projectId: ProjectId | undefined): Promise<void> {
  await writer.write('deployments.create', newDeployment(projectId ?? none()));
}
