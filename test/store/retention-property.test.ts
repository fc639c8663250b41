import fc from 'fast-check';
import t from 'tap';
import type { DeliveryId, DeploymentId, ProjectId, WebhookId } from '../../src/domain.ts';
import { HOUR_MS } from '../../src/durations.ts';
import { PRUNED, START } from '../../src/store/retention.ts';
import { newReplay, newWebhook } from '../helpers/deliveries.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import { pruneAll } from '../helpers/retention.ts';
import { appendTo, endOf, newDeployment, reportFor, type TestStore, testStore } from '../helpers/store.ts';

/*
 * After any history: what is unfinished stays, what is past retention goes, and all that is left refers to
 * what is there.
 */

const RETENTION_MS = 100 * HOUR_MS;

/** One thing that happens; `pick` chooses which deployment, webhook or delivery it happens to. */
interface Happening {
  what: (typeof HAPPENINGS)[number];
  pick: number;
}

const HAPPENINGS = [
  ...(['create', 'createElsewhere', 'claim', 'succeed', 'succeed', 'fail'] as const),
  ...(['deploy', 'deploy', 'deploy', 'cancel', 'redeploy', 'report', 'print'] as const),
  ...(['deliver', 'deliver', 'deliver', 'exhaust', 'retry', 'redeliver', 'replay', 'replayStep'] as const),
  ...(['register', 'disable', 'enable', 'delete', 'rotate'] as const),
  ...(['pass', 'pass', 'pass', 'prune', 'prune', 'pruneStep'] as const),
] as const;

const histories = fc.array(
  fc.record({ what: fc.constantFrom(...HAPPENINGS), pick: fc.nat({ max: 1_000 }) }),
  { minLength: 40, maxLength: 120, size: 'max' },
);

/** It has rows of every kind removed, so that all of them are judged, whatever chance brings. */
const ONE_OF_EACH: Happening[] = [
  ...(['deploy', 'deliver', 'deploy', 'pass', 'pass', 'prune', 'delete', 'pass', 'prune'] as const),
].map((what) => ({ what, pick: 79 }));

t.test('after any history, exactly what is past retention is removed, and foreign keys hold', async (t) => {
  const removed = new Map<string, number>();
  await fc.assert(
    fc.asyncProperty(histories, async (history) => {
      const effects = fakeEffects();
      const store = testStore(t, effects);
      const world = await begin(store);
      for (const happening of [...history, { what: 'prune', pick: 0 } as const]) {
        const before = rowsOf(store);
        await happen(store, effects, world, happening);
        if (!happening.what.startsWith('prune')) continue;
        const after = rowsOf(store);
        const beforeMs = effects.now() - RETENTION_MS;
        judge(before, after, beforeMs, effects.now(), happening.what === 'prune');
        equal(store.query('PRAGMA foreign_key_check'), [], 'foreign keys');
        for (const [table, rows] of Object.entries(before)) {
          removed.set(table, (removed.get(table) ?? 0) + rows.length - (after[table]?.length ?? 0));
        }
      }
    }),
    // A history is found faster by its seed than by making it shorter.
    { numRuns: 25, endOnFailure: true, examples: [[ONE_OF_EACH]] },
  );
  for (const table of ['deployments', 'events', 'deliveries', 'attempts', 'log_chunks', 'webhooks']) {
    t.ok((removed.get(table) ?? 0) > 0, `some of ${table} went`);
  }
});

interface World {
  command: ProjectId;
  reported: ProjectId;
}

async function begin(store: TestStore): Promise<World> {
  store.execute('PRAGMA synchronous = OFF'); // nothing is cut off here, and the disk is the slowest part
  await newWebhook(store, (await store.key()).keyId);
  return { command: await store.project(), reported: await store.project({ command: null }) };
}

type Row = Record<string, string | number | null>;
type Rows = Record<string, Row[]>;

function rowsOf(store: TestStore): Rows {
  const rows = store.dump() as Rows;
  delete rows['instance'];
  return rows;
}

/** What a pass, or one step of it, may and must have removed, stated independently over whole tables. */
function judge(before: Rows, after: Rows, beforeMs: number, nowMs: number, wholePass: boolean): void {
  const all = (name: string) => before[name] ?? [];
  const isLeft = (name: string, key: string, row: Row) =>
    (after[name] ?? []).some((other) => other[key] === row[key]);
  const isOld = (moment: unknown) => typeof moment === 'number' && moment < beforeMs;

  for (const row of all('deployments')) {
    const later = all('deployments').some(
      (other) =>
        other['project_id'] === row['project_id'] &&
        other['status'] === 'succeeded' &&
        Number(other['seq']) > Number(row['seq']),
    );
    const mayGo = isOld(row['finished_at']) && (row['status'] !== 'succeeded' || later);
    hold(row, isLeft('deployments', 'id', row), mayGo, wholePass);
  }
  for (const row of all('deliveries')) {
    const webhook = all('webhooks').find(({ id }) => id === row['webhook_id']);
    const lastAttempt = all('attempts').find(
      ({ delivery_id, number }) => delivery_id === row['id'] && number === row['attempt_count'],
    );
    const event = all('events').find(({ id }) => id === row['event_id']);
    const isReplayed = all('replays').some(
      (replay) =>
        replay['finished_at'] === null &&
        replay['webhook_id'] === row['webhook_id'] &&
        Number(row['seq']) > Number(replay['done_seq']) &&
        Number(row['seq']) <= Number(replay['last_seq']) &&
        Number(row['created_at']) >= Number(replay['since']) &&
        Number(row['created_at']) <= Number(replay['until']),
    );
    const moments = [
      event?.['created_at'],
      row['ladder_started_at'],
      row['delivered_at'] ?? 0,
      lastAttempt?.['at'] ?? 0,
    ];
    const isOver = row['status'] !== 'pending' && moments.every(isOld) && !isReplayed;
    hold(row, isLeft('deliveries', 'id', row), isOver || webhook?.['deleted_at'] !== null, wholePass);
  }
  const deliveriesLeft = after['deliveries'] ?? [];
  for (const row of all('events')) {
    const isReferred = deliveriesLeft.some(({ event_id }) => event_id === row['id']);
    hold(row, isLeft('events', 'id', row), isOld(row['created_at']) && !isReferred, wholePass);
  }
  for (const row of all('webhooks')) {
    hold(row, isLeft('webhooks', 'id', row), row['deleted_at'] !== null, wholePass);
  }
  for (const row of all('replays'))
    hold(row, isLeft('replays', 'seq', row), row['finished_at'] !== null, wholePass);
  for (const row of all('webhook_secrets')) {
    const hasEnded = row['expires_at'] !== null && Number(row['expires_at']) <= nowMs;
    hold(row, isLeft('webhook_secrets', 'secret', row), hasEnded, wholePass);
  }
  for (const table of ['projects', 'project_variables', 'keys', 'key_projects', 'webhook_subscriptions']) {
    equal(after[table], before[table], table);
  }
  if (!wholePass) return;
  const deploymentsLeft = after['deployments'] ?? [];
  const logsLeft = all('log_chunks').filter((chunk) =>
    deploymentsLeft.some(({ id }) => id === chunk['deployment_id']),
  );
  equal(after['log_chunks'], logsLeft, 'logs go with their deployments and only with them');
  const attemptsLeft = all('attempts').filter((attempt) =>
    deliveriesLeft.some(({ id }) => id === attempt['delivery_id']),
  );
  equal(after['attempts'], attemptsLeft, 'attempts go with their deliveries and only with them');
}

/** After a whole pass a row is left if and only if it may not go; after a step some of those that may go are left. */
function hold(row: Row, isLeft: boolean, mayGo: boolean, wholePass: boolean): void {
  if (!isLeft && !mayGo) throw new Error(`went, and should not: ${JSON.stringify(row)}`);
  if (isLeft && mayGo && wholePass) throw new Error(`is left, and should have gone: ${JSON.stringify(row)}`);
}

function equal(found: unknown, wanted: unknown, what: string): void {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) throw new Error(`${what}: ${JSON.stringify(found)}`);
}

async function happen(
  store: TestStore,
  effects: FakeEffects,
  { command, reported }: World,
  { what, pick }: Happening,
): Promise<void> {
  const write = store.writer.write;
  const one = <Id extends string>(sql: string): Id | undefined => {
    const rows = store.query<{ id: Id }>(sql);
    return rows[pick % Math.max(1, rows.length)]?.id;
  };
  const openDeployment = (where: string) =>
    one<DeploymentId>(`SELECT id FROM deployments WHERE finished_at IS NULL AND ${where} ORDER BY seq`);
  const webhook = one<WebhookId>('SELECT id FROM webhooks WHERE deleted_at IS NULL ORDER BY seq');
  switch (what) {
    case 'create':
      await write('deployments.create', newDeployment(command));
      return;
    case 'createElsewhere':
      await write('deployments.create', newDeployment(reported));
      return;
    case 'claim':
      await write('deployments.claim', undefined);
      return;
    case 'deploy':
      for (const step of ['create', 'claim', 'print', 'succeed'] as const) {
        await happen(store, effects, { command, reported }, { what: step, pick });
      }
      return;
    case 'succeed':
    case 'fail': {
      const id = openDeployment(`status = 'running' AND reported = 0`);
      if (id === undefined) return;
      const failed = { status: 'failed', reason: 'exit_code' } as const;
      await write('deployments.finish', endOf(id, what === 'fail' ? failed : {}));
      return;
    }
    case 'cancel': {
      const id = openDeployment('1');
      if (id !== undefined) await write('deployments.cancel', { id });
      return;
    }
    case 'redeploy': {
      const id = one<DeploymentId>('SELECT id FROM deployments ORDER BY seq');
      if (id !== undefined) await write('deployments.redeploy', { id, keyId: null, maxQueued: null });
      return;
    }
    case 'report': {
      const id = openDeployment('reported = 1');
      const status = (['running', 'succeeded', 'failed'] as const)[pick % 3] ?? 'running';
      if (id !== undefined) await write('deployments.report', reportFor(id, { status }));
      return;
    }
    case 'print': {
      const id = openDeployment(`status = 'running'`);
      if (id === undefined) return;
      const start = store.reads.deployments.existing(id).log_bytes;
      const chunks = [{ start, bytes: Buffer.alloc(10) }];
      await write('logs.append', appendTo(id, chunks, { headBytes: start + 10 }));
      return;
    }
    case 'pass':
      effects.advance((pick % 80) * HOUR_MS);
      return;
    case 'deliver':
    case 'exhaust':
    case 'retry':
      await settle(store, effects, what, pick);
      return;
    case 'redeliver': {
      const id = one<DeliveryId>(`
        SELECT d.id FROM deliveries d JOIN webhooks w ON w.id = d.webhook_id
         WHERE w.deleted_at IS NULL ORDER BY d.seq`);
      if (id !== undefined) await write('deliveries.redeliver', { id });
      return;
    }
    case 'replay': {
      if (webhook === undefined) return;
      const untilMs = effects.now() - (pick % 50) * HOUR_MS;
      const sinceMs = untilMs - 60 * HOUR_MS;
      await newReplay(store, effects, webhook, { sinceMs, untilMs }).catch(refused);
      return;
    }
    case 'replayStep': {
      const [replay] = store.reads.replays.open();
      if (replay === undefined) return;
      const { seqs, endSeq } = store.reads.replays.slice(replay, replay.doneSeq, 2);
      await write('replays.step', { seq: replay.seq, seqs, doneSeq: endSeq });
      return;
    }
    case 'register': {
      const { keyId } = await store.key();
      await newWebhook(store, keyId, { events: ['deployment.created', 'deployment.failed'] });
      return;
    }
    case 'disable':
    case 'enable':
      if (webhook === undefined) return;
      await write('webhooks.update', {
        ...{ id: webhook, status: `${what}d` as const, disableReason: 'by a test' },
      });
      return;
    case 'delete':
      if (webhook !== undefined) await write('webhooks.remove', { id: webhook });
      return;
    case 'rotate':
      if (webhook !== undefined) await write('webhooks.rotate', { id: webhook, overlapMs: pick * 60_000 });
      return;
    case 'prune':
      await pruneAll(store, RETENTION_MS);
      return;
    case 'pruneStep': {
      const part = PRUNED[pick % PRUNED.length] ?? 'events';
      await write('retention.step', {
        what: part,
        from: START,
        untilMs: Number.POSITIVE_INFINITY,
        retentionMs: RETENTION_MS,
        workMs: 0,
      });
      return;
    }
    default:
      what satisfies never;
  }
}

/** As the dispatcher does with what is due, and for some time after it is not any more. */
async function settle(
  store: TestStore,
  effects: FakeEffects,
  how: 'deliver' | 'exhaust' | 'retry',
  pick: number,
): Promise<void> {
  const [pending] = store.reads.outbox.pendingWebhooks();
  if (pending === undefined) return;
  const due = dueOf(store, pending.webhook_id, effects.now(), 5);
  const delivery = due[pick % Math.max(1, due.length)];
  if (delivery === undefined) return;
  const next = {
    deliver: { kind: 'delivered' },
    exhaust: { kind: 'exhausted' },
    retry: { kind: 'retry', atMs: effects.now() + HOUR_MS },
  } as const;
  await store.writer.write('outbox.settle', settlementOf(delivery, effects.now(), next[how]));
}

/** Ten replays of a webhook are open at most. */
function refused(error: unknown): void {
  if ((error as { code?: string }).code !== 'rate_limited') throw error;
}
