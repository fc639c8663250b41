import { writeFileSync } from 'node:fs';
import t, { type Test } from 'tap';
import type { Deployment, DeploymentId, ProjectId, WebhookId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import type { Backlog } from '../../src/store/backlog.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { type Place, place } from '../helpers/cli.ts';
import { namedPipe } from '../helpers/commands.ts';
import { newReplay, newWebhook } from '../helpers/deliveries.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import { serve } from '../helpers/served.ts';
import { endOf, newDeployment, ref, reportFor, type TestStore, testStore } from '../helpers/store.ts';
import { needsTerminal, onTerminal } from '../helpers/terminal.ts';

type Queue = Backlog & {
  service: { process_id: number; since: string; max_concurrent: number | null } | null;
};

t.test('each waiting deployment says what it waits for, in the order in which they start', async (t) => {
  const { store, queue, served } = file(t);
  const busy = await store.project({ name: 'busy' });
  const running = await deploy(store, busy, 'a1');
  await begin(store);
  await deploy(store, busy, 'a2');
  const idle = await store.project({ name: 'idle' });
  for (const name of ['b1', 'b2']) await deploy(store, idle, name);
  const paused = await store.project({ name: 'paused' });
  await deploy(store, paused, 'c1');
  await store.writer.write('projects.setStatus', { id: paused, status: 'paused' });

  served();
  const { running: runs, waiting } = await queue();
  t.match(runs, { count: 1, items: [{ id: running, status: 'running', ref: 'a1', project_name: 'busy' }] });
  t.equal(waiting.count, 4);
  t.match(waiting.items, [
    { ref: 'b1', project_name: 'idle', queue_position: 1, waits_for: 'place' },
    { ref: 'a2', project_name: 'busy', queue_position: 1, waits_for: 'project_runs', project_runs: running },
    { ref: 'b2', project_name: 'idle', queue_position: 2, waits_for: 'turn' },
    { ref: 'c1', project_name: 'paused', queue_position: 1, waits_for: 'project_resumed' },
  ]);
  await store.writer.write('deployments.finish', endOf(running));
  t.match((await queue()).waiting.items.slice(0, 2), [
    { ref: 'b1', waits_for: 'nothing' },
    { ref: 'a2', waits_for: 'nothing' },
  ]);
});

t.test('as many deployments are about to start as the service has free places', async (t) => {
  const { store, queue, served, davit } = file(t);
  const projects = [];
  for (const name of ['one', 'two', 'three', 'four']) projects.push(await store.project({ name }));
  for (const id of projects) await deploy(store, id, 'main');
  await begin(store);
  const reasons = async (maxConcurrent: number | null) => {
    const release = served(maxConcurrent);
    const { waiting, service } = await queue();
    const { stdout } = await davit(['admin', 'queue']);
    release();
    t.match(service, { max_concurrent: maxConcurrent });
    return { reasons: waiting.items.map((item) => Object(item).waits_for), stdout };
  };
  t.match(await reasons(1), {
    reasons: ['place', 'place', 'place'],
    stdout: /^running +1 of at most 1$[\s\S]* a free slot: 1 of at most 1 running$/m,
  });
  t.match(await reasons(3), { reasons: ['nothing', 'nothing', 'place'] });
  t.match(await reasons(9), { reasons: ['nothing', 'nothing', 'nothing'] });
  t.match(await reasons(null), { reasons: ['place', 'place', 'place'], stdout: /^running +1$/m });
});

t.test('a deployment that an earlier run left holds up all that could start', async (t) => {
  const { store, queue, served, davit } = file(t);
  const [left, other] = [await store.project({ name: 'left' }), await store.project({ name: 'other' })];
  await deploy(store, left, 'a1');
  await begin(store);
  for (const id of [left, other]) await deploy(store, id, 'b1');
  served(9);
  t.match((await queue()).waiting.items, [{ waits_for: 'nothing' }, { waits_for: 'project_runs' }]);
  store.execute("UPDATE deployments SET started_at = 1 WHERE status = 'running'");
  t.match((await queue()).waiting.items, [
    { project_name: 'other', waits_for: 'earlier_run' },
    { project_name: 'left', waits_for: 'project_runs' },
  ]);
  const { stdout } = await davit(['admin', 'queue']);
  t.match(stdout, / a1 +running: left by an earlier run /m);
  t.match(stdout, / one of an earlier run, which has not ended$/m);
});

t.test('a deployment that cannot start yet holds up all that could start', async (t) => {
  const { store, queue, served, davit } = file(t);
  const [first, other] = [await store.project({ name: 'first' }), await store.project({ name: 'other' })];
  const id = await deploy(store, first, 'a1');
  await store.writer.write('deployments.claim', undefined);
  for (const project of [first, other]) await deploy(store, project, 'b1');
  served(9);
  store.execute(`UPDATE deployments SET started_at = ${realEffects.now() - 10_000} WHERE id = '${id}'`);
  t.match((await queue()).waiting.items, [{ waits_for: 'earlier_start' }, { waits_for: 'project_runs' }]);
  const { stdout } = await davit(['admin', 'queue']);
  t.match(stdout, new RegExp(`^${id} +first +a1 +running: cannot start yet `, 'm'));
  t.match(stdout, / an earlier one, which cannot start yet$/m);
  await store.writer.write('projects.setStatus', { id: first, status: 'paused' });
  t.match((await queue()).waiting.items, [
    { project_name: 'other', waits_for: 'nothing' },
    { project_name: 'first', waits_for: 'project_resumed' },
  ]);
  const { stdout: paused } = await davit(['admin', 'queue']);
  t.match(paused, /^running +0 of at most 9$/m, 'it takes no slot');
  t.match(paused, / a1 +running: its project is paused /m);
  await store.writer.write('projects.setStatus', { id: first, status: 'active' });
  await store.writer.write('deployments.setProcess', { id, ...PROCESS });
  t.match((await queue()).waiting.items, [{ waits_for: 'nothing' }, { waits_for: 'project_runs' }]);
});

t.test('queue says which process serves the file, or that none does', async (t) => {
  const { store, queue, served, davit } = file(t);
  await deploy(store, await store.project(), 'main');
  t.match(await queue(), { service: null, waiting: { items: [{ waits_for: 'service' }] } });
  t.match(
    (await davit(['admin', 'queue'])).stdout,
    /^service +none: nothing is started or sent until 'davit/,
  );
  const release = served();
  const { service } = await queue();
  t.equal(service?.process_id, process.pid);
  t.ok(Math.abs(Date.parse(service?.since ?? '') - realEffects.now()) < 60_000);
  t.match((await davit(['admin', 'queue'])).stdout, new RegExp(`^service +process ${process.pid}, since 20`));
  release();
  t.match(await queue(), { service: null });
});

t.test('deployments left by a dead service are not said to be running', async (t) => {
  const { store, davit, served } = file(t);
  const id = await deploy(store, await store.project(), 'main');
  await store.writer.write('deployments.claim', undefined);
  const ends = "no service is running: 'davit serve' ends these and records them as interrupted";
  t.match((await davit(['admin', 'queue'])).stdout, `\n${ends}\n`);
  await store.writer.write('deployments.cancel', { id });
  t.match((await davit(['admin', 'queue'])).stdout, `\n${ends}, or as canceled if they are canceling\n`);
  served();
  t.notMatch((await davit(['admin', 'queue'])).stdout, /no service is running/);
});

t.test('reported deployments are listed apart, with the time at which they fail', async (t) => {
  const { store, queue } = file(t);
  const project = { command: null, reportTimeoutMs: 3_600_000, name: 'elsewhere' };
  const id = await deploy(store, await store.project(project), 'main');
  const endless = await deploy(store, await store.project({ command: null }), 'v2');
  await store.writer.write('deployments.report', reportFor(id));
  const { running, waiting, reported } = await queue();
  t.strictSame([running, waiting], [NONE, NONE]);
  t.match(reported, {
    count: 2,
    items: [
      { id, status: 'running', project_name: 'elsewhere', report_due_at: /^20.*Z$/ },
      { id: endless, status: 'queued', report_due_at: null },
    ],
  });
  const [first] = reported.items;
  t.equal(Date.parse(first?.report_due_at ?? '') - Date.parse(first?.created_at ?? ''), 3_600_000);
});

t.test('deliveries are counted per webhook, with the next attempt and the last error', async (t) => {
  const { store, queue, davit } = file(t);
  const { keyId } = await store.key();
  const [failing, disabled, idle] = [
    await newWebhook(store, keyId, { url: 'https://failing.test/' }),
    await newWebhook(store, keyId, { url: 'https://disabled.test/' }),
    await newWebhook(store, keyId, { url: 'https://idle.test/', events: ['deployment.failed'] }),
  ];
  const project = await store.project();
  for (const name of ['a', 'b', 'c']) await deploy(store, project, name);
  const disableReason = 'the receiver answered 410 Gone';
  await store.writer.write('webhooks.update', { id: disabled.id, status: 'disabled', disableReason });
  const nextAtMs = realEffects.now() + 600_000;
  await fail(store, failing.id, 503, nextAtMs);

  const { deliveries, webhooks } = await queue();
  t.strictSame(deliveries, { pending_count: 3, due_count: 2, held_count: 3 });
  t.equal(webhooks.count, 2);
  t.notOk(webhooks.items.some(({ id }) => id === idle.id));
  t.match(webhooks.items, [
    {
      id: failing.id,
      status: 'enabled',
      pending_count: 3,
      due_count: 2,
      held_count: 0,
      consecutive_failures: 1,
      last_error: '503',
      created_by: { key_id: keyId, name: 'ci' },
    },
    {
      id: disabled.id,
      status: 'disabled',
      status_reason: disableReason,
      pending_count: 0,
      held_count: 3,
      next_attempt_at: null,
    },
  ]);
  const { stdout } = await davit(['admin', 'queue']);
  t.match(stdout, /^deliveries +3 pending, 2 of them due; 3 held$/m);
  t.match(stdout, new RegExp(`^${failing.id} +https://failing\\.test/ +3 +20\\S+Z +1× +503$`, 'm'));
  t.match(stdout, new RegExp(`^${disabled.id} +https://disabled\\.test/ +3 +held +${disableReason}$`, 'm'));
});

t.test('admin queue shows when a waiting retry is due, and a single held delivery as held', async (t) => {
  const { store, davit, served } = file(t);
  const { keyId } = await store.key();
  const failing = await newWebhook(store, keyId, { url: 'https://failing.test/' });
  const disabled = await newWebhook(store, keyId, { url: 'https://disabled.test/' });
  await deploy(store, await store.project(), 'main');
  await store.writer.write('webhooks.update', { id: disabled.id, status: 'disabled', disableReason: 'x' });
  served();
  const queue = async () => (await davit(['admin', 'queue'])).stdout;
  t.match(await queue(), new RegExp(`^${failing.id} +https://failing\\.test/ +1 +now$`, 'm'));
  await fail(store, failing.id, 503, realEffects.now() + 600_000);
  t.match(await queue(), new RegExp(`^${failing.id} +https://failing\\.test/ +1 +20\\S+Z +1× +503$`, 'm'));
  t.match(await queue(), new RegExp(`^${disabled.id} +https://disabled\\.test/ +1 +held +x$`, 'm'));
});

t.test('deliveries of a deleted webhook are not counted', async (t) => {
  const { store, queue } = file(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  await deploy(store, await store.project(), 'main');
  t.match(await queue(), { deliveries: { pending_count: 1 } });
  await store.writer.write('webhooks.remove', { id });
  t.match(await queue(), { deliveries: { pending_count: 0, held_count: 0 }, webhooks: NONE });
});

t.test('unfinished replays are listed', async (t) => {
  const { store, queue, davit } = file(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  await deploy(store, await store.project(), 'main');
  await newReplay(store, realEffects, id, { sinceMs: Date.parse('2026-01-31T12:00:00Z') });
  t.match((await queue()).replays, {
    count: 1,
    items: [{ webhook_id: id, since: '2026-01-31T12:00:00.000Z' }],
  });
  const { stdout } = await davit(['admin', 'queue']);
  t.match(stdout, new RegExp(`^REPLAY TO .*\n${id} `, 'm'));
});

t.test('each list is cut at --limit and says how many more there are', async (t) => {
  const { store, davit } = file(t);
  const { keyId } = await store.key();
  for (const path of ['one', 'two', 'three'])
    await newWebhook(store, keyId, { url: `https://${path}.test/` });
  const project = await store.project();
  for (let made = 0; made < 25; made++) await deploy(store, project, 'main');
  const elsewhere = await store.project({ command: null });
  for (let made = 0; made < 3; made++) await deploy(store, elsewhere, 'main');
  const rest = async (...words: string[]) => {
    const { stdout } = await davit(['admin', 'queue', ...words]);
    return [...stdout.matchAll(/^and (\d+) more$/gm)].map(([, count]) => Number(count));
  };
  t.strictSame(await rest(), [5]);
  t.strictSame(await rest('--limit', '2'), [23, 1, 1]);
  t.strictSame(await rest('--limit', '25'), []);
});

t.test('an empty queue prints five lines, and a bad --limit or --db is refused', async (t) => {
  const { queue, davit, refused, dump } = file(t);
  const before = dump();
  t.strictSame(await queue(), {
    service: null,
    running: NONE,
    waiting: NONE,
    reported: NONE,
    deliveries: { pending_count: 0, due_count: 0, held_count: 0 },
    webhooks: NONE,
    replays: NONE,
  });
  t.equal((await davit(['admin', 'queue'])).stdout.split('\n').length, 5);
  t.match(await refused(['admin', 'queue', '--limit', '0']), { exitCode: 2 });
  t.match(await refused(['admin', 'queue', '--db', 'none.db']), { exitCode: 1, message: /no file none\.db/ });
  t.strictSame(dump(), before);
});

t.test('with a full service, queue shows who runs and who waits for a place', async (t) => {
  const there = place(t);
  const pipe = namedPipe(t);
  for (const name of ['one', 'two']) {
    await there.davit(['admin', 'project', 'create', '--name', name, '--', '/bin/cat', pipe]);
  }
  const service = await serve(t, there.directory, '--max-concurrent', '1');
  const make = (name: string) =>
    there.json<Deployment>(['admin', 'deployment', 'create', name, 'main']).then(({ id }) => id);
  const [first, second] = [await make('one'), await make('two')];
  for (;;) {
    const { running, waiting, service: holder } = await there.json<Queue>(['admin', 'queue']);
    if (running.count === 0) continue; // it has half a second to take it up
    t.match(running.items, [{ id: first, project_name: 'one', status: 'running' }]);
    t.match(waiting.items, [{ id: second, project_name: 'two', waits_for: 'place' }]);
    t.match(holder, { process_id: service.processId, max_concurrent: 1 });
    break;
  }
  // Opened for writing, the pipe gives each its end of input.
  for (const id of [first, second]) {
    const ended = there.davit(['admin', 'deployment', 'logs', id, '-f']);
    writeFileSync(pipe, '');
    t.match((await ended).stderr, /: succeeded\n$/);
  }
  t.match(await there.json<Queue>(['admin', 'queue']), { running: NONE, waiting: NONE });
});

t.test(
  'on a terminal, no line but a whole URL is wider than 80 columns, and times are relative',
  needsTerminal,
  async (t) => {
    const { store, there } = file(t);
    const { keyId } = await store.key();
    const url = `https://example.com/${'x'.repeat(200)}`;
    await newWebhook(store, keyId, { url });
    await deploy(store, await store.project({ name: 'n'.repeat(90) }), 'r'.repeat(200));
    await store.writer.write('deployments.claim', undefined);
    const { shown, exitCode } = onTerminal(there, ['admin', 'queue']);
    t.equal(exitCode, 0);
    t.match(shown, /running.* (?:now|\ds ago)$/m);
    const visible = shown.replaceAll(/\p{Cc}\[\d+m/gu, '');
    t.strictSame(
      visible.split('\n').filter((line) => line.length > 80),
      [`URL           ${url}`],
    );
  },
);

const NONE = { count: 0, items: [] };

/** A store that the test writes to, and the command line on its file. */
function file(t: Test) {
  const store = testStore(t, realEffects);
  const sinceMs = realEffects.now() - 30_000;
  const there = place(t);
  const davit: Place['davit'] = (words, options) => there.davit([...words, '--db', store.path], options);
  return {
    store,
    davit,
    dump: store.dump,
    there: { ...there, directory: store.path.replace(/\/[^/]+$/, '') },
    refused: there.refused,
    async queue() {
      const { stdout } = await davit(['admin', 'queue', '--json']);
      return JSON.parse(stdout) as Queue;
    },
    /** Holds the file as a service does that has run for half a minute; the returned function lets it go. */
    served(maxConcurrent: number | null = null) {
      const effects = { ...realEffects, now: () => sinceMs };
      const release = lockForServing(store.path, process.pid, effects, maxConcurrent);
      t.teardown(release);
      return release;
    },
  };
}

async function deploy({ writer }: TestStore, projectId: ProjectId, name: string): Promise<DeploymentId> {
  const deployment = newDeployment(projectId, { ref: ref(name), maxQueued: null });
  return (await writer.write('deployments.create', deployment)).id;
}

const PROCESS = { processId: 1, processStartedAt: 1, bootId: 'b' };

/** As the executor records it: the command of the next deployment runs. */
async function begin({ writer }: TestStore): Promise<void> {
  const claimed = await writer.write('deployments.claim', undefined);
  if (claimed === null) throw new Error('nothing waits');
  await writer.write('deployments.setProcess', { id: claimed.id, ...PROCESS });
}

/** As the dispatcher records it: the first delivery of the webhook failed. */
async function fail(
  store: TestStore,
  webhookId: WebhookId,
  statusCode: number,
  nextAtMs: number,
): Promise<void> {
  const [delivery] = dueOf(store, webhookId, realEffects.now(), 1);
  if (delivery === undefined) throw new Error('nothing is due');
  const next = { kind: 'retry', atMs: nextAtMs } as const;
  await store.writer.write('outbox.settle', settlementOf(delivery, realEffects.now(), next, { statusCode }));
}
