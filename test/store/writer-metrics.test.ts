import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { newMetricsMemory } from '../../src/metric-cells.ts';
import { exposition } from '../../src/metrics/exposition.ts';
import { openForWriting } from '../../src/store/database.ts';
import { createGroupCommit, type QueuedWrite, type WriteResult } from '../../src/store/group-commit.ts';
import { writerMetrics } from '../../src/store/writer-metrics.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { parseMetrics } from '../helpers/metrics.ts';
import { newDeployment, openWithThread, PROJECT, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('each transaction is counted once, with all its writes, rejected ones too', async (t) => {
  const { path, ...store } = testStore(t);
  const projectId = await store.project();
  const metrics = writerMetrics(newMetricsMemory());
  const group = createGroupCommit(openForWriting(path, fakeEffects()), fakeEffects(), metrics);
  t.teardown(group.close);
  const write = (changes = {}, lowPriority = false) =>
    new Promise<WriteResult>((settle) =>
      group.enqueue({
        name: 'deployments.create',
        input: newDeployment(projectId, { maxQueued: null, ...changes }),
        lowPriority,
        settle,
      } satisfies QueuedWrite),
    );
  await Promise.all([write(), write(), write({ projectId: 'prj_none' })]);
  const { value } = scrape(metrics);
  t.equal(value('davit_commit_duration_seconds_count'), 1);
  t.equal(value('davit_commit_writes_sum'), 3);
  t.equal(value('davit_commit_writes_bucket', { le: '2' }), 0);
  t.equal(value('davit_commit_writes_bucket', { le: '4' }), 1);
  t.equal(value('davit_commit_failures_total'), 0);

  for (const lowPriority of [false, true]) {
    const many = Promise.all(Array.from({ length: 300 }, () => write({}, lowPriority)));
    await until(() => scrape(metrics).value('davit_writes_queued') === 44);
    await many;
    t.equal(scrape(metrics).value('davit_writes_queued'), 0);
    for (let turn = 0; turn < 3; turn++) await nextTurn();
    t.equal(scrape(metrics).value('davit_commit_duration_seconds_count'), lowPriority ? 5 : 3);
  }
});

t.test('a transaction that a full disk rejects counts as a failure, not as a commit', async (t) => {
  const { path, ...store } = testStore(t);
  const projectId = await store.project();
  const metrics = writerMetrics(newMetricsMemory());
  const database = openForWriting(path, fakeEffects());
  const group = createGroupCommit(database, fakeEffects(), metrics);
  t.teardown(group.close);
  const before = store.dump();
  database.pragma(`max_page_count = ${database.pragma('page_count', { simple: true })}`);
  const results = await Promise.all(
    Array.from(
      { length: 200 },
      () =>
        new Promise<WriteResult>((settle) =>
          group.enqueue({
            name: 'deployments.create',
            input: newDeployment(projectId, { maxQueued: null }),
            lowPriority: false,
            settle,
          }),
        ),
    ),
  );
  t.ok(results.every(({ ok }) => !ok));
  t.strictSame(store.dump(), before);
  t.equal(scrape(metrics).value('davit_commit_failures_total'), 1);
  t.equal(scrape(metrics).value('davit_commit_duration_seconds_count'), 0);
});

t.test('the writer thread counts its checkpoints in memory that another thread reads', async (t) => {
  const memory = newMetricsMemory();
  const store = await openWithThread(t, `${temporaryDirectory(t)}/davit.db`, { metricsMemory: memory });
  t.teardown(store.close);
  const project = await store.writer.write('projects.create', { ...PROJECT, command: null, timeoutMs: null });
  const metrics = writerMetrics(memory);
  const checkpoints = () =>
    scrape(metrics).value('davit_checkpoint_duration_seconds_count', { kind: 'background' });
  // The writer looks at the WAL every half second, and ten times a second while it grows.
  for (let size = 500_000; checkpoints() === 0; size++) {
    const variables = { FILLER: 'x'.repeat(size) };
    await store.writer.write('projects.set', { id: project.id, changes: {}, variables, unsetVariables: [] });
    await store.writer.write('deployments.create', newDeployment(project.id, { maxQueued: null }));
  }
  t.ok(scrape(metrics).value('davit_commit_writes_sum') > 1);
});

t.test('the writer itself copies the rest of a WAL with more than 32 MiB in use', async (t) => {
  const memory = newMetricsMemory();
  const store = await openWithThread(t, `${temporaryDirectory(t)}/davit.db`, { metricsMemory: memory });
  t.teardown(store.close);
  const variables = { FILLER: 'x'.repeat(33 * 1024 * 1024) };
  await store.writer.write('projects.create', { ...PROJECT, variables });
  const metrics = writerMetrics(memory);
  const count = (kind: string) => scrape(metrics).value('davit_checkpoint_duration_seconds_count', { kind });
  await until(() => count('catch_up') > 0);
  t.ok(count('background') > 0, 'after the checkpoint thread copied what it could');
});

function scrape({ all }: ReturnType<typeof writerMetrics>) {
  return parseMetrics(exposition(all));
}
