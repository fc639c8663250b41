import t from 'tap';
import { newDeployment, testStore } from '../helpers/store.ts';

t.test('archiving cancels what waits, with its events, and leaves what runs', async (t) => {
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
  t.strictSame((await store.writer.write('projects.archive', { id: projectId })).canceledIds, []);
});

t.test('archiving leaves reports open: their work goes on elsewhere', async (t) => {
  const store = testStore(t);
  const projectId = await store.project({ command: null });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  t.strictSame((await store.writer.write('projects.archive', { id: projectId })).canceledIds, []);
  t.equal(store.reads.deployments.get(id)?.status, 'queued');
});

t.test('a command that deployments wait for cannot be taken away', async (t) => {
  const store = testStore(t);
  const id = await store.project();
  await store.writer.write('deployments.create', newDeployment(id));
  const before = store.dump();
  const takeAway = () =>
    store.writer.write('projects.set', {
      id,
      changes: { command: null },
      variables: { A: '1' },
      unsetVariables: [],
    });
  await t.rejects(takeAway(), { code: 'conflict', message: /\(1\)/ });
  t.strictSame(store.dump(), before);
  await store.writer.write('deployments.claim', undefined);
  t.match(await takeAway(), { command: null, variable_names: ['A'] });
});

t.test('a project that is not there is not archived', async (t) => {
  const store = testStore(t);
  const before = store.dump();
  await t.rejects(store.writer.write('projects.archive', { id: 'prj_none' as never }), { code: 'not_found' });
  t.strictSame(store.dump(), before);
});
