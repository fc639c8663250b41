import t, { type Test } from 'tap';
import type { Deployment, DeploymentId } from '../../src/domain.ts';
import type { Report } from '../../src/store/reports.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { eventsOf, newDeployment, reportFor, type TestStore, testStore } from '../helpers/store.ts';

t.test('reports of another system set the status, message and outputs of a deployment', async (t) => {
  const effects = fakeEffects();
  const { store, id } = await reported(t, effects);
  effects.advance(1_000);
  t.match(await report(store, id, { status: 'running', message: 'building' }), {
    status: 'running',
    started_at: '2026-11-21T08:00:01.000Z',
    message: 'building',
    reason: null,
  });
  effects.advance(2_500);
  const end = await report(store, id, { status: 'succeeded', outputs: { url: 'https://example.com' } });
  t.match(end, {
    status: 'succeeded',
    reason: null,
    message: 'building',
    outputs: { url: 'https://example.com' },
    finished_at: '2026-11-21T08:00:03.500Z',
    duration_ms: 2_500,
    exit_code: null,
  });
  t.strictSame(eventsOf(store, id), ['deployment.created', 'deployment.started', 'deployment.succeeded']);
});

t.test('a report changes the status, confirms it, or is a conflict once that is final', async (t) => {
  const canceled = { reason: 'user' } as const;
  type Row = [
    before: (Report['status'] | 'cancel')[],
    reported: Report['status'],
    after: Partial<Deployment> | 'conflict',
    events: string[],
  ];
  const rows: Row[] = [
    [[], 'running', { status: 'running' }, ['started']],
    [[], 'succeeded', { status: 'succeeded', started_at: null, duration_ms: null }, ['succeeded']],
    [[], 'failed', { status: 'failed', reason: 'reported' }, ['failed']],
    [['running'], 'running', { status: 'running' }, ['started']],
    [['running'], 'failed', { status: 'failed', reason: 'reported' }, ['started', 'failed']],
    [['running', 'cancel'], 'running', { status: 'canceling' }, ['started']],
    [['running', 'cancel'], 'succeeded', { status: 'succeeded', reason: null }, ['started', 'succeeded']],
    [['running', 'cancel'], 'failed', { status: 'canceled', ...canceled }, ['started', 'canceled']],
    [['succeeded'], 'succeeded', { status: 'succeeded' }, ['succeeded']],
    [['succeeded'], 'failed', 'conflict', ['succeeded']],
    [['succeeded'], 'running', 'conflict', ['succeeded']],
    [['failed'], 'failed', { status: 'failed' }, ['failed']],
    [['failed'], 'succeeded', 'conflict', ['failed']],
    [['cancel'], 'failed', { status: 'canceled', ...canceled }, ['canceled']],
    [['cancel'], 'succeeded', 'conflict', ['canceled']],
    [['cancel'], 'running', 'conflict', ['canceled']],
  ];
  for (const [before, status, after, events] of rows) {
    const { store, id } = await reported(t);
    for (const step of before) {
      if (step === 'cancel') await store.writer.write('deployments.cancel', { id });
      else await report(store, id, { status: step, message: 'first' });
    }
    const name = `${before.join(', ') || 'queued'}, then ${status}`;
    const stored = store.dump();
    if (after === 'conflict') {
      await t.rejects(report(store, id, { status }), { code: 'conflict' }, name);
    } else {
      t.match(await report(store, id, { status }), after, name);
    }
    const hadEnded = after === 'conflict' || before.some((step) => step === status && step !== 'running');
    if (hadEnded) t.strictSame(store.dump(), stored, `${name}: nothing changed`);
    t.strictSame(
      eventsOf(store, id).slice(1),
      events.map((event) => `deployment.${event}`),
      name,
    );
  }
});

t.test('a repeated final report keeps the message and outputs of the first one', async (t) => {
  const { store, id } = await reported(t);
  await report(store, id, { status: 'failed', message: 'no space left', outputs: { node: 'a' } });
  t.match(await report(store, id, { status: 'failed', message: 'never mind', outputs: {} }), {
    message: 'no space left',
    outputs: { node: 'a' },
  });
});

t.test('message and outputs are those of the last report that had any', async (t) => {
  const { store, id } = await reported(t);
  await report(store, id, { status: 'running', message: 'fetching', outputs: { cache: 'cold' } });
  await report(store, id, { status: 'running', message: 'building', outputs: { node: 'a' } });
  const heard: unknown[] = [];
  store.writer.onCommit((changes) => heard.push([...changes]));
  await report(store, id, { status: 'running' });
  t.strictSame(heard, [[id]], 'each report notifies those who wait');
  const { message, outputs } = await report(store, id, { status: 'succeeded' });
  t.strictSame({ message, outputs }, { message: 'building', outputs: { node: 'a' } }, 'those of the last');
});

t.test('with the clock set back, a reported deployment does not start before it was created', async (t) => {
  const effects = fakeEffects();
  const { store, id } = await reported(t, effects);
  effects.jump(-3_600_000);
  t.match(await report(store, id, { status: 'running' }), { started_at: '2026-11-21T08:00:00.000Z' });
});

t.test('a report on an unknown deployment, or one that davit runs itself, is rejected', async (t) => {
  const store = testStore(t);
  const { id } = await store.writer.write('deployments.create', newDeployment(await store.project()));
  const before = store.dump();
  await t.rejects(report(store, id, { status: 'succeeded' }), {
    code: 'conflict',
    message: /davit itself runs/,
  });
  await t.rejects(report(store, 'dpl_none' as DeploymentId, { status: 'succeeded' }), { code: 'not_found' });
  t.strictSame(store.dump(), before);
});

t.test(
  'a report starts nothing in a paused or archived project, and is taken on work that runs or has ended',
  async (t) => {
    for (const status of ['paused', 'archived'] as const) {
      const { store, id } = await reported(t);
      const { project_id: projectId } = store.reads.deployments.existing(id);
      const deployment = newDeployment(projectId);
      const { id: waiting } = await store.writer.write('deployments.create', deployment);
      const { id: over } = await store.writer.write('deployments.create', deployment);
      await report(store, id, {});
      if (status === 'archived') await store.writer.write('projects.archive', { id: projectId });
      else await store.writer.write('projects.setStatus', { id: projectId, status });

      const before = store.dump();
      await t.rejects(report(store, waiting, { message: 'building' }), {
        code: 'conflict',
        message: `the project is ${status}: report again once it is active`,
      });
      t.strictSame(store.dump(), before);
      t.match(await report(store, id, { message: 'building' }), { status: 'running', message: 'building' });
      t.match(await report(store, id, { status: 'succeeded' }), { status: 'succeeded' });
      t.match(await report(store, over, { status: 'failed' }), { status: 'failed', started_at: null });

      await store.writer.write('projects.setStatus', { id: projectId, status: 'active' });
      t.match(await report(store, waiting, {}), { status: 'running' });
    }
  },
);

t.test('a command that is added later does not run a deployment that waits for reports', async (t) => {
  const { store, id } = await reported(t);
  const { project_id: projectId } = store.reads.deployments.existing(id);
  await store.writer.write('projects.set', {
    id: projectId,
    changes: { command: ['/bin/true'] },
    variables: {},
    unsetVariables: [],
  });
  t.equal(await store.writer.write('deployments.claim', undefined), null);
  t.match(await report(store, id, { status: 'succeeded' }), { status: 'succeeded' });
});

t.test('without a final report in time a deployment fails, and later reports change nothing', async (t) => {
  const effects = fakeEffects();
  const { store, id } = await reported(t, effects, 60_000);
  const dueAtMs = effects.now() + 60_000;
  await report(store, id, { status: 'running', outputs: { node: 'a' } });
  t.equal(store.reads.deployments.nextReportDueAt(), dueAtMs, 'the deadline stays');

  effects.advance(59_999);
  t.equal(await endOverdue(store, effects), 0);
  const ahead = await store.writer.write('deployments.endOverdue', { dueByMs: dueAtMs });
  t.equal(ahead, 0, 'nor by a clock that was set back since');
  effects.advance(1);
  t.equal(await endOverdue(store, effects), 1);
  t.match(store.reads.deployments.get(id), {
    status: 'failed',
    reason: 'report_timeout',
    message: 'nobody reported how it went',
    outputs: { node: 'a' },
    finished_at: '2026-11-21T08:01:00.000Z',
  });
  t.equal(store.reads.deployments.nextReportDueAt(), null);
  t.strictSame(eventsOf(store, id).at(-1), 'deployment.failed');

  const before = store.dump();
  t.equal(await endOverdue(store, effects), 0);
  t.match(await report(store, id, { status: 'failed' }), { reason: 'report_timeout' });
  await t.rejects(report(store, id, { status: 'succeeded' }), { code: 'conflict' });
  t.strictSame(store.dump(), before);
});

t.test('an overdue deployment that is canceling ends as canceled', async (t) => {
  const effects = fakeEffects();
  const { store, id } = await reported(t, effects, 1_000);
  await report(store, id, { status: 'running' });
  await store.writer.write('deployments.cancel', { id });
  effects.advance(1_000);
  await endOverdue(store, effects);
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user' });
});

t.test('overdue deployments end in the order in which they were due', async (t) => {
  const effects = fakeEffects();
  const { store, id: last } = await reported(t, effects, 2_000);
  const impatient = await store.project({ name: 'impatient', command: null, reportTimeoutMs: 1_000 });
  const { id: first } = await store.writer.write('deployments.create', newDeployment(impatient));
  effects.advance(2_000);
  await endOverdue(store, effects);
  t.strictSame(
    store.query("SELECT deployment_id FROM events WHERE type = 'deployment.failed' ORDER BY seq"),
    [first, last].map((deployment_id) => ({ deployment_id })),
  );
});

t.test('without a report timeout nothing is overdue; at most 100 are ended at once', async (t) => {
  const effects = fakeEffects();
  const { store } = await reported(t, effects);
  t.equal(store.reads.deployments.nextReportDueAt(), null);
  const limited = await store.project({ name: 'limited', command: null, reportTimeoutMs: 1_000 });
  await Promise.all(
    Array.from({ length: 101 }, () => store.writer.write('deployments.create', newDeployment(limited))),
  );
  effects.advance(1_000_000_000);
  t.equal(await endOverdue(store, effects), 100);
  t.equal(await endOverdue(store, effects), 1);
  t.equal(await endOverdue(store, effects), 0);
  t.match(store.query("SELECT count(*) AS open FROM deployments WHERE status = 'queued'"), [{ open: 1 }]);
});

/** A deployment of a project without a command. */
async function reported(
  t: Test,
  effects = fakeEffects(),
  reportTimeoutMs: number | null = null,
): Promise<{ store: TestStore; id: DeploymentId }> {
  const store = testStore(t, effects);
  const projectId = await store.project({ command: null, reportTimeoutMs });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  return { store, id };
}

function report(store: TestStore, id: DeploymentId, changes: Partial<Report>): Promise<Deployment> {
  return store.writer.write('deployments.report', reportFor(id, changes));
}

function endOverdue(store: TestStore, effects: FakeEffects): Promise<number> {
  return store.writer.write('deployments.endOverdue', { dueByMs: effects.now() });
}
