import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import type { DeliveryId, DeploymentId, ProjectId, WebhookId } from '../../src/domain.ts';
import { DAY_MS } from '../../src/durations.ts';
import { connect, openForWriting } from '../../src/store/database.ts';
import { retentionWrites, START } from '../../src/store/retention.ts';
import {
  copyDeliveries,
  copyWaiting,
  endDeliveries,
  newDeliveries,
  newReplay,
  newWebhook,
  updateWebhook,
} from '../helpers/deliveries.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import { pruneAll, RETENTION_MS, rowsOf, stepsOf } from '../helpers/retention.ts';
import {
  appendTo,
  endOf,
  newDeployment,
  none,
  preparedBy,
  reportFor,
  type TestStore,
  temporaryDirectory,
  testStore,
} from '../helpers/store.ts';

t.test('deployments past retention are removed with their logs, unfinished ones never', async (t) => {
  const { store, effects } = setUp(t);
  const projectId = await store.project({ command: null });
  const [old, young, running, queued] = [
    await created(store, projectId),
    await created(store, projectId),
    await created(store, projectId),
    await created(store, projectId),
  ];
  await log(store, old, 3);
  await log(store, young, 3);
  await report(store, running, 'running');
  await report(store, old, 'failed');
  effects.advance(1);
  await report(store, young, 'failed');
  effects.advance(RETENTION_MS);

  t.match(await pruneAll(store), { deployments: 1, logBytes: 30 });
  t.strictSame(idsOf(store, 'deployments'), [young, running, queued]);
  t.strictSame(store.query('SELECT DISTINCT deployment_id FROM log_chunks'), [{ deployment_id: young }]);
  effects.advance(100 * RETENTION_MS);
  await pruneAll(store);
  t.strictSame(idsOf(store, 'deployments'), [running, queued], 'unfinished ones are never too old');
});

t.test('the last successful deployment of each project is kept for the next previous_ref', async (t) => {
  const { store, effects } = setUp(t);
  const projects = [await store.project(), await store.project()];
  const last: DeploymentId[] = [];
  for (const projectId of projects) {
    const ids = [];
    for (let count = 0; count < 5; count++) ids.push(await created(store, projectId));
    for (const [index, id] of ids.entries()) await finish(store, id, index < 3 ? 'succeeded' : 'failed');
    last.push(ids[2] as DeploymentId);
  }
  effects.advance(RETENTION_MS + 1);
  t.match(await pruneAll(store), { deployments: 8 });
  t.strictSame(idsOf(store, 'deployments'), last);
  await created(store, projects[0] as ProjectId);
  t.match(await store.writer.write('deployments.claim', undefined), { previous_ref: 'main' });
});

t.test(
  'deliveries past retention are removed with their attempts, then events without deliveries',
  async (t) => {
    const { store, effects, id } = await withWebhook(t);
    const cutoffMs = effects.now();
    effects.advance(RETENTION_MS);
    // All are of an event that is old enough.
    const rows: [name: string, columns: string, attemptAtMs: number, goes: boolean][] = [
      ['delivered', `status = 'delivered', delivered_at = ${cutoffMs - 1}`, cutoffMs - 1, true],
      ['delivered later', `status = 'delivered', delivered_at = ${cutoffMs}`, cutoffMs - 1, false],
      ['exhausted', `status = 'exhausted'`, cutoffMs - 1, true],
      ['exhausted later', `status = 'exhausted'`, cutoffMs, false],
      ['begun anew later', `status = 'exhausted', ladder_started_at = ${cutoffMs}`, cutoffMs - 1, false],
      ['pending', `status = 'pending', next_attempt_at = 1`, cutoffMs - 1, false],
    ];
    const deliveries = await newDeliveries(store, id, rows.length);
    store.execute(`UPDATE events SET created_at = ${cutoffMs - DAY_MS}`);
    for (const [index, [, columns, attemptAtMs]] of rows.entries()) {
      store.execute(`
      UPDATE deliveries SET created_at = ${cutoffMs - DAY_MS}, ladder_started_at = ${cutoffMs - DAY_MS},
             attempt_count = 2, next_attempt_at = NULL, ${columns}
       WHERE id = '${deliveries[index]}';
      INSERT INTO attempts (delivery_id, number, at, duration_ms, trigger)
      VALUES ('${deliveries[index]}', 1, 1, 1, 'schedule'), ('${deliveries[index]}', 2, ${attemptAtMs}, 1, 'schedule')`);
    }
    t.match(await pruneAll(store), { deliveries: 2, attempts: 4, events: 2 });
    for (const [index, [name, , , goes]] of rows.entries()) {
      const delivery = deliveries[index] as DeliveryId;
      const left = store.query('SELECT 1 FROM deliveries WHERE id = ?', delivery).length;
      const attempts = store.query('SELECT 1 FROM attempts WHERE delivery_id = ?', delivery).length;
      t.strictSame([left, attempts], goes ? [0, 0] : [1, 2], name);
    }
    t.equal(store.query('SELECT 1 FROM events').length, 4, 'those that a delivery refers to');
  },
);

t.test(
  'an event without deliveries is removed only past retention, and never if there is no retention',
  async (t) => {
    const { store, effects } = setUp(t);
    const projectId = await store.project({ command: null });
    await created(store, projectId);
    effects.advance(RETENTION_MS + 1);
    await created(store, projectId);
    t.match(await pruneAll(store), { events: 1 });
    t.match(store.query('SELECT created_at FROM events'), [{ created_at: effects.now() }]);
    t.strictSame(await pruneAll(store, null), {}, 'without a retention all stay');
    effects.advance(100 * RETENTION_MS);
    t.strictSame(await pruneAll(store, null), {});
  },
);

t.test('deliveries held for a disabled webhook are kept as long as the webhook is', async (t) => {
  const { store, effects, id, keyId } = await withWebhook(t);
  const deliveries = await newDeliveries(store, id, 3);
  await updateWebhook(store, id, { status: 'disabled' });
  effects.advance(10 * RETENTION_MS);
  t.strictSame(await pruneAll(store), {});
  await store.writer.write('keys.revoke', { id: keyId });
  t.strictSame(await pruneAll(store), {});
  t.strictSame(idsOf(store, 'deliveries'), deliveries);

  await store.writer.write('webhooks.remove', { id });
  t.match(await pruneAll(store), { deliveries: 3, events: 3 });
});

t.test('a deleted webhook goes with its deliveries, pending ones too, and its replays', async (t) => {
  const { store, effects, id, keyId } = await withWebhook(t);
  const other = await newWebhook(store, keyId);
  const deliveries = await newDeliveries(store, id, 60);
  endDeliveries(store, deliveries.slice(0, 20), 'delivered');
  attempts(store, deliveries.slice(0, 20));
  await newReplay(store, effects, id);
  await store.writer.write('webhooks.remove', { id });
  t.match(await pruneAll(store, null), { webhooks: 1, deliveries: 60, attempts: 20, replays: 1 });
  t.strictSame(idsOf(store, 'webhooks'), [other.id]);
  t.equal(store.query('SELECT 1 FROM deliveries WHERE webhook_id = ?', other.id).length, 60);
});

t.test('a webhook deleted during a pass is left to the next one', async (t) => {
  const { store, effects, id } = await withWebhook(t);
  await newDeliveries(store, id, 3);
  const step = {
    what: 'deletedWebhooks',
    from: START,
    untilMs: effects.now(),
    retentionMs: null,
    workMs: 1,
  } as const;
  effects.advance(1);
  await store.writer.write('webhooks.remove', { id });
  const { removed, next } = await store.writer.write('retention.step', step);
  t.strictSame([removed, next], [{}, null]);
  t.equal(idsOf(store, 'deliveries').length, 3);
  const nextPass = { ...step, untilMs: effects.now() };
  t.match(await store.writer.write('retention.step', nextPass), { removed: { deliveries: 3 } });
});

t.test('deliveries that an open replay is yet to send are kept until they were sent', async (t) => {
  const { store, effects, id } = await withWebhook(t);
  const before = await newDeliveries(store, id, 2);
  effects.advance(1_000);
  const sinceMs = effects.now();
  const within = await newDeliveries(store, id, 3);
  effects.advance(1);
  const after = await newDeliveries(store, id, 1);
  endDeliveries(store, [...before, ...within, ...after], 'delivered');
  effects.advance(RETENTION_MS + 60_000);
  await newReplay(store, effects, id, { sinceMs, untilMs: sinceMs });
  t.match(await pruneAll(store), { deliveries: 3, events: 3 });
  t.strictSame(idsOf(store, 'deliveries'), within);

  const [open = none()] = store.reads.replays.open();
  const { seqs } = store.reads.replays.slice(open, 0, 2);
  await store.writer.write('replays.step', { seq: open.seq, seqs, doneSeq: seqs[1] as number });
  endDeliveries(store, within.slice(0, 2), 'delivered');
  effects.advance(RETENTION_MS + 60_000);
  t.match(await pruneAll(store), { deliveries: 2 });
  t.strictSame(idsOf(store, 'deliveries'), within.slice(2));
});

t.test('an open replay of all deliveries keeps the first and the last of them', async (t) => {
  const { store, effects, id } = await withWebhook(t);
  const all = await newDeliveries(store, id, 2);
  endDeliveries(store, all, 'delivered');
  effects.advance(RETENTION_MS + 60_000);
  await newReplay(store, effects, id);
  t.strictSame(await pruneAll(store), {});
  t.strictSame(idsOf(store, 'deliveries'), all);
});

for (const whileCounted of [false, true]) {
  const since = whileCounted ? 'the deliveries of a replay are counted' : 'the request of a replay';
  t.test(`what succeeds since ${since} is told by no number that retention frees`, async (t) => {
    const { store, effects, id, keyId } = await withWebhook(t);
    const other = await newWebhook(store, keyId);
    await newDeliveries(store, id, 2);
    const succeed = async (webhookId: WebhookId) => {
      const [due = none()] = dueOf(store, webhookId, effects.now(), 1);
      await store.writer.write('outbox.settle', settlementOf(due, effects.now(), { kind: 'delivered' }));
    };
    for (const webhookId of [id, other.id, other.id]) await succeed(webhookId);
    const latest = store.reads.replays.latest(id);
    if (!whileCounted) await newReplay(store, effects, id, latest);
    await store.writer.write('webhooks.remove', { id: other.id });
    t.match(await pruneAll(store, null), { attempts: 2 });
    if (whileCounted) await newReplay(store, effects, id, latest);
    await succeed(id);

    const [open = none()] = store.reads.replays.open();
    const { seqs } = store.reads.replays.slice(open, 0, 2);
    await store.writer.write('replays.step', { seq: open.seq, seqs, doneSeq: null });
    t.match(store.query('SELECT status FROM deliveries ORDER BY seq'), [
      { status: 'pending' },
      { status: 'delivered' },
    ]);
  });
}

t.test('idempotency keys are remembered for three days, whatever the retention', async (t) => {
  const { store, effects } = setUp(t);
  const { keyId } = await store.key();
  const projectId = await store.project({ command: null });
  const request = {
    operation: 'deployments.create',
    input: newDeployment(projectId, { keyId }),
    keyId,
    identity: { keyId, idempotencyKey: 'ci-1', requestHash: Buffer.alloc(32) },
    statusCode: 201,
    locationPrefix: '/v2/deployments/',
  } as const;
  const first = await store.writer.write('answer', request);
  const { id } = JSON.parse(first.body) as { id: DeploymentId };
  await report(store, id, 'failed');
  effects.advance(3 * DAY_MS);
  t.match(await pruneAll(store, DAY_MS), { deployments: 1 });
  t.equal(store.reads.deployments.get(id), undefined);
  t.strictSame(
    await store.writer.write('answer', request),
    { ...first, replayed: true },
    'the answer outlives the deployment',
  );
  effects.advance(1);
  t.strictSame(await pruneAll(store, null), { idempotencyKeys: 1 });
  t.strictSame(store.query('SELECT * FROM idempotency_keys'), []);
});

t.test('idempotency keys of a revoked key are forgotten at once, whatever the clock said then', async (t) => {
  const { store, effects } = setUp(t);
  const [revoked, living] = [(await store.key()).keyId, (await store.key()).keyId];
  store.execute(`
    INSERT INTO idempotency_keys (key_id, idempotency_key, request_hash, status_code, body, created_at)
    ${counted(40)} SELECT id, number, zeroblob(32), 201, 'whsec_', ${Date.UTC(2026, 10, 21)} FROM keys, numbers`);
  t.strictSame(await pruneAll(store, null), {});
  effects.jump(-4 * DAY_MS);
  await store.writer.write('keys.revoke', { id: revoked });
  effects.jump(4 * DAY_MS);
  t.ok((await stepsOf(store, 'idempotencyKeys')).every((step) => rowsOf(step) <= 16));
  t.strictSame(store.query('SELECT key_id, count(*) AS count FROM idempotency_keys GROUP BY key_id'), [
    { key_id: living, count: 40 },
  ]);
});

t.test('secrets are removed when they expire, and valid ones stay', async (t) => {
  const { store, effects, id, keyId } = await withWebhook(t);
  await store.writer.write('webhooks.rotate', { id, overlapMs: DAY_MS });
  await store.writer.write('keys.rotate', { id: keyId, overlapMs: DAY_MS });
  const counts = () =>
    store.query('SELECT (SELECT count(*) FROM webhook_secrets) w, (SELECT count(*) FROM key_secrets) k');
  effects.advance(DAY_MS - 1);
  t.strictSame(await pruneAll(store, null), {});
  t.strictSame(counts(), [{ w: 2, k: 2 }]);
  effects.advance(1);
  t.strictSame(await pruneAll(store, null), { secrets: 2 });
  t.strictSame(counts(), [{ w: 1, k: 1 }]);
  effects.advance(100 * RETENTION_MS);
  t.strictSame(await pruneAll(store, null), {});
});

t.test(
  'a step ends when its time is over, also within a log or among the deliveries of an event',
  async (t) => {
    const { store, effects, id } = await withWebhook(t);
    const [delivery] = await newDeliveries(store, id, 1);
    copyDeliveries(store, 200);
    endDeliveries(store, [delivery as DeliveryId], 'delivered');
    store.execute(`
    INSERT INTO attempts (delivery_id, number, at, duration_ms, trigger)
    ${counted(100)} SELECT '${delivery}', number, 1, 1, 'redeliver' FROM numbers`);
    const deployment = await created(store, await store.project({ command: null }));
    await log(store, deployment, 80, 64 * 1024);
    await report(store, deployment, 'failed');
    effects.advance(RETENTION_MS + 60_000);

    const logSteps = await stepsOf(store, 'deployments');
    t.ok(logSteps.every(({ removed: { logBytes = 0 } }) => logBytes <= 64 * 1024));
    t.equal(store.reads.deployments.get(deployment), undefined);
    const [first, ...steps] = await stepsOf(store, 'events');
    t.match(first, { removed: { deliveries: 1, attempts: 100 } }, 'a delivery goes with its attempts');
    t.ok(steps.every((step) => rowsOf(step) <= 1));
    // The delivery of the second deployment was never sent, so it stays.
    t.equal(
      steps.reduce((sum, step) => sum + rowsOf(step), 0),
      200 + 2,
    );
    t.match(store.query('SELECT status FROM deliveries'), [{ status: 'pending' }]);
  },
);

t.test('a step goes on until its time is over', async (t) => {
  const effects = fakeEffects();
  let atMs = 0;
  const store = testStore(t, { ...effects, monotonicMs: () => atMs++ });
  const { id } = await newWebhook(store, (await store.key()).keyId);
  await newDeliveries(store, id, 1);
  copyDeliveries(store, 100);
  effects.advance(RETENTION_MS + 1);
  const step = { what: 'events', untilMs: Number.POSITIVE_INFINITY, retentionMs: RETENTION_MS } as const;
  const { next } = await store.writer.write('retention.step', { ...step, from: START, workMs: 5 });
  t.equal(idsOf(store, 'deliveries').length, 97, 'it looked at 5, and the first is pending');
  t.match(await store.writer.write('retention.step', { ...step, from: next ?? START, workMs: 50 }), {
    removed: { deliveries: 50 },
  });
});

t.test('rows that stay are skipped in several steps, even if all have the same time', async (t) => {
  const { store, effects, id } = await withWebhook(t);
  await newDeliveries(store, id, 400);
  store.execute(`UPDATE events SET created_at = 1`);
  effects.advance(RETENTION_MS + 1);
  // The first of a portion, as they are looked at, and the last of all.
  const over = idsOf<DeliveryId>(store, 'deliveries').filter((_, index) => index === 16 || index === 399);
  endDeliveries(store, over, 'exhausted');
  const steps = await stepsOf(store, 'events');
  t.ok(steps.length >= 3, 'events and deliveries count');
  t.equal(
    steps.reduce((sum, step) => sum + rowsOf(step), 0),
    4,
  );
  t.equal(idsOf(store, 'events').length, 398);
});

t.test('many rows of each kind are removed, each statement removing at most 16', async (t) => {
  const { store, rows } = await withManyRows(t);
  for (const [what, count] of rows) {
    const steps = (await stepsOf(store, what)).map(rowsOf);
    const statements = what === 'secrets' ? 2 : 1;
    t.ok(
      steps.every((removed) => removed <= 16 * statements),
      what,
    );
    t.equal(
      steps.reduce((sum, removed) => sum + removed, 0),
      count,
      what,
    );
  }
});

t.test('a step that has time for it removes all of a kind, more than are read at once', async (t) => {
  const { store, rows } = await withManyRows(t);
  const forEver = { from: START, untilMs: Number.POSITIVE_INFINITY, retentionMs: RETENTION_MS, workMs: 1 };
  for (const [what, count] of rows) {
    const step = await store.writer.write('retention.step', { ...forEver, what });
    t.strictSame([rowsOf(step), step.next], [count, null], what);
  }
});

/** More rows of each kind than are read at once, and how many of them a whole pass removes. */
async function withManyRows(t: Test) {
  const { store, effects, id, keyId } = await withWebhook(t);
  const projectId = await store.project({ command: null });
  const deployment = await created(store, projectId);
  await log(store, deployment, 40);
  await report(store, deployment, 'failed');
  for (let count = 0; count < 20; count++) await created(store, projectId);
  await store.writer.write('webhooks.remove', { id });
  store.execute(`
    INSERT INTO idempotency_keys (key_id, idempotency_key, request_hash, status_code, body, created_at)
    ${counted(40)} SELECT '${keyId}', number, zeroblob(32), 200, '', 1 FROM numbers;
    INSERT INTO replays (webhook_id, since, until, last_seq, created_at, finished_at)
    ${counted(40)} SELECT '${id}', 1, 1, 1, 1, 1 FROM numbers;
    INSERT INTO webhook_secrets (webhook_id, secret, created_at, expires_at)
    ${counted(40)} SELECT '${id}', number, 1, 1 FROM numbers;
    INSERT INTO key_secrets (hash, key_id, last4, created_at, expires_at)
    ${counted(40)} SELECT randomblob(32), '${keyId}', 'last', 1, 1 FROM numbers`);
  effects.advance(RETENTION_MS + 1);
  const rows = [
    ['idempotencyKeys', 40],
    ['replays', 40],
    ['secrets', 80],
    ['deletedWebhooks', 22],
    ['deployments', 1],
    ['events', 22],
  ] as const;
  return { store, rows };
}

t.test('a row to remove is found behind many rows that stay', async (t) => {
  const { store, effects, id, keyId } = await withWebhook(t);
  const [delivery] = await newDeliveries(store, id, 1);
  copyWaiting(store, 300, effects.now());
  copyDeliveries(store, 1);
  store.execute(`
    INSERT INTO projects (id, name, status, created_at, policy)
    ${counted(300)} SELECT 'prj_' || number, 'website', 'active', 1, 'queue' FROM numbers;
    INSERT INTO deployments (id, project_id, ref, status, reason, reported, trigger, created_at, finished_at)
    ${counted(301)} SELECT 'dpl_' || number, 'prj_' || min(number, 300), 'main', iif(number > 300, 'failed', 'succeeded'),
                       'reported', 1, 'api', 1, 1 FROM numbers;
    INSERT INTO webhooks (id, key_id, url, events, status, created_at, enabled_at, deleted_at)
    ${counted(300)} SELECT 'whk_' || number, '${keyId}', '', '[]', 'enabled', 1, 1, ${effects.now() + RETENTION_MS}
                      FROM numbers;
    INSERT INTO replays (webhook_id, since, until, last_seq, created_at, finished_at)
    ${counted(300)} SELECT 'whk_' || number, 1, 1, 1, 1, 1 FROM numbers;
    UPDATE deliveries SET webhook_id = 'whk_300' WHERE id = '${delivery}'`);
  effects.advance(RETENTION_MS + 1);
  for (const what of ['deployments', 'deletedWebhooks', 'events'] as const) {
    const steps = await stepsOf(store, what);
    t.ok(steps.length > 1, what);
    t.equal(
      steps.reduce((sum, step) => sum + rowsOf(step), 0),
      1,
      what,
    );
  }
});

t.test('no step scans a table that grows, or sorts rows', (t) => {
  const database = openForWriting(`${temporaryDirectory(t)}/davit.db`, fakeEffects());
  const statements: string[] = [];
  const spied = preparedBy(database, (sql) => {
    statements.push(sql);
    return database.prepare(sql);
  });
  retentionWrites({ database: spied, effects: fakeEffects(), changed: () => undefined });
  t.ok(statements.length > 15);
  for (const sql of statements) {
    const named = Object.fromEntries([...sql.matchAll(/:(\w+)/g)].map(([, name]) => [name, 1]));
    const given = sql.includes('?') ? [1] : Object.keys(named).length > 0 ? [named] : [];
    const explain = database.prepare<unknown[], { detail: string }>(`EXPLAIN QUERY PLAN ${sql}`);
    const plan = explain.all(...given);
    for (const { detail } of plan) {
      t.notMatch(detail, /^SCAN (?!replays|webhooks|webhook_secrets|keys|key_secrets)/, sql);
      t.notMatch(detail, /TEMP B-TREE/, sql);
    }
  }
  database.close();
  t.end();
});

t.test('the file shrinks a few pages at a time, and keeps some free pages', async (t) => {
  const { store, effects } = setUp(t);
  const projectId = await store.project({ command: null });
  const deployment = await created(store, projectId);
  await log(store, deployment, 160, 64 * 1024);
  await report(store, deployment, 'failed');
  const pages = () => store.query<{ page_count: number }>('PRAGMA page_count')[0]?.page_count ?? 0;
  const before = pages();
  t.match(await stepsOf(store, 'unusedPages'), { length: 1 }, 'nothing is unused');
  effects.advance(RETENTION_MS + 1);
  await stepsOf(store, 'deployments');
  t.equal(pages(), before);

  const steps = await stepsOf(store, 'unusedPages');
  const freed = steps.reduce((sum, { removed: { fileBytes = 0 } }) => sum + fileBytes, 0);
  // One more may go that only listed free ones, or where the moved ones are.
  t.ok(steps.length > 10 && steps.every(({ removed: { fileBytes = 0 } }) => fileBytes <= 3 * 4096));
  t.equal(pages(), before - freed / 4096);
  t.equal(store.query<{ freelist_count: number }>('PRAGMA freelist_count')[0]?.freelist_count, 1024);
  t.strictSame(store.query('PRAGMA integrity_check'), [{ integrity_check: 'ok' }]);

  const copyPath = `${temporaryDirectory(t)}/copy.db`;
  new Sqlite(store.path).prepare('VACUUM INTO ?').run(copyPath);
  const copy = connect(copyPath, { readonly: true });
  t.equal(copy.pragma('auto_vacuum', { simple: true }), 2, 'a copy can shrink, too');
  copy.close();
});

t.test('an attempt that ends after its delivery was removed is not recorded', async (t) => {
  const { store, effects, id } = await withWebhook(t);
  await newDeliveries(store, id, 1);
  const [due = none()] = dueOf(store, id, effects.now(), 1);
  await store.writer.write('webhooks.remove', { id });
  await pruneAll(store, null);
  const before = store.dump();
  await store.writer.write('outbox.settle', settlementOf(due, effects.now(), { kind: 'delivered' }));
  t.strictSame(store.dump(), before);
});

t.test('a step that begins where nothing is left removes nothing', async (t) => {
  const { store, effects } = setUp(t);
  await report(store, await created(store, await store.project({ command: null })), 'failed');
  const before = store.dump();
  t.strictSame(await pruneAll(store), {});
  // As after a clock that was set back in the middle of a pass.
  const beyond = { ...START, atMs: effects.now() };
  for (const what of ['deployments', 'events', 'deletedWebhooks'] as const) {
    const { removed, next } = await store.writer.write('retention.step', {
      what,
      from: beyond,
      untilMs: Number.POSITIVE_INFINITY,
      retentionMs: 1,
      workMs: 1,
    });
    t.strictSame([removed, next], [{}, null]);
  }
  t.strictSame(store.dump(), before);
});

function setUp(t: Test): { store: TestStore; effects: FakeEffects } {
  const effects = fakeEffects();
  return { store: testStore(t, effects), effects };
}

async function withWebhook(t: Test) {
  const { store, effects } = setUp(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  return { store, effects, id, keyId };
}

async function created(store: TestStore, projectId: ProjectId): Promise<DeploymentId> {
  return (await store.writer.write('deployments.create', newDeployment(projectId))).id;
}

async function report(
  store: TestStore,
  id: DeploymentId,
  status: 'running' | 'succeeded' | 'failed',
): Promise<void> {
  await store.writer.write('deployments.report', reportFor(id, { status }));
}

async function finish(store: TestStore, id: DeploymentId, status: 'succeeded' | 'failed'): Promise<void> {
  const reason = status === 'failed' ? 'exit_code' : null;
  await store.writer.write('deployments.finish', endOf(id, { status, reason }));
}

async function log(store: TestStore, id: DeploymentId, count: number, chunkBytes = 10): Promise<void> {
  const bytes = Buffer.alloc(chunkBytes, 'x');
  const chunks = Array.from({ length: count }, (_, index) => ({ start: index * chunkBytes, bytes }));
  await store.writer.write('logs.append', appendTo(id, chunks, { headBytes: count * chunkBytes }));
}

/** The numbers from 1 on, for the rows of an INSERT. */
function counted(count: number): string {
  return `
    WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < ${count})`;
}

function attempts(store: TestStore, ids: readonly DeliveryId[]): void {
  for (const id of ids) {
    store.execute(`
      INSERT INTO attempts (delivery_id, number, at, duration_ms, trigger) VALUES ('${id}', 1, 1, 1, 'schedule')`);
  }
}

function idsOf<Id extends string = string>(store: TestStore, table: string): Id[] {
  return store.query<{ id: Id }>(`SELECT id FROM ${table} ORDER BY seq`).map(({ id }) => id);
}
