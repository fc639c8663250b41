import t from 'tap';
import { createClockSettings } from '../../src/clock.ts';
import { createOverdue } from '../../src/deploy/overdue.ts';
import { DAY_MS } from '../../src/durations.ts';
import { AppError } from '../../src/errors.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

t.test('a deployment whose report is overdue fails', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const endOverdue = overdueOn(store, effects);
  t.equal(await endOverdue(), null, 'nothing is waited for');
  const [soon, later] = [
    await store.project({ command: null, reportTimeoutMs: 1_000 }),
    await store.project({ command: null, reportTimeoutMs: 5_000 }),
  ];
  const startMs = effects.now();
  for (const projectId of [...Array.from({ length: 150 }, () => soon), later]) {
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  const untouched = store.dump();
  t.equal(await endOverdue(), startMs + 1_000);
  t.strictSame(store.dump(), untouched);

  effects.advance(1_000);
  const counts = () =>
    store.query('SELECT status, reason, count(*) AS count FROM deployments GROUP BY 1, 2 ORDER BY 1');
  t.equal(await endOverdue(), effects.now(), 'after a batch the loop may be stopped');
  t.match(counts(), [{ status: 'failed', count: 100 }, { status: 'queued' }]);
  t.equal(await endOverdue(), effects.now());
  t.strictSame(counts(), [
    { status: 'failed', reason: 'report_timeout', count: 150 },
    { status: 'queued', reason: null, count: 1 },
  ]);
  t.equal(await endOverdue(), startMs + 5_000);
  effects.advance(4_000);
  await endOverdue();
  t.equal(await endOverdue(), null);
});

t.test('after the clock was set ahead, nothing is ended for five minutes', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const endOverdue = overdueOn(store, effects);
  const projectId = await store.project({ command: null, reportTimeoutMs: 7_200_000 });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  const dueAtMs = await endOverdue();
  const untouched = store.dump();

  effects.jump(10_800_000);
  t.equal(await endOverdue(), effects.now() + 300_000);
  effects.advance(3_000);
  t.equal(await endOverdue(), effects.now() + 297_000);
  effects.jump(-10_800_000);
  t.equal(await endOverdue(), dueAtMs, 'the clock was set back');
  t.strictSame(store.dump(), untouched);

  effects.jump(10_800_000);
  await endOverdue();
  effects.advance(300_000);
  await endOverdue();
  t.equal(await endOverdue(), null);
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'report_timeout' });
});

t.test('nor what is overdue only by a clock that was set ahead while the writer was busy', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const endOverdue = overdueOn(store, effects);
  for (const reportTimeoutMs of [1_000, 7_200_000]) {
    const projectId = await store.project({ command: null, reportTimeoutMs });
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  effects.advance(1_000);
  const ended = endOverdue();
  effects.jump(10_800_000);
  await ended;
  t.strictSame(store.query('SELECT status FROM deployments ORDER BY seq'), [
    { status: 'failed' },
    { status: 'queued' },
  ]);
  t.equal(await endOverdue(), effects.now() + 300_000);
});

t.test('the five minutes outlast a restart', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const projectId = await store.project({ command: null, reportTimeoutMs: 7_200_000 });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  effects.jump(10_800_000);
  await store.writer.write('instance.clockWasSet', { atMs: effects.now(), byMs: 10_800_000 });
  effects.advance(60_000);
  const restarted = overdueOn(store, effects);
  t.equal(await restarted(), effects.now() + 240_000);
  effects.advance(239_999);
  await restarted();
  t.match(store.reads.deployments.get(id), { status: 'queued' });
  effects.advance(1);
  await overdueOn(store, effects)();
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'report_timeout' });
});

t.test('what was created while the clock was ahead is due as much earlier once it is set back', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  let isFull = false;
  const write: TestStore['writer']['write'] = (name, input) =>
    isFull
      ? Promise.reject(new AppError('unavailable', 'the disk is full'))
      : store.writer.write(name, input);
  const endOverdue = overdueOn({ ...store, writer: { ...store.writer, write } }, effects);
  const projectId = await store.project({ command: null, reportTimeoutMs: 7_200_000 });
  const dueAtMs = effects.now() + 7_200_000;
  await store.writer.write('deployments.create', newDeployment(projectId));
  await endOverdue();
  effects.jump(365 * DAY_MS);
  await endOverdue();
  effects.advance(60_000);
  await store.writer.write('deployments.create', newDeployment(projectId));

  effects.jump(-365 * DAY_MS);
  isFull = true;
  await t.rejects(endOverdue(), { code: 'unavailable' });
  isFull = false;
  t.equal(await endOverdue(), dueAtMs);
  const dueAt = () => store.query('SELECT report_due_at AS atMs FROM deployments ORDER BY seq');
  t.strictSame(dueAt(), [{ atMs: dueAtMs }, { atMs: dueAtMs + 60_000 }], 'the earlier one stays');
  await endOverdue();
  t.strictSame(dueAt(), [{ atMs: dueAtMs }, { atMs: dueAtMs + 60_000 }], 'it is done once');

  effects.jump(365 * DAY_MS);
  await endOverdue();
  effects.jump(-365 * DAY_MS);
  t.equal(await endOverdue(), dueAtMs);
  t.strictSame(dueAt(), [{ atMs: dueAtMs }, { atMs: dueAtMs + 60_000 }], 'also if the clock is set again');
});

t.test('a clock set ahead by less than a minute is trusted', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const endOverdue = overdueOn(store, effects);
  const projectId = await store.project({ command: null, reportTimeoutMs: 50_000 });
  await store.writer.write('deployments.create', newDeployment(projectId));
  effects.jump(59_000);
  await endOverdue();
  t.equal(await endOverdue(), null);
});

/** As at the start of davit. */
function overdueOn(store: TestStore, effects: FakeEffects): () => Promise<number | null> {
  const clockSettings = createClockSettings(store.reads.instance.clockSettings(effects.now()));
  return createOverdue(store, clockSettings, effects);
}
