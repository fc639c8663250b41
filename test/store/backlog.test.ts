import t from 'tap';
import type { DeploymentId, ProjectId } from '../../src/domain.ts';
import { newDeliveries, newWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

const NOW_MS = Date.parse('2026-11-21T08:00:00.000Z');

t.test('what waits stands in the very order in which it is claimed', async (t) => {
  const effects = fakeEffects(NOW_MS);
  const store = testStore(t, effects);
  const projects: ProjectId[] = [];
  for (const name of ['one', 'two', 'three']) projects.push(await store.project({ name }));
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
    await store.writer.write('deployments.finish', { id: next.id, ...SUCCEEDED });
  }
  t.strictSame(claimed, expected);
});

t.test('of each kind there are the first, and the count of all', async (t) => {
  const store = testStore(t);
  const [project, elsewhere] = [await store.project(), await store.project({ command: null })];
  for (let made = 0; made < 5; made++) {
    await deploy(store, project);
    await deploy(store, elsewhere);
  }
  const { waiting, reported } = store.reads.backlog.all(NOW_MS, 2);
  t.strictSame([waiting.count, reported.count], [5, 5]);
  t.strictSame(
    waiting.items.map(({ queue_position }) => queue_position),
    [1, 2],
  );
  t.equal(reported.items.length, 2);
});

t.test('webhooks that are next come first, those that are disabled last', async (t) => {
  const effects = fakeEffects(NOW_MS);
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const ids = [];
  for (const path of ['disabled', 'later', 'sooner']) {
    ids.push((await newWebhook(store, keyId, { url: `https://${path}.test/` })).id);
    effects.advance(1_000);
  }
  const [disabled, later, sooner] = ids;
  const [last] = await newDeliveries(store, later ?? fail(), 1);
  store.execute(`UPDATE deliveries SET next_attempt_at = next_attempt_at + 60000 WHERE id = '${last}'`);
  const id = disabled ?? fail();
  await store.writer.write('webhooks.update', { id, status: 'disabled', disableReason: 'no more' });
  const { webhooks, deliveries } = store.reads.backlog.all(effects.now(), 10);
  t.strictSame(
    webhooks.items.map((webhook) => webhook.id),
    [sooner, later, disabled],
  );
  t.strictSame(deliveries, { pending_count: 2, due_count: 1, held_count: 1 });
});

t.test('a webhook that is deleted is not there', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  t.match(store.reads.backlog.webhook(id, NOW_MS), { id, pending_count: 0, last_error: null });
  await store.writer.write('webhooks.remove', { id });
  t.equal(store.reads.backlog.webhook(id, NOW_MS), undefined);
  t.strictSame(store.reads.backlog.webhooks(NOW_MS), []);
});

const SUCCEEDED = {
  status: 'succeeded' as const,
  reason: null,
  message: null,
  exitCode: 0,
  signal: null,
  outputs: {},
};

async function deploy({ writer }: TestStore, projectId: ProjectId | undefined): Promise<void> {
  await writer.write('deployments.create', newDeployment(projectId ?? fail()));
}

function fail(): never {
  throw new Error('there should be one');
}
