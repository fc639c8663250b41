import t from 'tap';
import type { DeploymentId, ProjectId } from '../../src/domain.ts';
import type { ProjectSettings } from '../../src/store/projects.ts';
import { fakeEffects } from '../helpers/effects.ts';
import {
  appendTo,
  endOf,
  eventsOf,
  newDeployment,
  none,
  ref,
  reportFor,
  type TestStore,
  testStore,
} from '../helpers/store.ts';

t.test('a queued deployment is canceled at once, and the others move up', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const [first, second, third] = await create(store, projectId, 3);

  const canceled = await store.writer.write('deployments.cancel', { id: second });
  t.match(canceled, {
    id: second,
    status: 'canceled',
    reason: 'user',
    started_at: null,
    queue_position: null,
    duration_ms: null,
  });
  t.equal(store.reads.deployments.get(first)?.queue_position, 1);
  t.equal(store.reads.deployments.get(third)?.queue_position, 2);
  t.match(store.query('SELECT queued_count FROM projects'), [{ queued_count: 2 }]);
  t.strictSame(eventsOf(store, second), ['deployment.created', 'deployment.canceled']);
});

t.test('a running deployment is canceling until its command is gone', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const [id] = await create(store, projectId, 1);
  await store.writer.write('deployments.claim', undefined);
  t.match(await store.writer.write('deployments.cancel', { id }), { status: 'canceling', finished_at: null });
  t.strictSame(eventsOf(store, id), ['deployment.created', 'deployment.started'], 'canceling is no event');

  const before = store.dump();
  t.match(await store.writer.write('deployments.cancel', { id }), { status: 'canceling' });
  t.strictSame(store.dump(), before, 'a second time changes nothing');
  await create(store, projectId, 1);
  t.equal(await store.writer.write('deployments.claim', undefined), null, 'and nothing starts beside it');
});

t.test('a deployment that is canceling may still end as succeeded or failed', async (t) => {
  for (const [status, reason] of [
    ['succeeded', null],
    ['failed', 'exit_code'],
    ['canceled', 'user'],
  ] as const) {
    const store = testStore(t);
    const [id] = await create(store, await store.project(), 1);
    await store.writer.write('deployments.claim', undefined);
    await store.writer.write('deployments.cancel', { id });
    await store.writer.write('deployments.finish', endOf(id, { status, reason }));
    t.match(store.reads.deployments.get(id), { status, reason });
    t.equal(eventsOf(store, id).at(-1), `deployment.${status}`);
  }
});

t.test('a deployment that has ended or is unknown cannot be canceled', async (t) => {
  const store = testStore(t);
  const [id] = await create(store, await store.project(), 1);
  await store.writer.write('deployments.cancel', { id });
  const before = store.dump();
  await t.rejects(store.writer.write('deployments.cancel', { id }), {
    code: 'conflict',
    message: /was canceled/,
  });
  await t.rejects(store.writer.write('deployments.cancel', { id: 'dpl_none' as DeploymentId }), {
    code: 'not_found',
  });
  t.strictSame(store.dump(), before);
});

t.test('a redeploy creates a new deployment of the same ref, however the first one ended', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const projectId = await store.project();
  const { keyId } = await store.key({ name: 'night shift' });
  const old = await store.writer.write(
    'deployments.create',
    newDeployment(projectId, { ref: ref('v1.2.3') }),
  );
  await store.writer.write('deployments.cancel', { id: old.id });
  effects.advance(1_000);
  const again = await store.writer.write('deployments.redeploy', { id: old.id, keyId, maxQueued: 100 });
  t.match(again, {
    project_id: projectId,
    ref: 'v1.2.3',
    status: 'queued',
    trigger: 'redeploy',
    redeploy_of: old.id,
    created_by: { key_id: keyId, name: 'night shift' },
    created_at: '2026-11-21T08:00:01.000Z',
    queue_position: 1,
  });
  t.not(again.id, old.id);
  t.match(store.reads.deployments.get(old.id), { status: 'canceled' });
});

t.test('a redeploy is rejected where a new deployment would be, and changes nothing', async (t) => {
  const store = testStore(t);
  const archived = await store.project({ name: 'archived' });
  const [ofArchived] = await create(store, archived, 1);
  await store.writer.write('projects.archive', { id: archived });
  const full = await store.project({ name: 'full' });
  const [ofFull] = await create(store, full, 2);
  const before = store.dump();
  const redeploy = (id: DeploymentId) =>
    store.writer.write('deployments.redeploy', { id, keyId: null, maxQueued: 2 });
  await t.rejects(redeploy(ofArchived), { code: 'conflict' });
  await t.rejects(redeploy(ofFull), { code: 'rate_limited', retryAfterSeconds: 30 });
  await t.rejects(redeploy('dpl_none' as DeploymentId), { code: 'not_found' });
  t.strictSame(store.dump(), before);
});

t.test('each commit notifies of the deployment, log or queue that it changed, and of no other', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const heard: string[][] = [];
  store.writer.onCommit((changes) => heard.push([...changes].sort()));
  const [id] = await create(store, projectId, 1);
  t.strictSame(heard.splice(0), [['queue']]);
  await store.writer.write('deployments.claim', undefined);
  t.strictSame(heard.splice(0), [[id]]);
  await store.writer.write(
    'logs.append',
    appendTo(id, [{ start: 0, bytes: Buffer.from('hello\n') }], { headBytes: 100 }),
  );
  t.strictSame(heard.splice(0), [[`log:${id}`]], 'a log is no change of state');
  await store.writer.write('deployments.cancel', { id });
  t.strictSame(heard.splice(0), [[id, 'queue']], 'the executor hears of a cancellation');
  await store.writer.write('deployments.finish', endOf(id, { status: 'canceled', reason: 'user' }));
  t.strictSame(heard.splice(0), [[id]], 'the executor, who ended it, starts the next by itself');
  await t.rejects(store.writer.write('deployments.cancel', { id }));
  t.strictSame(heard, []);
  await create(store, await store.project({ command: null }), 1);
  t.strictSame(heard.flat(), [], 'there is nothing to start for a project without a command');
});

t.test('previous_ref is the ref of the latest deployment that succeeded', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const previous = [];
  for (const [name, status] of [
    ['v1', 'succeeded'],
    ['v2', 'succeeded'],
    ['v3', 'failed'],
    ['v4', 'succeeded'],
  ] as const) {
    const deployment = newDeployment(projectId, { ref: ref(name) });
    const { id } = await store.writer.write('deployments.create', deployment);
    const claimed = await store.writer.write('deployments.claim', undefined);
    previous.push(claimed?.previous_ref);
    const reason = status === 'failed' ? 'exit_code' : null;
    await store.writer.write('deployments.finish', endOf(id, { status, reason }));
  }
  t.strictSame(previous, [null, 'v1', 'v2', 'v2']);
});

t.test('reported deployments are not queued with those of a command that was added later', async (t) => {
  const store = testStore(t);
  const projectId = await store.project({ command: null, policy: 'latest' });
  const [running, waiting] = await create(store, projectId, 2);
  await store.writer.write('deployments.report', reportFor(running));
  t.strictSame(store.query('SELECT queued_count FROM projects'), [{ queued_count: 0 }]);
  await set(store, projectId, { command: ['/bin/true'] });
  const [id] = await create(store, projectId, 1);
  t.equal(store.reads.deployments.get(waiting)?.status, 'queued', 'it is not superseded');
  t.match(await store.writer.write('deployments.claim', undefined), { id });
});

t.test('with the policy latest a new deployment cancels all that wait, also in a full queue', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const [running] = await create(store, projectId, 1);
  await store.writer.write('deployments.claim', undefined);
  const [elsewhere] = await create(store, await store.project(), 1);
  const older = await create(store, projectId, 3);
  await set(store, projectId, { policy: 'latest' });
  const latest = newDeployment(projectId, { maxQueued: 1 });
  const { id, queue_position } = await store.writer.write('deployments.create', latest);
  t.equal(queue_position, 1);
  for (const canceled of older) {
    t.match(store.reads.deployments.get(canceled), {
      status: 'canceled',
      reason: 'superseded',
      superseded_by: id,
    });
  }
  t.match(store.reads.deployments.get(running), { status: 'running', superseded_by: null });
  for (const waiting of [id, elsewhere]) {
    t.match(store.reads.deployments.get(waiting), { status: 'queued', superseded_by: null });
  }
  t.strictSame(
    store
      .query(`SELECT deployment_id FROM events WHERE type = 'deployment.canceled' ORDER BY seq`)
      .map(({ deployment_id }) => deployment_id),
    older,
    'the oldest first',
  );
});

t.test('with the clock set back, nothing starts before its creation or ends before its start', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const [first, second] = await create(store, await store.project(), 2);
  effects.jump(-3_600_000);
  await store.writer.write('deployments.claim', undefined);
  await store.writer.write('deployments.cancel', { id: second });
  const made = '2026-11-21T08:00:00.000Z';
  t.match(store.reads.deployments.get(first), { created_at: made, started_at: made });
  t.match(store.reads.deployments.get(second), { finished_at: made });

  await store.writer.write('deployments.finish', endOf(first));
  t.match(store.reads.deployments.get(first), { finished_at: made, duration_ms: 0 });

  effects.jump(3_601_000);
  const [third] = await create(store, await store.project(), 1);
  effects.advance(1_000);
  await store.writer.write('deployments.claim', undefined);
  effects.jump(-3_600_000);
  await store.writer.write('deployments.finish', endOf(third));
  t.match(store.reads.deployments.get(third), {
    started_at: '2026-11-21T08:00:02.000Z',
    finished_at: '2026-11-21T08:00:02.000Z',
  });
});

t.test('the process of a deployment that has ended is not recorded', async (t) => {
  const store = testStore(t);
  const [id] = await create(store, await store.project(), 1);
  await store.writer.write('deployments.claim', undefined);
  await store.writer.write('deployments.finish', endOf(id));
  const before = store.dump();
  const process = { processId: 4711, processStartedAt: 1, bootId: 'b' };
  await store.writer.write('deployments.setProcess', { id, ...process });
  t.strictSame(store.dump(), before);
});

t.test('archiving cancels waiting deployments, with their events, and leaves running ones', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const other = await store.project();
  const create = (id = projectId) => store.writer.write('deployments.create', newDeployment(id));
  const running = await create();
  await store.writer.write('deployments.claim', undefined);
  const waiting = [await create(), await create()];
  const elsewhere = await create(other);

  const { project, canceledIds } = await store.writer.write('projects.archive', { id: projectId });
  t.match(project, { id: projectId, status: 'archived', queued_count: 0 });
  t.strictSame(store.reads.projects.resolve(projectId), project);
  t.strictSame(
    canceledIds,
    waiting.map(({ id }) => id),
  );
  const statusOf = (id: string) => store.reads.deployments.get(id)?.status;
  t.strictSame([running.id, ...canceledIds, elsewhere.id].map(statusOf), [
    'running',
    'canceled',
    'canceled',
    'queued',
  ]);
  t.strictSame(
    store.query(`SELECT deployment_id FROM events WHERE type = 'deployment.canceled' ORDER BY seq`),
    canceledIds.map((deployment_id) => ({ deployment_id })),
  );
  for (const { id } of waiting) {
    t.equal(store.reads.deployments.get(id)?.message, 'its project was archived');
  }
  t.strictSame((await store.writer.write('projects.archive', { id: projectId })).canceledIds, []);
});

t.test('archiving leaves deployments open that wait for reports: their work goes on elsewhere', async (t) => {
  const store = testStore(t);
  const projectId = await store.project({ command: null });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  t.strictSame((await store.writer.write('projects.archive', { id: projectId })).canceledIds, []);
  t.equal(store.reads.deployments.get(id)?.status, 'queued');
});

t.test('an unknown project cannot be archived', async (t) => {
  const store = testStore(t);
  const before = store.dump();
  await t.rejects(store.writer.write('projects.archive', { id: 'prj_none' as never }), { code: 'not_found' });
  t.strictSame(store.dump(), before);
});

/** Typed as three, the most that a test takes. */
async function create(
  store: TestStore,
  projectId: ProjectId,
  count: number,
): Promise<[DeploymentId, DeploymentId, DeploymentId]> {
  const ids: DeploymentId[] = [];
  while (ids.length < count) {
    ids.push((await store.writer.write('deployments.create', newDeployment(projectId))).id);
  }
  const [first = none(), second = first, third = first] = ids;
  return [first, second, third];
}

async function set(store: TestStore, id: ProjectId, changes: Partial<ProjectSettings>): Promise<void> {
  await store.writer.write('projects.set', { id, changes, variables: {}, unsetVariables: [] });
}
