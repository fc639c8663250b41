import { statSync, truncateSync } from 'node:fs';
import { pino } from 'pino';
import t, { type Test } from 'tap';
import { createClockHistory } from '../../src/clock.ts';
import type { DeploymentId, ProjectId } from '../../src/domain.ts';
import { DAY_MS, HOUR_MS } from '../../src/durations.ts';
import { AppError } from '../../src/errors.ts';
import { createPruner, type Pruner } from '../../src/store/pruner.ts';
import { type PrunePosition, type PruneStep, START } from '../../src/store/retention.ts';
import { until } from '../helpers/commands.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { RETENTION_MS } from '../helpers/retention.ts';
import { serve } from '../helpers/served.ts';
import { newDeployment, reportFor, type TestStore, testStore } from '../helpers/store.ts';

t.test('a pass removes all that is past retention, step by step, and logs it at its end', async (t) => {
  const { store, effects, pruner, logged } = await withOldDeployments(t, 40);
  let steps = 0;
  for (let dueAtMs = effects.now(); dueAtMs < effects.now() + HOUR_MS; steps++) {
    t.ok(dueAtMs - effects.now() <= 1_000);
    effects.advance(dueAtMs - effects.now());
    dueAtMs = await pruner.tick();
  }
  t.ok(steps > 10);
  t.strictSame(counts(store), { deployments: 0, events: 0 });
  t.strictSame(logged, [{ level: 'info', deployments: 40, events: 80, msg: 'removed what has expired' }]);
});

t.test('what goes past retention during a pass is left to the next one, so that passes end', async (t) => {
  const { store, effects, pruner } = await withOldDeployments(t, 40);
  const late = await endedDeployment(store, await store.project({ command: null }));
  await pruner.tick();
  effects.advance(RETENTION_MS + 1);
  await untilLeft(pruner, effects, store, 1, 2);
  t.strictSame(store.query('SELECT id FROM deployments'), [{ id: late }]);
});

t.test('a tick before its time does nothing', async (t) => {
  const { store, effects, pruner } = await withOldDeployments(t, 40);
  await untilLeft(pruner, effects, store, 39, 79);
  const dueAtMs = await pruner.tick();
  t.ok(dueAtMs > effects.now());
  const before = store.dump();
  t.equal(await pruner.tick(), dueAtMs);
  t.strictSame(store.dump(), before);
  effects.jump(-DAY_MS);
  t.equal(await pruner.tick(), dueAtMs - DAY_MS, 'the wall clock does not matter');
  effects.jump(HOUR_MS / 2);
  t.equal(await pruner.tick(), dueAtMs - DAY_MS + HOUR_MS / 2);
  t.strictSame(store.dump(), before);
});

t.test('after the clock was set far ahead nothing is removed for a day', async (t) => {
  const { store, effects, pruner, logged } = await beforeDeployments(t);
  const before = store.dump();
  effects.jump(3 * RETENTION_MS);
  t.equal(await pruner.tick(), effects.now() + DAY_MS);
  t.match(logged, [{ level: 'warn', by_ms: 3 * RETENTION_MS }]);
  effects.advance(DAY_MS - 1);
  t.equal(await pruner.tick(), effects.now() + 1);
  t.strictSame(store.dump(), before);
  effects.advance(1);
  await untilLeft(pruner, effects, store, 0, 0);
  effects.jump(HOUR_MS);
  t.equal(await pruner.tick(), effects.now() + DAY_MS, 'again for a day when it is set ahead later');
});

t.test('a clock that is set ahead just as a pass begins stops it, too', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  await endedDeployment(store, await store.project({ command: null }));
  const before = store.dump();
  let isSet = true;
  const now = () => {
    const nowMs = effects.now();
    if (!isSet) effects.jump(3 * RETENTION_MS);
    isSet = true;
    return nowMs;
  };
  const { pruner } = prunerOn(store, { ...effects, now });
  isSet = false;
  t.equal(await pruner.tick(), effects.now() + DAY_MS);
  t.strictSame(store.dump(), before);
});

t.test('the day without removals after a clock jump outlasts a restart, but not a jump back', async (t) => {
  const { store, effects } = await withOldDeployments(t, 3);
  const atMs = effects.now() - 20 * HOUR_MS;
  await store.writer.write('instance.clockWasSet', { atMs, byMs: HOUR_MS });
  const before = store.dump();
  const restarted = prunerOn(store, effects);
  t.match(restarted.logged, [{ level: 'warn', by_ms: HOUR_MS }]);
  t.equal(await restarted.pruner.tick(), atMs + DAY_MS);
  effects.advance(4 * HOUR_MS - 1);
  t.equal(await prunerOn(store, effects).pruner.tick(), effects.now() + 1, 'after another restart');
  t.strictSame(store.dump(), before);

  effects.advance(1);
  const { pruner: later, logged } = prunerOn(store, effects);
  t.equal(await later.tick(), effects.now() + 1, 'it was set a day ago');
  t.strictSame(logged, []);
  await store.writer.write('instance.clockWasSet', { atMs: effects.now() - 1, byMs: 3 * HOUR_MS });
  await store.writer.write('instance.clockWasSet', { atMs: effects.now(), byMs: -3 * HOUR_MS });
  const undone = prunerOn(store, effects);
  t.strictSame(undone.logged, [], 'ahead and back: no warning');
  t.equal(await undone.pruner.tick(), effects.now() + 1, 'nor a pause');
  t.notSame(store.dump(), before);
});

t.test('setting the clock ahead hour by hour stops removals, too, until it is set back', async (t) => {
  const { store, effects, pruner } = await beforeDeployments(t);
  const before = store.dump();
  for (const setMs of [HOUR_MS, HOUR_MS, -HOUR_MS]) {
    effects.jump(setMs);
    t.equal(await pruner.tick(), effects.now() + DAY_MS);
  }
  t.strictSame(store.dump(), before);
  effects.jump(-HOUR_MS / 2);
  t.equal(await pruner.tick(), effects.now() + 1, 'it may be ahead by less than an hour');
  t.notSame(store.dump(), before);
});

t.test('the day without removals is prolonged by setting the clock a day ahead, not by less', async (t) => {
  const { store, effects } = await withOldDeployments(t, 3);
  for (const byMs of [23 * HOUR_MS, 2 * HOUR_MS]) {
    effects.jump(byMs);
    await store.writer.write('instance.clockWasSet', { atMs: effects.now(), byMs });
    effects.advance(HOUR_MS);
  }
  t.equal(await prunerOn(store, effects).pruner.tick(), effects.now() + 22 * HOUR_MS);
  effects.jump(DAY_MS);
  await store.writer.write('instance.clockWasSet', { atMs: effects.now(), byMs: DAY_MS });
  effects.advance(HOUR_MS);
  t.equal(await prunerOn(store, effects).pruner.tick(), effects.now() + 23 * HOUR_MS, 'a day: anew');
});

/** In hours: how long it is awake each day, and when in that time davit restarts; null: never. */
const NIGHTS: [awake: number, restartedAfter: number | null][] = [
  [16, null],
  [16, 0],
  [16, 1],
  [16, 10],
  [9, 1],
  [7, 0],
  [20, 19],
];
for (const [awake, restartedAfter] of NIGHTS) {
  const restarts = restartedAfter === null ? '' : `, and restarts davit after ${restartedAfter} of them`;
  t.test(
    `a machine that sleeps each night and wakes for ${awake} hours${restarts} prunes all the same`,
    async (t) => {
      const { store, effects, ...first } = await withOldDeployments(t, 3);
      let { pruner } = first;
      const isLeft = () => counts(store)['deployments'] !== 0;
      const waitFor = async (durationMs: number) => {
        const untilMs = effects.monotonicMs() + durationMs;
        for (let dueAtMs = await pruner.tick(); isLeft(); dueAtMs = await pruner.tick()) {
          const leftMs = untilMs - effects.monotonicMs();
          if (leftMs <= 0) break;
          effects.advance(Math.min(leftMs, dueAtMs - effects.now()));
        }
      };
      for (let night = 0; night < 5 && isLeft(); night++) {
        const byMs = (24 - awake) * HOUR_MS;
        effects.jump(byMs);
        await store.writer.write('instance.clockWasSet', { atMs: effects.now(), byMs });
        await waitFor((restartedAfter ?? 0) * HOUR_MS);
        if (restartedAfter !== null) pruner = prunerOn(store, effects).pruner;
        await waitFor((awake - (restartedAfter ?? 0)) * HOUR_MS);
      }
      t.notOk(isLeft());
    },
  );
}

t.test('the kinds take turns, each goes on where it stopped, and unused pages come last', async (t) => {
  const place = { atMs: 5, seq: 7, deliverySeq: 0 };
  const { effects, pruner, steps } = prunerOnWriter(({ what, from }) =>
    what.startsWith('de') && from === START ? place : null,
  );
  for (let dueAtMs = effects.now(); dueAtMs < effects.now() + HOUR_MS; ) {
    effects.advance(dueAtMs - effects.now());
    dueAtMs = await pruner.tick();
  }
  t.strictSame(
    steps.map(({ what, from }) => [what, from]),
    [
      ...['idempotencyKeys', 'replays', 'secrets', 'deletedWebhooks', 'deployments', 'events'].map((what) => [
        what,
        START,
      ]),
      ['deletedWebhooks', place],
      ['deployments', place],
      ['unusedPages', START],
    ],
  );
});

t.test(
  'a step works for three eighths of what the last one took, and took as much of the time',
  async (t) => {
    const { effects, pruner, steps, take } = prunerOnWriter(() => ({ ...START, seq: 1 }));
    const rows: [tookMs: number, workMs: number, pauseMs: number][] = [
      [0, 1, 1],
      [2.4, 1, 4],
      [96, 1, 160],
      [1_200, 36, 2_000],
      [6_600, 50, 10_000],
      [6, 50, 10],
    ];
    for (const [tookMs, workMs, pauseMs] of rows) {
      take(tookMs);
      const pausedMs = (await pruner.tick()) - effects.now();
      // The share has risen a little since the pass began.
      t.ok(Math.abs(pausedMs - pauseMs) <= pauseMs / 100, `${pausedMs}`);
      t.ok(Math.abs((steps.at(-1)?.workMs ?? 0) - workMs) <= workMs / 100);
      effects.advance(pauseMs);
    }
  },
);

t.test('the longer a pass lasts, the larger its share; the next pass begins anew', async (t) => {
  let isDone = false;
  const { effects, pruner, steps, take } = prunerOnWriter(() => (isDone ? null : { ...START, seq: 1 }));
  take(16);
  const shareNow = async () => 16 / ((await pruner.tick()) - effects.now() + 16);
  const isShare = async (share: number) => t.ok(Math.abs((await shareNow()) - share) < 0.001, `${share}`);
  await isShare(3 / 8);
  for (const [hours, share] of [
    [1 / 3, 4 / 8],
    [2 / 3, 5 / 8],
    [1, 5 / 8],
    [40, 5 / 8],
  ] as const) {
    effects.advance(hours * HOUR_MS - effects.monotonicMs());
    await isShare(share);
    t.equal(steps.at(-1)?.workMs, share * 16);
  }
  isDone = true;
  while ((await shareNow()) > 0.01) effects.advance(HOUR_MS);
  effects.advance(HOUR_MS);
  await isShare(3 / 8);
});

t.test('what expires faster than a pass first removes it does not pile up', async (t) => {
  const [perMs, removedPerMs, commitMs] = [10, 66, 10];
  const retentionMs = 24_000;
  let removed = 0;
  const { effects, pruner, take, beganAtMs } = prunerOnWriter(({ what, untilMs, workMs }) => {
    take(commitMs);
    if (what !== 'events') return null;
    const left = (untilMs - beganAtMs) * perMs - removed;
    removed += Math.min(left, workMs * removedPerMs);
    take(commitMs + workMs);
    return left <= workMs * removedPerMs ? null : { ...START, seq: 1 };
  }, retentionMs);
  const left = () => (effects.now() - beganAtMs) * perMs - removed;
  let most = 0;
  while (effects.now() < beganAtMs + 10 * retentionMs) {
    most = Math.max(most, left());
    effects.advance(Math.max(1, (await pruner.tick()) - effects.now()));
  }
  t.ok(most < (retentionMs / 2) * perMs, `${most} were left`);
  t.ok(left() < most);
});

t.test(
  'the next pass is within the hour, sooner with a short retention, and logs nothing without removals',
  async (t) => {
    const rows: [retentionMs: number | null, everyMs: number][] = [
      [RETENTION_MS, HOUR_MS],
      [null, HOUR_MS],
      [12 * HOUR_MS, HOUR_MS / 2],
      [1, 1_000],
    ];
    for (const [retentionMs, everyMs] of rows) {
      const { effects, pruner, logged } = await withOldDeployments(t, 0, retentionMs);
      let dueAtMs = effects.now();
      for (let step = 0; step < 7; step++) {
        effects.advance(dueAtMs - effects.now());
        dueAtMs = await pruner.tick();
      }
      t.equal(dueAtMs, effects.now() + everyMs);
      t.strictSame(logged, []);
    }
  },
);

t.test('without a retention nothing is removed', async (t) => {
  const { store, effects, pruner } = await withOldDeployments(t, 3, null);
  const before = store.dump();
  for (let step = 0; step < 20; step++) effects.advance((await pruner.tick()) - effects.now());
  t.strictSame(store.dump(), before);
});

t.test('after a restart the pruner removes what was left', async (t) => {
  const { store, effects, pruner } = await withOldDeployments(t, 40);
  await untilLeft(pruner, effects, store, 0, 79);
  t.ok((counts(store)['events'] ?? 0) > 0);
  await untilLeft(prunerOn(store, effects).pruner, effects, store, 0, 0);
  t.strictSame(counts(store), { deployments: 0, events: 0 });
});

t.test('the pruner slows down while the WAL is long', async (t) => {
  const { store, effects, pruner } = await withOldDeployments(t, 40);
  // SQLite ignores what is behind its frames: the WAL is as long as if a reader held it up.
  const { size } = statSync(`${store.path}-wal`);
  truncateSync(`${store.path}-wal`, 65 * 1024 * 1024);
  t.equal(await pruner.tick(), effects.now() + 10_000);
  truncateSync(`${store.path}-wal`, size);
  effects.advance(10_000);
  t.equal(await pruner.tick(), effects.now() + 1);
});

t.test('the pruner waits while nothing can be written, and then removes everything', async (t) => {
  const { store, effects } = await withOldDeployments(t, 3);
  const refusing = testStore(t, effects);
  await refusing.writer.close();
  let taken = false;
  const write: TestStore['writer']['write'] = (name, input) =>
    (taken ? store : refusing).writer.write(name, input);
  const { pruner, logged } = prunerOn({ ...store, writer: { ...store.writer, write } }, effects);
  const before = store.dump();
  t.equal(await pruner.tick(), effects.now() + 60_000);
  t.strictSame([logged, store.dump()], [[], before]);
  taken = true;
  for (let step = 0; step < 20; step++) effects.advance((await pruner.tick()) - effects.now());
  t.strictSame(counts(store), { deployments: 0, events: 0 });
});

t.test('a step that could not be written is repeated, before the other kinds have their turns', async (t) => {
  const place = { ...START, seq: 7 };
  let isFull = false;
  const { effects, pruner, steps } = prunerOnWriter(({ what, from }) => {
    if (isFull) throw new AppError('unavailable', 'the disk is full');
    return what === 'deployments' && from === START ? place : null;
  });
  const tickAndPause = async () => {
    const pauseMs = (await pruner.tick()) - effects.now();
    effects.advance(pauseMs);
    return pauseMs;
  };
  while (steps.at(-1)?.what !== 'events') await tickAndPause();
  isFull = true;
  t.equal(await tickAndPause(), 60_000);
  isFull = false;
  await tickAndPause();
  t.strictSame(
    steps.slice(-2).map(({ what, from }) => [what, from]),
    [
      ['deployments', place],
      ['deployments', place],
    ],
  );
});

t.test('a bug in one kind of step throws once a pass, and the other kinds are still removed', async (t) => {
  const { store, effects, pruner, logged } = await withOldDeployments(t, 3);
  store.execute('DROP TABLE idempotency_keys');
  for (let pass = 0; pass < 2; pass++) {
    await t.rejects(pruner.tick(), /no such table/);
    t.equal(await pruner.tick(), effects.now() + 10_000);
    effects.advance(10_000);
    for (let dueAtMs = effects.now(); dueAtMs < effects.now() + HOUR_MS; ) {
      effects.advance(dueAtMs - effects.now());
      dueAtMs = await pruner.tick();
    }
    effects.advance(HOUR_MS);
  }
  t.strictSame(counts(store), { deployments: 0, events: 0 });
  t.equal(logged.length, 1);
});

t.test('a bug in the last kind of step ends the pass', async (t) => {
  const { store, effects } = await withOldDeployments(t, 0);
  const write: TestStore['writer']['write'] = (name, input) =>
    Object(input).what === 'unusedPages'
      ? Promise.reject(new Error('a bug'))
      : store.writer.write(name, input);
  const { pruner } = prunerOn({ ...store, writer: { ...store.writer, write } }, effects);
  for (let step = 0; step < 6; step++) effects.advance((await pruner.tick()) - effects.now());
  await t.rejects(pruner.tick(), /a bug/);
  effects.advance(10_000);
  t.equal(await pruner.tick(), effects.now() + HOUR_MS);
});

t.test('davit serve stops in the middle of pruning, and goes on with it when it starts again', async (t) => {
  const store = testStore(t, fakeEffects(1));
  await store.writer.write('deployments.create', newDeployment(await store.project({ command: null })));
  store.execute(`
    UPDATE deployments SET status = 'canceled', finished_at = 1;
    WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 4000)
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    SELECT 'evt_' || number, 'deployment.created', 'dpl_1', 'prj_1', 1, '{}' FROM numbers`);
  const events = () => counts(store)['events'] ?? 0;

  const directory = store.path.replace(/\/[^/]+$/, '');
  const first = await serve(t, directory, '--retention', '1h');
  await until(() => events() < 4_000);
  t.equal(await first.stop(), 0);
  const left = events();
  t.ok(left > 0, 'it did not wait for the end');
  const second = await serve(t, directory, '--retention', '1h');
  await until(() => events() === 0);
  t.equal(await second.stop(), 0);
  t.strictSame(counts(store), { deployments: 0, events: 0 });
  t.strictSame(store.query('PRAGMA integrity_check'), [{ integrity_check: 'ok' }]);
});

/** As far as before the step that looks at deployments. */
async function beforeDeployments(t: Test) {
  const rest = await withOldDeployments(t, 3);
  for (let step = 0; step < 4; step++) rest.effects.advance((await rest.pruner.tick()) - rest.effects.now());
  return rest;
}

async function withOldDeployments(t: Test, count: number, retentionMs: number | null = RETENTION_MS) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const projectId = await store.project({ command: null });
  for (let made = 0; made < count; made++) {
    await endedDeployment(store, projectId);
  }
  effects.advance(RETENTION_MS + 1);
  return { store, effects, ...prunerOn(store, effects, retentionMs) };
}

async function endedDeployment(store: TestStore, projectId: ProjectId): Promise<DeploymentId> {
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await store.writer.write('deployments.report', reportFor(id, { status: 'failed' }));
  return id;
}

function prunerOn(store: TestStore, effects: FakeEffects, retentionMs: number | null = RETENTION_MS) {
  const { logger, lines: logged } = keptLog({
    base: null,
    timestamp: false,
    formatters: { level: (level) => ({ level }) },
  });
  const clockHistory = createClockHistory(store.reads.instance.clockSettings(effects.now()));
  // The clock stands still during a step: as short as they can be, there are several.
  const write: TestStore['writer']['write'] = (name, input) =>
    store.writer.write(name, { ...(input as object), workMs: 0 } as never);
  return {
    pruner: createPruner({ writer: { write }, effects, logger, clockHistory, retentionMs }),
    logged,
  };
}

/** On a writer that takes its time for each step, and then returns where `next` says. */
function prunerOnWriter(next: (step: PruneStep) => PrunePosition | null, retentionMs = RETENTION_MS) {
  const effects = fakeEffects();
  const steps: PruneStep[] = [];
  let tookMs = 0;
  const write = async (_: unknown, step: PruneStep) => {
    steps.push(step);
    const place = next(step);
    effects.advance(tookMs);
    return { removed: {}, next: place, walBytes: 0 };
  };
  const clockHistory = createClockHistory([]);
  const writer = { write: write as never };
  const logger = pino({ enabled: false });
  return {
    effects,
    steps,
    pruner: createPruner({ writer, effects, logger, clockHistory, retentionMs }),
    beganAtMs: effects.now(),
    take: (durationMs: number) => {
      tookMs = durationMs;
    },
  };
}

/** Lets it go on until no more deployments and events than these are left. */
async function untilLeft(
  pruner: Pruner,
  effects: FakeEffects,
  store: TestStore,
  deployments: number,
  events: number,
): Promise<void> {
  const all = () => counts(store);
  for (let step = 0; step < 500; step++) {
    if ((all()['deployments'] ?? 0) <= deployments && (all()['events'] ?? 0) <= events) return;
    effects.advance((await pruner.tick()) - effects.now());
  }
  throw new Error(`after 500 steps there are ${JSON.stringify(all())}`);
}

function counts(store: TestStore): Record<string, number> {
  const [row = {}] = store.query<Record<string, number>>(
    'SELECT (SELECT count(*) FROM deployments) AS deployments, (SELECT count(*) FROM events) AS events',
  );
  return row;
}
