import { copyFileSync, renameSync, truncateSync } from 'node:fs';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { MessageChannel } from 'node:worker_threads';
import t, { type Test } from 'tap';
import { startDispatcherThread } from '../../src/deliver/dispatcher-port.ts';
import { realEffects } from '../../src/effects.ts';
import { openForWriting } from '../../src/store/database.ts';
import { identifyFiles } from '../../src/store/place.ts';
import { type Store, startWriterThread } from '../../src/store/store.ts';
import type { WebhookWithSecret } from '../../src/store/webhooks.ts';
import { until } from '../helpers/commands.ts';
import { LOOPBACK_RULES, newReplay, newWebhook, updateWebhook } from '../helpers/deliveries.ts';
import { held, startReceiver, status, unfinished } from '../helpers/receiver.ts';
import { DEFAULT_SCHEDULE } from '../helpers/schedule.ts';
import { newDeployment, PROJECT, temporaryDirectory } from '../helpers/store.ts';

const BEGINNING = {
  // No test ends before an attempt whose deadline is waited for.
  sender: { timeoutMs: 600_000, ...LOOPBACK_RULES },
  schedule: DEFAULT_SCHEDULE,
  log: { level: 'silent', form: 'json' },
  metricsMemory: undefined,
} as const;

t.test('pings, deliveries and replays are sent from the thread', async (t) => {
  const { store, dispatcher } = await threads(t);
  const receiver = await startReceiver(t, { answers: [status(200, { body: 'pong' })] });
  const webhook = await subscribe(store, receiver.url);

  t.match(await dispatcher.ping(webhook.id), {
    kind: 'attempted',
    attempt: { status_code: 200, response_body: 'pong', trigger: 'ping' },
  });
  t.match(JSON.parse((await receiver.next()).body.toString()), { type: 'ping' });

  const settled = until(() => store.reads.webhooks.get(webhook.id)?.last_success_at !== null);
  await deploy(store);
  const first = await receiver.next();
  await settled;
  await newReplay(store, realEffects, webhook.id);
  const again = await receiver.next();
  t.equal(again.body.toString(), first.body.toString());
  t.equal(again.headers['webhook-id'], first.headers['webhook-id']);
});

t.test('a delivery that waits for a retry is sent when its webhook is enabled', async (t) => {
  const { store } = await threads(t, { delaysMs: [3_600_000], windowMs: 86_400_000 });
  const receiver = await startReceiver(t, { answers: [status(500), status(200)] });
  const { id } = await subscribe(store, receiver.url);
  await deploy(store);
  await until(() => store.reads.webhooks.get(id)?.consecutive_failures === 1);
  for (const status of ['disabled', 'enabled'] as const) {
    await updateWebhook(store, id, { status });
  }
  await until(() => store.reads.webhooks.get(id)?.last_success_at !== null);
  t.equal(receiver.requests.length, 2);
});

t.test('of two pings under way each gets its own result, whichever ends first', async (t) => {
  const { store, dispatcher } = await threads(t);
  const late = held(status(200));
  const [slow, quick] = [
    await startReceiver(t, { answers: [late.answer] }),
    await startReceiver(t, { answers: [status(500)] }),
  ];
  const first = dispatcher.ping((await subscribe(store, slow.url)).id);
  await slow.next();
  t.match(await dispatcher.ping((await subscribe(store, quick.url)).id), { attempt: { status_code: 500 } });
  late.release();
  t.match(await first, { attempt: { status_code: 200 } });
});

t.test('a ping of an unknown webhook gives gone', async (t) => {
  const { dispatcher } = await threads(t);
  t.strictSame(await dispatcher.ping('whk_0000000000000000000000' as never), { kind: 'gone' });
});

t.test('a ping of a webhook that cannot be read is refused as unavailable, not as a bug', async (t) => {
  const { path, store, dispatcher } = await threads(t);
  const { id } = await subscribe(store, 'http://127.0.0.1:9/');
  truncateSync(`${path}-wal`, 0);
  await t.rejects(dispatcher.ping(id), {
    code: 'unavailable',
    message: 'the database cannot be read at the moment: try again shortly',
    retryAfterSeconds: 5,
  });
});

t.test('the thread does not begin with another file than the writer has, nor without it', async (t) => {
  for (const isReplaced of [true, false]) {
    const errors: unknown[] = [];
    const dispatcher = startDispatcherThread((error) => errors.push(error), realEffects);
    const path = join(temporaryDirectory(t), 'davit.db');
    openForWriting(path, realEffects).close();
    const files = identifyFiles(path);
    renameSync(path, `${path}.moved`);
    if (isReplaced) copyFileSync(`${path}.moved`, path);
    const { port1, port2 } = new MessageChannel();
    const moved = { code: 'conflict', message: /^the database was moved or replaced while davit started: / };
    await t.rejects(dispatcher.begin({ ...BEGINNING, path, files, port: port2 }), moved);
    t.match(errors, [moved]);
    await dispatcher.stop(0);
    port1.close();
  }
});

t.test('that the thread has failed is told, and a stop does not wait for it', async (t) => {
  const errors: unknown[] = [];
  const dispatcher = startDispatcherThread((error) => errors.push(error), realEffects);
  const { port1, port2 } = new MessageChannel();
  t.teardown(() => port1.close());
  const log = { level: 'loud' as never, form: 'json' } as const;
  const failure = { message: /loud/ };
  await t.rejects(dispatcher.begin({ ...BEGINNING, log, path: '', files: [], port: port2 }), failure);
  await dispatcher.stop(60_000);
  t.match(errors, [failure]);
});

t.test('a stop lets attempts that are under way end, and their results are recorded', async (t) => {
  const { store, dispatcher } = await threads(t);
  const { answer, release } = held(status(200));
  const receiver = await startReceiver(t, { answers: [answer] });
  const { id } = await subscribe(store, receiver.url);
  await deploy(store);
  await receiver.next();
  const stopped = dispatcher.stop(60_000);
  await Promise.race([stopped, dispatcher.quietMs()]); // asked after the stop, so that has begun
  release();
  await stopped;
  t.type(store.reads.webhooks.get(id)?.last_success_at, 'string');
});

t.test(
  'an attempt for which a stop does not wait counts if only the body of its answer is missing',
  async (t) => {
    const { store, dispatcher } = await threads(t);
    const receiver = await startReceiver(t, { answers: [unfinished(200, 'o')] });
    const { id } = await subscribe(store, receiver.url);
    await deploy(store);
    await receiver.next();
    await nextTurn(); // the answer is written
    await dispatcher.stop(0);
    // A busy writer may take longer than the stop waits for it.
    await until(() => typeof store.reads.webhooks.get(id)?.last_success_at === 'string');
  },
);

async function threads(t: Test, schedule = DEFAULT_SCHEDULE) {
  const path = join(temporaryDirectory(t), 'davit.db');
  openForWriting(path, realEffects).close();
  const crashed = (error: unknown) => t.fail('a thread crashed', { error });
  const door = new MessageChannel();
  const store = await startWriterThread(crashed).open(path, [door.port1]);
  const dispatcher = startDispatcherThread(crashed, realEffects);
  t.teardown(async () => {
    await dispatcher.stop(0);
    await store.close();
  });
  await dispatcher.begin({
    ...BEGINNING,
    schedule,
    path,
    files: identifyFiles(path),
    port: door.port2,
  });
  return { path, store, dispatcher };
}

async function subscribe(store: Store, url: string): Promise<WebhookWithSecret> {
  const { key } = await store.writer.write('keys.create', {
    name: 'ci',
    scopes: ['webhooks:write'],
    allProjects: true,
    projectIds: [],
    expiresInMs: null,
  });
  return await newWebhook(store, key.id, { url });
}

async function deploy({ writer }: Store): Promise<void> {
  const project = await writer.write('projects.create', { ...PROJECT, command: null, timeoutMs: null });
  await writer.write('deployments.create', newDeployment(project.id));
}
