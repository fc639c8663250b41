import t, { type Test } from 'tap';
import { type Attempt, EVENT_TYPES } from '../../src/domain.ts';
import { HOUR_MS } from '../../src/durations.ts';
import type { InputOf, OperationName } from '../../src/store/operations.ts';
import { newReplay, newWebhook, updateWebhook } from '../helpers/deliveries.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import {
  appendTo,
  caller,
  endOf,
  newDeployment,
  none,
  ref,
  type TestStore,
  testStore,
} from '../helpers/store.ts';

/*
 * An operation on one thing must leave the others alone, and a read of one must reveal nothing of them. A file with
 * one of each cannot show that: here are three worlds, and each of them is operated on and read.
 */

type Input<Name extends OperationName> = (of: World) => InputOf<Name>;
type Row = { [Name in OperationName]: [name: Name, input: Input<Name>] }[OperationName];

const REPORT = { message: 'south', outputs: { to: 'south' } };
const CHUNK = { start: 9, bytes: Buffer.from('more') };

const ROWS: Row[] = [
  ['keys.rotate', ({ keyId }) => ({ id: keyId, overlapMs: 2 * HOUR_MS })],
  ['keys.rotate', ({ keyId }) => ({ id: keyId, overlapMs: 0 })],
  ['keys.revoke', ({ keyId }) => ({ id: keyId })],
  ['keys.touch', ({ keyId }) => ({ keyId, atMs: 5 })],
  [
    'projects.set',
    ({ projectId }) => ({
      id: projectId,
      changes: { name: 'south' },
      variables: { NEW: 'south' },
      unsetVariables: ['WORLD'],
    }),
  ],
  ['projects.setStatus', ({ projectId }) => ({ id: projectId, status: 'paused' })],
  ['projects.archive', ({ projectId }) => ({ id: projectId })],
  ['deployments.redeploy', ({ running, keyId }) => ({ id: running, keyId, maxQueued: null })],
  ['deployments.cancel', ({ running }) => ({ id: running })],
  ['deployments.cancel', ({ queued }) => ({ id: queued })],
  [
    'deployments.setProcess',
    ({ running }) => ({ id: running, processId: 7, processStartedAt: 8, bootId: 'b' }),
  ],
  ['deployments.finish', ({ running }) => endOf(running)],
  ['deployments.report', ({ reported }) => ({ ...REPORT, id: reported, status: 'running' })],
  ['deployments.report', ({ reported }) => ({ ...REPORT, id: reported, status: 'failed' })],
  [
    'logs.append',
    ({ running }) => ({
      id: running,
      chunks: [CHUNK],
      logBytes: 13,
      dropTailBefore: 9,
      headBytes: 0,
    }),
  ],
  [
    'webhooks.update',
    ({ webhookId }) => ({ id: webhookId, url: 'https://south.example/', events: [], disableReason: '' }),
  ],
  ['webhooks.update', ({ webhookId }) => ({ id: webhookId, status: 'disabled', disableReason: 'south' })],
  ['webhooks.rotate', ({ webhookId }) => ({ id: webhookId, overlapMs: 0 })],
  ['webhooks.remove', ({ webhookId }) => ({ id: webhookId })],
  ['deliveries.redeliver', ({ failed }) => ({ id: failed })],
  ['replays.step', ({ replaySeq }) => ({ seq: replaySeq, seqs: [], doneSeq: 1 })],
  ['replays.step', ({ replaySeq }) => ({ seq: replaySeq, seqs: [], doneSeq: null })],
  ['outbox.settle', ({ due }) => settlementOf(due, 9, { kind: 'delivered' })],
  ['outbox.settle', ({ due }) => settlementOf(due, 9, { kind: 'retry', atMs: 99 })],
  [
    'outbox.settle',
    ({ due }) => ({ ...settlementOf(due, 9, { kind: 'exhausted' }), disableReason: 'south' }),
  ],
];

for (const [name, input] of ROWS) {
  t.test(`${name} changes one and leaves the others as they are`, async (t) => {
    const { store, worlds } = await threeWorlds(t);
    for (const world of worlds) {
      const before = store.dump();
      await store.writer.write(name, input(world) as never);
      t.notSame(store.dump(), before);
      t.strictSame(withoutWorld(store.dump(), world), withoutWorld(before, world), world.name);
    }
  });
}

t.test('a read of one key, project, deployment or webhook gives nothing of the others', async (t) => {
  const { store, effects, worlds } = await threeWorlds(t);
  const { keys, projects, deployments, webhooks, deliveries, replays, outbox, backlog, logs } = store.reads;
  const nowMs = effects.now();
  for (const world of worlds) {
    const { name, keyId, projectId, elsewhereId, webhookId, running, queued, failed } = world;
    const asks = caller({ keyId }, false);
    t.match(keys.get(keyId), { name, last4: world.last4, project_ids: { length: 2 } });
    t.strictSame(keys.get(keyId)?.project_ids.toSorted(), [projectId, elsewhereId].sort());
    t.strictSame(
      keys.outgoingSecrets(keyId, nowMs).map(({ last4 }) => last4),
      [world.outgoingLast4],
    );
    t.strictSame(projects.variables(projectId), { WORLD: name });
    t.match(projects.resolve(projectId), { name, variable_names: ['WORLD'] });
    t.match(deployments.get(queued), { queue_position: 1, created_by: { key_id: keyId, name } });
    t.equal(Buffer.concat([...logs.text(running, 0, 9)]).toString(), name.padEnd(9));
    t.strictSame(webhooks.addressOf(webhookId), { url: `https://${name}.example/`, keyId });
    t.match(webhooks.get(webhookId), { url: `https://${name}.example/`, consecutive_failures: 1 });
    t.strictSame(webhooks.pingRecipient(webhookId, nowMs)?.secrets, world.secrets);
    t.match(deliveries.detailsVisibleTo(asks, failed), {
      webhook_id: webhookId,
      payload: { data: { project_id: projectId } },
      attempts: [{ error: name }] as Partial<Attempt>[],
    });
    t.equal(deliveries.lastResult(failed), name);
    t.match(backlog.webhook(webhookId, nowMs), { created_by: { key_id: keyId, name }, last_error: name });
    t.match(outbox.history(webhookId), { last_success_at: null });
    t.equal(replays.isBusy(webhookId, nowMs, world.dueCount), true);
    t.equal(replays.isBusy(webhookId, nowMs, world.dueCount + 1), false);
    for (const other of worlds.filter((those) => those !== world)) {
      t.equal(projects.visibleTo(asks, other.projectId), undefined);
      t.equal(deployments.visibleTo(asks, other.running), undefined);
      t.equal(webhooks.visibleTo(asks, other.webhookId), undefined);
      t.equal(deliveries.visibleTo(asks, other.failed), undefined);
      t.equal(deliveries.detailsVisibleTo(asks, other.failed), undefined);
    }
  }
  const { waiting, running, reported } = backlog.all(nowMs, 10);
  for (const { items } of [waiting, running]) {
    t.strictSame(new Set(items.map(nameAndKey)), new Set(worlds.map(({ name }) => `${name} by ${name}`)));
  }
  t.equal(reported.count, 3);
  t.strictSame(
    waiting.items.map(({ project_runs }) => project_runs).sort(),
    worlds.map((world) => world.running).sort(),
  );
});

t.test('a claimed deployment has the previous ref and the variables of its own project', async (t) => {
  const { store, worlds } = await threeWorlds(t);
  for (const { running, queued } of worlds) {
    await store.writer.write('deployments.finish', endOf(running));
    await store.writer.write('deployments.cancel', { id: queued });
  }
  for (const { name, projectId } of worlds) {
    await store.writer.write('deployments.create', newDeployment(projectId));
    t.match(await store.writer.write('deployments.claim', undefined), {
      project_id: projectId,
      previous_ref: name,
      variables: { WORLD: name },
    });
  }
});

t.test('enabling a webhook does not change how attempts of the others are settled', async (t) => {
  const { store, effects, worlds } = await threeWorlds(t);
  const [enabled = none(), ...others] = worlds;
  effects.advance(1);
  for (const status of ['disabled', 'enabled'] as const) {
    await updateWebhook(store, enabled.webhookId, { status });
  }
  for (const { due } of others) {
    const settlement = settlementOf(due, effects.now(), { kind: 'exhausted' });
    t.equal(await store.writer.write('outbox.settle', settlement), 'exhausted');
  }
});

t.test('a rotation ends no live secret because other webhooks have newer ones', async (t) => {
  const { store, effects, worlds } = await threeWorlds(t);
  for (const { webhookId, secrets } of worlds) {
    const rotation = { id: webhookId, overlapMs: HOUR_MS };
    const { signing_secret } = await store.writer.write('webhooks.rotate', rotation);
    t.strictSame(store.reads.webhooks.pingRecipient(webhookId, effects.now())?.secrets, [
      signing_secret,
      ...secrets,
    ]);
  }
});

t.test('a revoked key keeps no other key from its writes, nor its webhooks from being enabled', async (t) => {
  const { store, worlds } = await threeWorlds(t);
  const [revoked = none(), { keyId, projectId, webhookId } = none()] = worlds;
  await store.writer.write('keys.revoke', { id: revoked.keyId });
  await updateWebhook(store, webhookId, { status: 'disabled' });
  t.match(await updateWebhook(store, webhookId, { status: 'enabled' }), { status: 'enabled' });
  const answer = await store.writer.write('answer', {
    operation: 'deployments.create',
    input: newDeployment(projectId, { keyId }),
    keyId,
    identity: null,
    statusCode: 201,
    locationPrefix: null,
  });
  t.match(answer, { statusCode: 201, replayed: false });
});

type World = Awaited<ReturnType<typeof newWorld>>;

async function threeWorlds(t: Test): Promise<{ store: TestStore; effects: FakeEffects; worlds: World[] }> {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const worlds = [];
  for (const name of ['north', 'middle', 'east']) worlds.push(await newWorld(store, effects, name));
  return { store, effects, worlds };
}

/** A key with two projects, one of which has a command, and their deployments, webhook, deliveries and replay. */
async function newWorld(store: TestStore, effects: FakeEffects, name: string) {
  const { write } = store.writer;
  const projectId = await store.project({ name, variables: { WORLD: name } });
  const elsewhereId = await store.project({ name: `${name} elsewhere`, command: null });
  const made = await store.key({ name, allProjects: false, projectIds: [projectId, elsewhereId] });
  const { keyId } = made;
  const { secret } = await write('keys.rotate', { id: keyId, overlapMs: HOUR_MS });
  const webhook = await newWebhook(store, keyId, {
    url: `https://${name}.example/`,
    events: [...EVENT_TYPES],
  });
  const webhookId = webhook.id;
  effects.advance(1);
  const { signing_secret } = await write('webhooks.rotate', { id: webhookId, overlapMs: HOUR_MS });

  const deployment = newDeployment(projectId, { keyId, ref: ref(name) });
  const { id: running } = await write('deployments.create', deployment);
  if ((await write('deployments.claim', undefined))?.id !== running) throw new Error('another was claimed');
  await write('logs.append', appendTo(running, [{ start: 0, bytes: Buffer.from(name.padEnd(9)) }]));
  const { id: queued } = await write('deployments.create', deployment);
  const { id: reported } = await write('deployments.create', newDeployment(elsewhereId, { keyId }));

  const nowMs = effects.now();
  const [first = none(), due = none(), ...rest] = dueOf(store, webhookId, nowMs, 10);
  const retry = { kind: 'retry', atMs: nowMs + HOUR_MS } as const;
  await write('outbox.settle', settlementOf(first, nowMs, retry, { statusCode: null, error: name }));
  await newReplay(store, effects, webhookId);
  const replaySeq = Number(store.query('SELECT max(seq) AS seq FROM replays')[0]?.['seq']);
  return {
    ...{ name, projectId, elsewhereId, keyId, webhookId, running, queued, reported, due, replaySeq },
    last4: secret.slice(-4),
    outgoingLast4: made.secret.slice(-4),
    secrets: [signing_secret, webhook.signing_secret],
    failed: first.id,
    dueCount: 1 + rest.length,
  };
}

/** The rows of a dump but for those that name one of this world, or something that is named by one of these. */
function withoutWorld(
  { instance: _, ...tables }: Record<string, unknown[]>,
  { keyId, projectId, elsewhereId }: World,
): unknown[] {
  const own = new Set<unknown>([keyId, projectId, elsewhereId]);
  let rows = Object.values(tables).flat().map(Object);
  for (let left = -1; left !== rows.length; ) {
    left = rows.length;
    rows = rows.filter((row) => {
      const isOwn = Object.values(row).some((value) => own.has(value));
      if (isOwn && 'id' in row) own.add(row.id);
      return !isOwn;
    });
  }
  return rows;
}

function nameAndKey({
  project_name,
  created_by,
}: {
  project_name: string;
  created_by: { name: string } | null;
}): string {
  return `${project_name} by ${created_by?.name}`;
}
