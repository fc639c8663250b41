import t from 'tap';
import { fakeEffects } from '../helpers/effects.ts';
import { endOf, newDeployment, ref, testStore } from '../helpers/store.ts';

t.test('a new deployment is queued, and its event is stored with it', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  await store.key({ name: 'not asked' });
  const { keyId } = await store.key({ name: 'ci' });
  const deployment = await store.writer.write('deployments.create', newDeployment(projectId, { keyId }));

  t.match(deployment, {
    project_id: projectId,
    ref: 'main',
    status: 'queued',
    reason: null,
    created_at: '2026-11-21T08:00:00.000Z',
    started_at: null,
    queue_position: 1,
    trigger: 'api',
    created_by: { key_id: keyId, name: 'ci' },
    outputs: {},
    log_bytes: 0,
    log_truncated: false,
  });
  t.strictSame(store.reads.deployments.get(deployment.id), deployment, 'what was answered is what is stored');
  t.match(store.query('SELECT type, deployment_id FROM events'), [
    { type: 'deployment.created', deployment_id: deployment.id },
  ]);
});

t.test('the payload of an event is exactly what the specification says', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  const [event] = store.query<{ id: string; payload: string }>('SELECT id, payload FROM events');
  t.equal(
    event?.payload,
    `{"id":"${event?.id}","type":"deployment.created","created_at":"2026-11-21T08:00:00.000Z",` +
      `"data":{"deployment_id":"${id}","project_id":"${projectId}","ref":"main"}}`,
  );
});

t.test('deployments of a project are claimed one at a time, in their order', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const first = await store.writer.write('deployments.create', newDeployment(projectId, { ref: ref('one') }));
  const second = await store.writer.write(
    'deployments.create',
    newDeployment(projectId, { ref: ref('two') }),
  );
  t.equal(second.queue_position, 2);

  t.match(await store.writer.write('deployments.claim', undefined), {
    id: first.id,
    ref: 'one',
    previous_ref: null,
  });
  t.equal(await store.writer.write('deployments.claim', undefined), null, 'the project runs one already');
  t.equal(store.reads.deployments.get(second.id)?.queue_position, 1);

  await store.writer.write('deployments.finish', endOf(first.id));
  t.match(await store.writer.write('deployments.claim', undefined), { id: second.id, previous_ref: 'one' });
});

t.test('projects take turns, the one that started the longest ago first', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const busy = await store.project({ name: 'busy' });
  const quiet = await store.project({ name: 'quiet' });
  for (const projectId of [busy, busy, busy, quiet]) {
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  const order: string[] = [];
  for (let turn = 0; turn < 4; turn++) {
    effects.advance(1);
    const claimed = await store.writer.write('deployments.claim', undefined);
    if (claimed === null) throw new Error('nothing to claim');
    order.push(claimed.project_name);
    await store.writer.write('deployments.finish', endOf(claimed.id));
  }
  t.strictSame(order, ['busy', 'quiet', 'busy', 'busy']);
});

t.test('projects take turns also when one of them was started by a clock that was ahead', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const ahead = await store.project({ name: 'ahead' });
  const other = await store.project({ name: 'other' });
  effects.jump(3_600_000);
  for (const projectId of [ahead, ahead, ahead]) {
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  t.equal(await claimAndFinish(), 'ahead');
  effects.jump(-3_600_000);
  for (const projectId of [other, other, other]) {
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  const order = [
    await claimAndFinish(),
    await claimAndFinish(),
    await claimAndFinish(),
    await claimAndFinish(),
  ];
  t.strictSame(order, ['other', 'ahead', 'other', 'ahead']);

  async function claimAndFinish(): Promise<string | undefined> {
    effects.advance(1);
    const claimed = await store.writer.write('deployments.claim', undefined);
    if (claimed !== null) await store.writer.write('deployments.finish', endOf(claimed.id));
    return claimed?.project_name;
  }
});

t.test('a paused project queues deployments but starts none; an archived one rejects them', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  await store.writer.write('projects.setStatus', { id: projectId, status: 'paused' });
  await store.writer.write('deployments.create', newDeployment(projectId));
  t.equal(await store.writer.write('deployments.claim', undefined), null);

  await store.writer.write('projects.setStatus', { id: projectId, status: 'archived' });
  const pausing = store.writer.write('projects.setStatus', { id: projectId, status: 'paused' });
  await t.rejects(pausing, { code: 'conflict' }, 'an archived project cannot be paused');
  const before = store.dump();
  await t.rejects(store.writer.write('deployments.create', newDeployment(projectId)), { code: 'conflict' });
  t.strictSame(store.dump(), before);

  await store.writer.write('projects.setStatus', { id: projectId, status: 'active' });
  t.match(await store.writer.write('deployments.claim', undefined), { project_id: projectId });
});

t.test('a full queue rejects a deployment and changes nothing', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const limited = newDeployment(projectId, { maxQueued: 2 });
  await store.writer.write('deployments.create', limited);
  await t.rejects(store.writer.write('deployments.create', { ...limited, maxQueued: 1 }), {
    message: /^1 deployment waits in this project already: try again when one has finished$/,
  });
  await store.writer.write('deployments.create', limited);
  const before = store.dump();
  await t.rejects(store.writer.write('deployments.create', limited), {
    code: 'rate_limited',
    message: '2 deployments wait in this project already: try again when one has finished',
    retryAfterSeconds: 30,
  });
  t.strictSame(store.dump(), before);

  await store.writer.write('projects.setStatus', { id: projectId, status: 'paused' });
  await t.rejects(store.writer.write('deployments.create', limited), {
    code: 'rate_limited',
    message: '2 deployments wait in this project already, which is paused: try again once it is active',
  });
});

t.test('the first end of a deployment stays, with one terminal event', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await store.writer.write('deployments.claim', undefined);
  const end = endOf(id, { exitCode: 0, outputs: { url: 'https://example.com' } });
  await store.writer.write('deployments.finish', end);
  const before = store.dump();
  await store.writer.write('deployments.finish', endOf(id, { status: 'failed', reason: 'interrupted' }));
  t.match(store.reads.deployments.get(id), {
    status: 'succeeded',
    exit_code: 0,
    outputs: { url: 'https://example.com' },
  });
  t.strictSame(store.dump(), before);
});

t.test('an end recorded late keeps its own time, but is never before the start or after now', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const projectId = await store.project();
  for (const [endedAfterMs, durationMs] of [
    [3_000, 3_000],
    [-3_000, 0],
    [90_000, 60_000],
  ] as const) {
    const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
    await store.writer.write('deployments.claim', undefined);
    const endedAtMs = effects.now() + endedAfterMs;
    effects.advance(60_000);
    await store.writer.write('deployments.finish', endOf(id, { endedAtMs }));
    t.equal(store.reads.deployments.get(id)?.duration_ms, durationMs);
    const [event] = store.query('SELECT created_at FROM events ORDER BY seq DESC LIMIT 1');
    t.strictSame(event, { created_at: effects.now() }, 'its event is of the time of the record');
  }
});

t.test('the schema itself holds the rules that code must not break', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const one = await store.writer.write('deployments.create', newDeployment(projectId));
  await store.writer.write('deployments.create', newDeployment(projectId));
  await store.writer.write('deployments.claim', undefined);

  t.throws(
    () => store.execute("UPDATE deployments SET status = 'running', started_at = 1 WHERE status = 'queued'"),
    /UNIQUE constraint failed: deployments.project_id/,
    'one running deployment per project',
  );
  await store.writer.write('deployments.finish', endOf(one.id));
  for (const end of ['succeeded', 'failed', 'canceled']) {
    t.throws(
      () =>
        store.execute(`
          INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
          SELECT 'evt_${end}', 'deployment.${end}', id, project_id, 1, '{}' FROM deployments WHERE id = '${one.id}'`),
      /UNIQUE constraint failed: events.deployment_id/,
      'one event tells of the end of a deployment',
    );
  }
  t.throws(
    () =>
      store.execute(
        "UPDATE deployments SET status = 'queued', finished_at = NULL, started_at = NULL WHERE finished_at > 0",
      ),
    /a finished deployment changes no more/,
  );
  t.throws(
    () => store.execute("UPDATE deployments SET status = 'lost' WHERE finished_at IS NULL"),
    /CHECK constraint failed/,
  );
});

t.test('a deployment of a project without a command waits for reports, not for the executor', async (t) => {
  const store = testStore(t);
  const projectId = await store.project({ command: null, reportTimeoutMs: 1000 });
  const deployment = await store.writer.write('deployments.create', newDeployment(projectId));
  t.match(deployment, { status: 'queued', queue_position: null });
  t.equal(await store.writer.write('deployments.claim', undefined), null);
});
