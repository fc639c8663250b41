import { createHash } from 'node:crypto';
import { copyFileSync } from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { createLedger, type Ledger } from '../../scripts/chaos/ledger.ts';
import type { Inbox } from '../../scripts/chaos/receivers.ts';
import { type Evidence, judgeFile } from '../../scripts/chaos/verdict.ts';
import type { Deployment, EventType, KeyId, ProjectId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import type { AnswerRequest } from '../../src/store/operations.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import {
  endOf,
  newDeployment,
  none,
  ref,
  type TestStore,
  temporaryDirectory,
  testStore,
} from '../helpers/store.ts';

/*
 * A harness that finds nothing proves nothing: each kind of loss is made here by hand, in a file of davit's own
 * making, and must be found under its name.
 */

const PATH = '/steady/1';

const EVENTS: EventType[] = [
  'deployment.created',
  'deployment.started',
  'deployment.succeeded',
  'deployment.canceled',
];

const truth = await makeTruth(t);

t.test('a run without losses has no findings', async (t) => {
  const { violations, counts } = judgeFile(truth.copy(t), truth.evidence());
  t.strictSame(violations, []);
  t.match(counts, { events: 5, deliveries: 5, delivered: 5, pending: 0, exhausted: 0 });
});

t.test('a deleted webhook may be gone from the file with all its rows', async (t) => {
  const evidence = truth.evidence();
  for (const known of evidence.ledger.webhooks.values()) known.deleted = true;
  const tables = ['attempts', 'deliveries', 'webhook_subscriptions', 'webhook_secrets', 'webhooks'];
  const file = truth.copy(t, tables.map((table) => `DELETE FROM ${table};`).join(''));
  t.strictSame(judgeFile(file, evidence).violations, []);
});

const LOSSES: { what: string; sql?: string; change?: (evidence: Evidence) => void; rule: RegExp }[] = [
  {
    what: 'a deployment',
    sql: "DELETE FROM deployments WHERE ref = 'deaf/1'",
    rule: /^an acknowledged deployment is there$/,
  },
  {
    what: 'a value of one',
    sql: "UPDATE deployments SET ref = 'deaf/9' WHERE ref = 'deaf/1'",
    rule: /^acknowledged values stay$/,
  },
  {
    what: 'an end that was seen',
    change: ({ ledger }) => {
      for (const known of ledger.deployments.values())
        known.end = { status: 'failed', reason: 'timeout', finishedAt: known.createdAt, notedAtMs: 0 };
    },
    rule: /^acknowledged values stay$/,
  },
  {
    what: 'an answer',
    sql: 'DELETE FROM idempotency_keys',
    rule: /^an acknowledged answer is remembered$/,
  },
  {
    what: 'a byte of an answer',
    sql: "UPDATE idempotency_keys SET body = body || ' '",
    rule: /^an acknowledged answer is remembered$/,
  },
  {
    what: 'one deployment made twice',
    sql: `INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, finished_at)
          SELECT 'dpl_twice', project_id, ref, status, reported, trigger, created_at, finished_at
            FROM deployments WHERE ref = 'deaf/1'`,
    rule: /^one deployment for each Idempotency-Key$/,
  },
  {
    what: 'a deployment of what was refused',
    change: ({ ledger }) => ledger.refs.set('deaf/1', 'refused'),
    rule: /^one deployment for each Idempotency-Key$/,
  },
  {
    what: 'a deployment that nobody asked for',
    change: ({ ledger }) => ledger.refs.delete('deaf/1'),
    rule: /^nothing is deployed that nobody asked for$/,
  },
  {
    what: 'a terminal event',
    sql: "DELETE FROM events WHERE type = 'deployment.succeeded'",
    rule: /^a finished deployment has one terminal event/,
  },
  {
    what: 'a terminal event too many',
    sql: `DROP INDEX one_terminal_event_per_deployment;
          INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
          SELECT 'evt_twice', type, deployment_id, project_id, created_at, replace(payload, id, 'evt_twice')
            FROM events WHERE type = 'deployment.succeeded'`,
    rule: /^a finished deployment has one terminal event/,
  },
  {
    what: 'a terminal event of another kind',
    sql: "UPDATE events SET type = 'deployment.failed' WHERE type = 'deployment.succeeded'",
    rule: /^the terminal event says how/,
  },
  {
    what: 'an event of a creation',
    sql: "DELETE FROM events WHERE type = 'deployment.created'",
    rule: /^a deployment has one event of its creation$/,
  },
  {
    what: 'an event of a start',
    sql: "DELETE FROM events WHERE type = 'deployment.started'",
    rule: /^a deployment has one event of its start/,
  },
  {
    what: 'what an event tells',
    sql: "UPDATE events SET payload = replace(payload, 'deaf/1', 'deaf/2')",
    rule: /^an event tells of a deployment that is there/,
  },
  {
    what: 'a delivery',
    sql: `DELETE FROM attempts;
          DELETE FROM deliveries WHERE seq = (SELECT min(seq) FROM deliveries)`,
    rule: /^every event has a delivery/,
  },
  {
    what: 'a delivery on its way',
    change: ({ inboxes }) => {
      for (const { events } of inboxes.values()) events.clear();
    },
    rule: /^what is delivered has arrived$/,
  },
  {
    what: 'the patience with a living receiver',
    sql: "UPDATE deliveries SET status = 'exhausted', delivered_at = NULL",
    rule: /^a living receiver is told$/,
  },
  {
    what: 'the haste',
    sql: "UPDATE deliveries SET status = 'pending', delivered_at = NULL, next_attempt_at = 1",
    rule: /^no delivery is stuck$/,
  },
  {
    what: 'an attempt',
    sql: 'DELETE FROM attempts',
    rule: /^every attempt of a delivery is recorded/,
  },
  {
    what: 'an event that was told',
    change: ({ inboxes }) => {
      const inbox = inboxes.get(PATH);
      inbox?.events.set('evt_none', { body: '{"id":"evt_none"}', requests: 1, acknowledged: true });
    },
    rule: /^who is told of an event can ask for it$/,
  },
  {
    what: 'the bytes of an event',
    change: ({ inboxes }) => {
      for (const { events } of inboxes.values())
        for (const reception of events.values()) reception.body += ' ';
    },
    rule: /^every attempt sends the same bytes$/,
  },
  {
    what: 'the memory of a run',
    change: (evidence) => {
      evidence.runs = [...evidence.runs, ...evidence.runs];
    },
    rule: /^no command is run twice$/,
  },
  {
    what: 'a run',
    change: (evidence) => {
      evidence.runs = [];
    },
    rule: /^what succeeded has run$/,
  },
  {
    what: 'a cancellation',
    change: (evidence) => {
      evidence.runs = [...evidence.ledger.deployments.keys()];
    },
    rule: /^what is canceled in the queue never runs$/,
  },
  {
    what: 'the record of a run',
    change: (evidence) => {
      evidence.runs = [...evidence.runs, 'dpl_none'];
    },
    rule: /^what runs is recorded as started$/,
  },
  {
    what: 'the true end of a command',
    sql: "UPDATE deployments SET exit_code = 1 WHERE ref = 'deaf/1'",
    rule: /^a deployment ends as its command does$/,
  },
  {
    what: 'a deployment that is stuck',
    sql: `DROP TRIGGER deployment_end_is_final;
          UPDATE deployments SET status = 'running', finished_at = NULL WHERE ref = 'deaf/1'`,
    rule: /^no deployment is stuck$/,
  },
  {
    what: 'a webhook',
    sql: 'DELETE FROM webhooks',
    rule: /^an acknowledged webhook is there$/,
  },
  {
    what: 'a value of one',
    sql: "UPDATE webhooks SET description = 'another'",
    rule: /^a webhook is as it was acknowledged$/,
  },
  {
    what: 'its secret',
    sql: "UPDATE webhook_secrets SET secret = 'whsec_another'",
    rule: /^a webhook is as it was acknowledged$/,
  },
  {
    what: 'its deletion',
    change: ({ ledger }) => {
      for (const known of ledger.webhooks.values()) known.deleted = true;
    },
    rule: /^a webhook is deleted if that was acknowledged$/,
  },
  {
    what: 'a project',
    change: ({ ledger }) => ledger.made.push({ kind: 'projects', id: 'prj_none', name: 'none' }),
    rule: /^what an admin command made is there$/,
  },
  {
    what: 'the count of a queue',
    sql: 'UPDATE projects SET queued_count = 5',
    rule: /^the count of what waits in a project is true$/,
  },
  {
    what: 'what a row refers to',
    sql: 'DELETE FROM keys',
    rule: /^foreign_key_check is ok$/,
  },
  {
    what: 'a rule of the schema',
    sql: "PRAGMA ignore_check_constraints = ON; UPDATE projects SET status = 'lost'; PRAGMA ignore_check_constraints = OFF",
    rule: /^integrity_check is ok$/,
  },
];

for (const { what, sql, change, rule } of LOSSES) {
  t.test(`a loss is found: ${what} (${rule.source})`, async (t) => {
    const evidence = truth.evidence();
    change?.(evidence);
    const { violations } = judgeFile(truth.copy(t, sql), evidence);
    t.ok(
      violations.some((violation) => rule.test(violation.rule)),
      JSON.stringify(violations),
    );
  });
}

interface Truth {
  /** The file once more, with what this SQL does to it. */
  copy(t: Test, sql?: string): Sqlite.Database;
  /** What is known of it, to be changed at will. */
  evidence(): Evidence;
}

/** Two deployments, one carried out and one canceled in the queue, and a webhook that was told of both. */
async function makeTruth(t: Test): Promise<Truth> {
  const store = testStore(t, realEffects);
  const directory = temporaryDirectory(t);
  const { keyId } = await store.key();
  const projectId = await store.project();
  const ledger = createLedger(join(directory, 'ledger.jsonl'));
  await register(store, ledger, keyId);
  const done = await deploy(store, ledger, keyId, projectId, 'deaf/1');
  await store.writer.write('deployments.claim', undefined);
  await store.writer.write('deployments.finish', endOf(done.id, { exitCode: 0 }));
  const canceled = await deploy(store, ledger, keyId, projectId, 'deaf/2');
  Object.assign(ledger.deployments.get(canceled.id) ?? {}, { cancelAsked: true });
  ledger.deploymentCanceled(await store.writer.write('deployments.cancel', { id: canceled.id }));
  const inbox = await deliver(store);
  const { deployments, webhooks, writes, refs, made } = ledger;
  const known = { deployments, webhooks, writes, refs, made };
  const original = join(directory, 'truth.db');
  store.execute(`VACUUM INTO '${original}'`);
  let copies = 0;
  return {
    evidence: () => ({
      ledger: structuredClone(known),
      runs: [done.id],
      inboxes: structuredClone(new Map([[PATH, inbox]])),
      sees: (owner) => owner === keyId,
    }),
    copy(t, sql = '') {
      copies += 1;
      const path = join(directory, `copy-${copies}.db`);
      copyFileSync(original, path);
      const file = new Sqlite(path);
      t.teardown(() => file.close());
      file.pragma('foreign_keys = OFF');
      file.pragma('synchronous = OFF');
      file.exec(sql);
      return file;
    },
  };
}

async function register(store: TestStore, ledger: Ledger, keyId: KeyId): Promise<void> {
  const url = `https://example.com${PATH}`;
  const answer = await acknowledged(store, ledger, keyId, 'register', {
    operation: 'webhooks.create',
    input: { keyId, url, events: EVENTS, description: null },
    locationPrefix: null,
  });
  ledger.webhookMade(JSON.parse(answer), PATH, keyId);
}

async function deploy(
  store: TestStore,
  ledger: Ledger,
  keyId: KeyId,
  projectId: ProjectId,
  text: string,
): Promise<Deployment> {
  const sentAtMs = performance.now();
  const answer = await acknowledged(store, ledger, keyId, 'deploy', {
    operation: 'deployments.create',
    input: newDeployment(projectId, { keyId, ref: ref(text) }),
    locationPrefix: '/v2/deployments/',
  });
  const deployment = JSON.parse(answer) as Deployment;
  ledger.refs.set(text, 'acknowledged');
  ledger.deploymentMade(deployment, sentAtMs);
  return deployment;
}

/** One write as the API makes it, with what it answered in the ledger; gives the body. */
async function acknowledged(
  store: TestStore,
  ledger: Ledger,
  keyId: KeyId,
  name: string,
  write: Pick<AnswerRequest, 'operation' | 'input' | 'locationPrefix'>,
): Promise<string> {
  const entry = ledger.intend({
    ...{ name, keyId, keySecret: '', method: 'POST', path: '/v2', body: undefined, refusals: [] },
    idempotencyKey: `key-${ledger.writes.length}`,
    expectedStatus: 201,
  });
  const identity = {
    keyId,
    idempotencyKey: entry.idempotencyKey ?? '',
    requestHash: createHash('sha256').update(name).digest(),
  };
  const request = { ...write, keyId, identity, statusCode: 201 } as AnswerRequest;
  const { body, location } = await store.writer.write('answer', request);
  ledger.acknowledge(entry, { status: 201, location, body }, false);
  return body;
}

/** Delivers everything, as the dispatcher does, and gives what the receiver has then. */
async function deliver(store: TestStore): Promise<Inbox> {
  const events: Inbox['events'] = new Map();
  const [{ webhook_id: webhookId } = none()] = store.reads.outbox.pendingWebhooks();
  for (const due of dueOf(store, webhookId, Number.MAX_SAFE_INTEGER, 100)) {
    events.set(due.event_id, { body: due.payload, requests: 1, acknowledged: true });
    await store.writer.write('outbox.settle', settlementOf(due, Date.now(), { kind: 'delivered' }));
  }
  return { receiver: 'steady', events, answeredGone: false, misbehaved: false };
}
