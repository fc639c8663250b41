import t, { type Test } from 'tap';
import { createOverdue } from '../../src/deploy/overdue.ts';
import { DAY_MS, HOUR_MS, MINUTE_MS } from '../../src/durations.ts';
import { AppError } from '../../src/errors.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, reportFor, type TestStore, testStore } from '../helpers/store.ts';

t.test('a deployment whose report is overdue fails', async (t) => {
  const { store, effects, endOverdue } = setUp(t);
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

t.test('a report is awaited for a time that passed, however the clock is set meanwhile', async (t) => {
  const { store, effects, endOverdue } = setUp(t);
  const projectId = await store.project({ command: null, reportTimeoutMs: 2 * HOUR_MS });
  const passedMs = (await createAt(0)) + (await createAt(HOUR_MS)) + (await createAt(-HOUR_MS));
  effects.jump(-HOUR_MS);
  await endOverdue();
  effects.advance(10_000);
  effects.jump(HOUR_MS);
  await endOverdue();

  effects.advance(2 * HOUR_MS - passedMs - 10_001);
  const untouched = store.dump();
  t.equal(await endOverdue(), effects.now() + 1);
  t.strictSame(store.dump(), untouched);
  for (const waits of [2, 1, 0]) {
    effects.advance(waits === 2 ? 1 : MINUTE_MS);
    await endOverdue();
    t.equal(store.query(`SELECT * FROM deployments WHERE status = 'queued'`).length, waits);
  }
  t.equal(await endOverdue(), null);

  /** Sets the clock and creates a deployment; returns how long the test then waits. */
  async function createAt(setMs: number): Promise<number> {
    effects.jump(setMs);
    await endOverdue();
    await store.writer.write('deployments.create', newDeployment(projectId));
    effects.advance(MINUTE_MS);
    await endOverdue();
    return MINUTE_MS;
  }
});

t.test('nor does it matter if a deployment seems to be created just when the clock was set', async (t) => {
  for (const setMs of [2 * HOUR_MS, -2 * HOUR_MS]) {
    const { store, effects, endOverdue } = setUp(t);
    const projectId = await store.project({ command: null, reportTimeoutMs: HOUR_MS });
    effects.jump(setMs);
    await endOverdue();
    await store.writer.write('deployments.create', newDeployment(projectId));
    await endOverdue();
    for (const byMs of [-setMs, setMs]) {
      effects.advance(2_000);
      effects.jump(byMs);
      t.equal(await endOverdue(), effects.now() + HOUR_MS - (byMs === setMs ? 4_000 : 2_000));
    }
  }
});

t.test('when the clock was set is written once, also if it cannot be at first', async (t) => {
  const disk = { room: 0 };
  const { store, effects, endOverdue } = setUp(t, disk);
  const projectId = await store.project({ command: null, reportTimeoutMs: HOUR_MS });
  await store.writer.write('deployments.create', newDeployment(projectId));
  const dueAtMs = await endOverdue();
  effects.advance(MINUTE_MS);

  effects.jump(-365 * DAY_MS);
  const untouched = store.dump();
  await t.rejects(endOverdue(), { code: 'unavailable' });
  t.strictSame(store.dump(), untouched);
  disk.room = Number.POSITIVE_INFINITY;
  effects.advance(MINUTE_MS);
  t.equal(await endOverdue(), Number(dueAtMs) - 365 * DAY_MS);
  t.equal(await endOverdue(), Number(dueAtMs) - 365 * DAY_MS);
});

t.test('what is created between two settings of the clock is moved by the second only', async (t) => {
  for (const [firstMs, secondMs] of [
    [2 * HOUR_MS, 3 * HOUR_MS],
    [2 * HOUR_MS, -3 * HOUR_MS],
    [-2 * HOUR_MS, 3 * HOUR_MS],
    [2 * HOUR_MS, -2 * HOUR_MS],
  ] as const) {
    const disk = { room: 0 };
    const { store, effects, endOverdue } = setUp(t, disk);
    const projectId = await store.project({ command: null, reportTimeoutMs: 9 * HOUR_MS });
    const create = async () =>
      void (await store.writer.write('deployments.create', newDeployment(projectId)));
    await create();
    await endOverdue();
    for (const byMs of [firstMs, secondMs]) {
      effects.advance(500);
      effects.jump(byMs);
      await t.rejects(endOverdue(), { code: 'unavailable' });
      effects.advance(500);
      await create();
    }
    disk.room = 1; // for the first of them
    await t.rejects(endOverdue(), { code: 'unavailable' });
    disk.room = 1;
    await endOverdue();
    await endOverdue();
    t.strictSame(
      store.query(`SELECT report_due_at - ${effects.now()} AS left FROM deployments ORDER BY seq`),
      [2_000, 1_000, 0].map((passedMs) => ({ left: 9 * HOUR_MS - passedMs })),
      `by ${firstMs / HOUR_MS} and ${secondMs / HOUR_MS} h`,
    );
  }
});

t.test(
  'what is created after the clock was set, and before that is noticed, is due in its time',
  async (t) => {
    const { store, effects, endOverdue } = setUp(t);
    const projectId = await store.project({ command: null, reportTimeoutMs: HOUR_MS });
    for (const setMs of [HOUR_MS, -2 * HOUR_MS]) {
      effects.jump(setMs);
      const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
      const dueAtMs = effects.now() + HOUR_MS;
      effects.advance(500);
      t.equal(await endOverdue(), dueAtMs);
      await store.writer.write('deployments.report', reportFor(id, { status: 'succeeded' }));
    }
  },
);

t.test(
  'what is overdue only by a clock that was set ahead while the writer was busy is not ended',
  async (t) => {
    const { store, effects, endOverdue } = setUp(t);
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
    t.equal(await endOverdue(), effects.now() + 7_199_000);
  },
);

t.test('a clock set ahead by less than a minute is trusted, and not one by a minute', async (t) => {
  for (const [setMs, dueInMs] of [
    [MINUTE_MS - 1, 1],
    [MINUTE_MS, MINUTE_MS],
  ] as const) {
    const { store, effects, endOverdue } = setUp(t);
    const projectId = await store.project({ command: null, reportTimeoutMs: MINUTE_MS });
    await store.writer.write('deployments.create', newDeployment(projectId));
    effects.jump(setMs);
    t.equal(await endOverdue(), effects.now() + dueInMs);
  }
});

/** `endOverdue` writes to a disk that has room for so many writes. */
function setUp(t: Test, disk = { room: Number.POSITIVE_INFINITY }) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const write: TestStore['writer']['write'] = (name, input) =>
    disk.room-- > 0
      ? store.writer.write(name, input)
      : Promise.reject(new AppError('unavailable', 'the disk is full'));
  const onDisk = { ...store, writer: { ...store.writer, write } };
  return { store, effects, endOverdue: createOverdue(onDisk, effects) };
}
