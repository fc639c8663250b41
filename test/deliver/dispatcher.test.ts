import { pino } from 'pino';
import { Webhook as StandardWebhook } from 'standardwebhooks';
import Stripe from 'stripe';
import t, { type Test } from 'tap';
import { LANE_LIMITS } from '../../src/deliver/lanes.ts';
import { verify } from '../../src/deliver/sign.ts';
import type { DeliveryId, WebhookId } from '../../src/domain.ts';
import { HOUR_MS } from '../../src/durations.ts';
import { copyWaiting, newDeliveries, newWebhook, testSender, updateWebhook } from '../helpers/deliveries.ts';
import { deliverAll, deliverDue, dispatching, subscribe, testDispatcher } from '../helpers/dispatcher.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { startProxy } from '../helpers/proxy.ts';
import { CA_PEM, held, redirect, silence, startReceiver, status } from '../helpers/receiver.ts';
import { DEFAULT_SCHEDULE } from '../helpers/schedule.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

t.test('a delivery is signed, and the stripe and standardwebhooks packages accept it', async (t) => {
  const atSeconds = Math.floor(Date.now() / 1000);
  const { store, dispatcher } = dispatching(t, fakeEffects(atSeconds * 1000 + 999));
  const receiver = await startReceiver(t);
  const { signing_secret: secret } = await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));

  await dispatcher.tick();
  const { method, headers, body } = await receiver.next();
  await dispatcher.settled();

  const text = body.toString();
  t.equal(method, 'POST');
  t.equal(headers['content-type'], 'application/json');
  t.match(headers['user-agent'], /^davit\//);
  const event = new Stripe('sk_test_nothing').webhooks.constructEvent(
    text,
    String(headers['service-signature']),
    secret,
  );
  t.match(event, { type: 'deployment.created' });
  t.strictSame(new StandardWebhook(secret).verify(text, headers as Record<string, string>), JSON.parse(text));
  t.equal(headers['webhook-id'], JSON.parse(text).id);
  t.equal(headers['webhook-timestamp'], String(atSeconds), 'which is never ahead of the clock');
  t.match(store.query('SELECT status, attempt_count, next_attempt_at FROM deliveries'), [
    { status: 'delivered', attempt_count: 1, next_attempt_at: null },
  ]);
});

t.test('the log names the fields of an attempt as the API does', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { logger, lines } = keptLog({ level: 'debug', base: null });
  const dispatcher = testDispatcher(t, store, effects, { logger });
  const receiver = await startReceiver(t, { answers: [status(500)] });
  const { id: webhook_id } = await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await dispatcher.tick();
  await dispatcher.settled();
  const [delivery] = store.query('SELECT id AS delivery_id, event_id FROM deliveries');
  t.match(lines, [
    { msg: 'delivery attempt', ...delivery, webhook_id, status_code: 500, error: null, next: 'retry' },
  ]);
  t.strictSame(
    Object.keys(lines[0] ?? {}).filter((name) => !/^[a-z_]+$/.test(name)),
    [],
  );
});

t.test('a failed delivery is retried on schedule, with the same bytes and a fresh signature', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const receiver = await startReceiver(t, { answers: [status(500), status(503), status(200)] });
  await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));

  const gaps: number[] = [];
  for (let attempt = 0; attempt < 3; attempt++) {
    await dispatcher.tick();
    await dispatcher.settled();
    const nextAtMs = await dispatcher.tick();
    if (nextAtMs === null) break;
    t.equal(receiver.requests.length, attempt + 1, 'nothing is sent before its time');
    gaps.push(nextAtMs - effects.now());
    effects.advance(nextAtMs - effects.now());
  }

  t.equal(receiver.requests.length, 3);
  t.equal(new Set(receiver.requests.map(({ body }) => body.toString())).size, 1);
  t.equal(new Set(receiver.requests.map(({ headers }) => headers['service-signature'])).size, 3);
  t.ok(gaps[0] !== undefined && gaps[0] >= 5_000 && gaps[0] <= 5_500, `5 s: ${gaps[0]}`);
  t.ok(gaps[1] !== undefined && gaps[1] >= 30_000 && gaps[1] <= 33_000, `30 s: ${gaps[1]}`);
  t.match(store.query('SELECT number, status_code, trigger FROM attempts ORDER BY number'), [
    { number: 1, status_code: 500, trigger: 'schedule' },
    { number: 2, status_code: 503, trigger: 'schedule' },
    { number: 3, status_code: 200, trigger: 'schedule' },
  ]);
});

t.test(
  'a delivery that never succeeds ends as exhausted, with its last attempt 24 h after the first',
  async (t) => {
    const { store, effects, dispatcher } = dispatching(t);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    await subscribe(store, receiver.url);
    await store.writer.write('deployments.create', newDeployment(await store.project()));
    const startedAtMs = effects.now();

    await deliverAll(dispatcher, effects);
    t.equal(receiver.requests.length, DEFAULT_SCHEDULE.delaysMs.length + 2);
    t.equal(effects.now() - startedAtMs, 24 * 60 * 60_000);
    t.match(store.query('SELECT status FROM deliveries'), [{ status: 'exhausted' }]);
  },
);

t.test('Retry-After of a receiver delays the retry', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const receiver = await startReceiver(t, { answers: [status(503, { headers: { 'Retry-After': '120' } })] });
  await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const nextAtMs = await deliverDue(dispatcher, effects);
  t.equal((nextAtMs ?? 0) - effects.now(), 120_000);
});

t.test('gaps are randomly up to a tenth longer, so that failures spread out', async (t) => {
  for (const [byte, gapMs] of [
    [0x00, 5_000],
    [0x80, 5_251],
    [0xff, 5_500],
  ] as const) {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const chance = { ...effects, randomBytes: (size: number) => Buffer.alloc(size, byte) };
    const dispatcher = testDispatcher(t, store, chance);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    await newDeliveries(store, (await subscribe(store, receiver.url)).id, 1);
    const nextAtMs = await deliverDue(dispatcher, effects);
    t.equal((nextAtMs ?? 0) - effects.now(), gapMs);
  }
});

t.test('writes of another process are looked for when it is notified of, or after a minute', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const commits = new Set<Parameters<TestStore['writer']['onCommit']>[0]>();
  let wakes = 0;
  const dispatcher = testDispatcher(t, store, effects, {
    writer: {
      ...store.writer,
      onCommit: (listener) => void commits.add(listener),
    },
    wake() {
      wakes += 1;
    },
  });
  const receiver = await startReceiver(t, { answers: [status(204)] });
  await subscribe(store, receiver.url);
  await deliverDue(dispatcher, effects);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 0, 'nothing was heard of it');

  for (const listener of commits) listener(new Set(['queue']));
  t.equal(wakes, 0, 'commits of other kinds do not wake it');
  for (const listener of commits) listener(new Set(['everything']));
  t.equal(wakes, 1);
  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 1);

  await store.writer.write('deployments.create', newDeployment(await store.project()));
  effects.advance(60_001);
  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 2);
});

const REASONS: [name: string, answer: number, since: number | null, reason: string][] = [
  ['410', 410, null, 'the receiver answered 410 Gone'],
  ['five days of failures', 502, 5 * 24 * HOUR_MS, 'every delivery failed for 5 days'],
];

for (const [name, answer, failingForMs, reason] of REASONS) {
  t.test(`${name} disables the webhook, and the file and the log say why, once`, async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const { logger, lines } = keptLog({ level: 'debug', base: null });
    const dispatcher = testDispatcher(t, store, effects, { logger });
    const [first, second] = [held(status(answer)), held(status(answer))];
    const receiver = await startReceiver(t, { answers: [first.answer, second.answer] });
    const { id: webhook_id } = await subscribe(store, receiver.url);
    store.execute('UPDATE webhooks SET last_success_at = 1');
    if (failingForMs !== null) {
      store.execute(
        `UPDATE webhooks SET failing_since = ${effects.now() - failingForMs}, last_failure_at = ${effects.now()}`,
      );
    }
    await newDeliveries(store, webhook_id, 2);
    await dispatcher.tick();
    first.release();
    second.release();
    await dispatcher.settled();
    t.match(store.query('SELECT status, status_reason FROM webhooks'), [
      { status: 'disabled', status_reason: reason },
    ]);
    const warned = lines.filter(({ level }) => level === pino.levels.values['warn']);
    t.strictSame(
      warned.map(({ level, time, ...line }) => line),
      [{ webhook_id, reason, msg: 'a webhook is disabled' }],
    );
  });
}

t.test(
  'a delivery whose last attempt is answered 410 is held, and sent once its webhook is enabled',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const schedule = { delaysMs: [], windowMs: HOUR_MS };
    const dispatcher = testDispatcher(t, store, effects, { schedule });
    const receiver = await startReceiver(t, { answers: [status(500), status(410), status(200)] });
    const { id } = await subscribe(store, receiver.url);
    const [deliveryId = ''] = await newDeliveries(store, id, 1);
    await deliverDue(dispatcher, effects);
    effects.advance(HOUR_MS);
    await deliverDue(dispatcher, effects);
    t.match(store.reads.deliveries.get(deliveryId), { status: 'held', attempt_count: 2 });
    t.equal(store.reads.webhooks.get(id)?.status, 'disabled');

    effects.advance(1_000);
    await updateWebhook(store, id, { status: 'enabled' });
    await deliverDue(dispatcher, effects);
    t.match(store.reads.deliveries.get(deliveryId), { status: 'delivered', attempt_count: 3 });
  },
);

t.test('410 from a former url of a webhook does not disable it', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const gone = held(status(410));
  const receiver = await startReceiver(t, { answers: [gone.answer] });
  const elsewhere = await startReceiver(t);
  const { id } = await subscribe(store, receiver.url);
  await newDeliveries(store, id, 1);
  await dispatcher.tick();
  await receiver.next();
  await updateWebhook(store, id, { url: elsewhere.url });
  gone.release();
  await dispatcher.settled();
  t.match(store.query('SELECT status, consecutive_failures FROM webhooks'), [
    { status: 'enabled', consecutive_failures: 0 },
  ]);
  effects.advance(5_500);
  await deliverDue(dispatcher, effects);
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'delivered', attempt_count: 2 },
  ]);
});

t.test('a redirect is a failure, and its target is never visited', async (t) => {
  const { store, dispatcher } = dispatching(t);
  const elsewhere = await startReceiver(t);
  const receiver = await startReceiver(t, { answers: [redirect(elsewhere.url)] });
  await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await dispatcher.tick();
  await dispatcher.settled();
  t.equal(elsewhere.requests.length, 0);
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'pending', attempt_count: 1 },
  ]);
});

t.test('an attempt under way when the service died is sent again after a restart', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { answers: [silence(), status(200)] });
  await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));

  await testDispatcher(t, store, effects).tick();
  await receiver.next();
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'pending', attempt_count: 0 },
  ]);

  await deliverDue(testDispatcher(t, store, effects), effects);
  t.equal(receiver.requests.length, 2);
  t.match(store.query('SELECT status FROM deliveries'), [{ status: 'delivered' }]);
});

t.test('an attempt that davit itself aborted is not recorded', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { answers: [silence()] });
  await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const sender = testSender(t);
  const dispatcher = testDispatcher(t, store, effects, { sender });
  await dispatcher.tick();
  await receiver.next();
  const before = store.dump();
  sender.close();
  await dispatcher.settled();
  t.strictSame(store.dump(), before);
});

t.test('a webhook has one attempt under way until it has answered once, then four', async (t) => {
  const { store, dispatcher, wakes } = dispatching(t);
  const first = held(status(200));
  const receiver = await startReceiver(t, { answers: [first.answer, silence()] });
  await newDeliveries(store, (await subscribe(store, receiver.url)).id, 10);

  await dispatcher.tick();
  await receiver.next();
  t.equal(await dispatcher.tick(), null);
  t.equal(receiver.requests.length, 1);
  const answered = wakes.next();
  first.release();
  await answered;
  await dispatcher.tick();
  for (let count = 0; count < LANE_LIMITS.perWebhook; count++) await receiver.next();
  t.equal(await dispatcher.tick(), null);
  t.equal(receiver.requests.length, 1 + LANE_LIMITS.perWebhook);
});

t.test('any number of hanging receivers leave a slot for one that answers', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const silent = await startReceiver(t, { answers: [silence()] });
  const quick = await startReceiver(t);
  const projectId = await store.project();
  await subscribe(store, quick.url);
  await store.writer.write('deployments.create', newDeployment(projectId));
  await deliverDue(dispatcher, effects);
  await quick.next();

  for (let count = 0; count < LANE_LIMITS.new + 10; count++) await subscribe(store, `${silent.url}/${count}`);
  await store.writer.write('deployments.create', newDeployment(projectId));
  while ((await dispatcher.tick()) !== null);
  await quick.next();
  for (let count = 0; count < LANE_LIMITS.new; count++) await silent.next();
  t.equal(silent.requests.length, LANE_LIMITS.new);
});

t.test('a webhook that failed before a restart is probed, not flooded', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { answers: [status(500), silence()] });
  await newDeliveries(store, (await subscribe(store, receiver.url)).id, 3);
  const sender = testSender(t);
  const before = testDispatcher(t, store, effects, { sender });
  await before.tick();
  await before.settled();
  await receiver.next();

  const restarted = testDispatcher(t, store, effects, { sender });
  await restarted.tick();
  await receiver.next();
  await restarted.tick();
  t.equal(receiver.requests.length, 2);
});

t.test('the sender is told which key registered the webhook', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const sender = testSender(t);
  const told: unknown[] = [];
  const dispatcher = testDispatcher(t, store, effects, {
    sender: {
      ...sender,
      send(request) {
        told.push(request.key);
        return sender.send(request);
      },
    },
  });
  const receiver = await startReceiver(t);
  const keys: unknown[] = [];
  for (let count = 0; count < 2; count++) {
    const { keyId } = await store.key();
    keys.push(keyId);
    await newDeliveries(store, (await newWebhook(store, keyId, { url: receiver.url })).id, 1);
    await deliverDue(dispatcher, effects);
  }
  t.strictSame([...new Set(told)], keys);
});

t.test('a failed look at the database loses no webhook', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t);
  const { id } = await subscribe(store, receiver.url);
  let broken: 'pendingWebhooks' | 'history' | 'claim' | 'recipient' | undefined;
  const failing = (name: typeof broken) => {
    if (broken === name) throw new Error(`${name} cannot be read`);
  };
  const { outbox } = store.reads;
  const reads: typeof store.reads = {
    ...store.reads,
    outbox: {
      ...outbox,
      pendingWebhooks: () => failing('pendingWebhooks') ?? outbox.pendingWebhooks(),
      history: (webhookId) => failing('history') ?? outbox.history(webhookId),
      claim: (requests, nowMs) => failing('claim') ?? outbox.claim(requests, nowMs),
      recipient: (webhookId, nowMs) => failing('recipient') ?? outbox.recipient(webhookId, nowMs),
    },
  };
  const dispatcher = testDispatcher(t, store, effects, { reads });
  await newDeliveries(store, id, 1);
  for (broken of ['pendingWebhooks', 'claim'] as const) {
    await t.rejects(dispatcher.tick(), { message: `${broken} cannot be read` });
  }
  broken = 'recipient';
  await dispatcher.tick();
  await dispatcher.settled();
  t.equal(receiver.requests.length, 0);
  broken = undefined;
  await deliverDue(dispatcher, effects);
  await receiver.next();

  const other = await subscribe(store, receiver.url);
  await newDeliveries(store, other.id, 1);
  broken = 'history';
  await t.rejects(dispatcher.tick(), { message: 'history cannot be read' });
  broken = undefined;
  await deliverDue(dispatcher, effects);
  await receiver.next();
});

t.test('an event is sent to the current url of its webhook, or not at all', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const receiver = await startReceiver(t);
  const elsewhere = await startReceiver(t);
  const moved = await subscribe(store, receiver.url);
  const disabled = await subscribe(store, receiver.url);
  const deleted = await subscribe(store, receiver.url);
  await dispatcher.tick();
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  // The dispatcher has heard of the event, and of nothing else.
  await updateWebhook(store, moved.id, { url: elsewhere.url });
  await updateWebhook(store, disabled.id, { status: 'disabled' });
  await store.writer.write('webhooks.remove', { id: deleted.id });

  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 0);
  t.equal(elsewhere.requests.length, 1);
  t.match(store.query('SELECT status, attempt_count FROM deliveries WHERE webhook_id <> ?', moved.id), [
    { status: 'pending', attempt_count: 0 },
    { status: 'pending', attempt_count: 0 },
  ]);

  await updateWebhook(store, disabled.id, { status: 'enabled' });
  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 1, 'what was held goes out');
});

t.test('nothing is sent to a webhook that was changed while its connection was made', async (t) => {
  const { effects, store, dispatcher, receiver, proxy, url } = await slowHandshakes(t, 4);
  const elsewhere = await startReceiver(t);
  const moved = await subscribe(store, url);
  const disabled = await subscribe(store, url);
  const deleted = await subscribe(store, url);
  const enabledAgain = await subscribe(store, url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await dispatcher.tick();
  await proxy.connected(4);
  effects.advance(1_000);
  await updateWebhook(store, moved.id, { url: elsewhere.url });
  await updateWebhook(store, disabled.id, { status: 'disabled' });
  await store.writer.write('webhooks.remove', { id: deleted.id });
  for (const status of ['disabled', 'enabled'] as const) {
    await updateWebhook(store, enabledAgain.id, { status });
  }
  proxy.release();
  await dispatcher.settled();
  t.equal(receiver.requests.length, 0);
  t.strictSame(store.query('SELECT * FROM attempts'), []);

  await deliverDue(dispatcher, effects);
  t.equal(elsewhere.requests.length, 1, 'the new url');
  t.equal(receiver.requests.length, 1, 'what was held while it was disabled');
  for (const { id, delivered } of [
    { id: moved.id, delivered: true },
    { id: disabled.id, delivered: false },
    { id: deleted.id, delivered: false },
    { id: enabledAgain.id, delivered: true },
  ]) {
    t.match(store.query('SELECT status, attempt_count FROM deliveries WHERE webhook_id = ?', id), [
      delivered ? { status: 'delivered', attempt_count: 1 } : { status: 'pending', attempt_count: 0 },
    ]);
  }
});

t.test('a delivery is signed when its connection is made, with the secrets of that moment', async (t) => {
  const { effects, store, dispatcher, receiver, proxy, url } = await slowHandshakes(t, 1);
  const { id } = await subscribe(store, url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await dispatcher.tick();
  await proxy.connected(1);
  effects.advance(7_000);
  const { signing_secret: secret } = await store.writer.write('webhooks.rotate', { id, overlapMs: 0 });
  proxy.release();
  await dispatcher.settled();
  const [{ headers, body } = await receiver.next()] = receiver.requests;
  const header = String(headers['service-signature']);
  const nowSeconds = Math.floor(effects.now() / 1000);
  t.strictSame(verify({ secret, header, body, nowSeconds, toleranceSeconds: 0 }), { ok: true });
});

/** A receiver over TLS behind a proxy at which the first `count` handshakes wait for its `release`. */
async function slowHandshakes(t: Test, count: number) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const sender = testSender(t, { caPem: CA_PEM });
  const dispatcher = testDispatcher(t, store, effects, { sender });
  const receiver = await startReceiver(t, { tls: 'localhost' });
  const proxy = await startProxy(t, receiver.url);
  proxy.fates(...Array<'hold'>(count).fill('hold'));
  return { effects, store, dispatcher, receiver, proxy, url: proxy.url.replace('http:', 'https:') };
}

t.test('all deliveries that waited for a retry are due once their webhook is enabled', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const { id } = await subscribe(store, 'https://example.com/hook');
  await newDeliveries(store, id, 1);
  copyWaiting(store, 1_500, effects.now() + HOUR_MS);
  for (const status of ['disabled', 'enabled'] as const) {
    effects.advance(1_000);
    await updateWebhook(store, id, { status });
  }
  await dispatcher.settled();
  t.strictSame(
    store.query('SELECT count(*) AS due FROM deliveries WHERE next_attempt_at <= ?', effects.now()),
    [{ due: 1501 }],
  );
});

t.test('deliveries of a webhook that was enabled just before a restart are due, too', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t);
  const { id } = await subscribe(store, receiver.url);
  await newDeliveries(store, id, 1);
  copyWaiting(store, 300, effects.now() + HOUR_MS);
  for (const status of ['disabled', 'enabled'] as const) {
    effects.advance(1_000);
    await updateWebhook(store, id, { status });
  }
  const dispatcher = testDispatcher(t, store, effects);
  await dispatcher.tick();
  await dispatcher.settled();
  t.strictSame(
    store.query(
      'SELECT count(*) AS waiting FROM deliveries WHERE next_attempt_at >= ?',
      effects.now() + HOUR_MS / 2,
    ),
    [{ waiting: 0 }],
  );
});

t.test('a redelivery requested during an attempt has all its retries', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const first = held(status(500));
  const receiver = await startReceiver(t, { answers: [first.answer, status(500)] });
  const [id] = await newDeliveries(store, (await subscribe(store, receiver.url)).id, 1);
  if (id === undefined) throw new Error('there is no delivery');
  effects.advance(HOUR_MS);
  await dispatcher.tick();
  await receiver.next();
  await store.writer.write('deliveries.redeliver', { id });
  first.release();
  await dispatcher.settled();
  t.match(store.query('SELECT next_attempt_at, attempt_count, ladder_attempts FROM deliveries'), [
    { next_attempt_at: effects.now(), attempt_count: 1, ladder_attempts: 0 },
  ]);
  effects.advance(100);
  await deliverDue(dispatcher, effects);
  t.match(store.query('SELECT attempt_count, ladder_attempts FROM deliveries'), [
    { attempt_count: 2, ladder_attempts: 1 },
  ]);
  t.strictSame(store.query('SELECT trigger FROM attempts ORDER BY number'), [
    { trigger: 'schedule' },
    { trigger: 'redeliver' },
  ]);
});

const NEW_LADDERS: {
  name: string;
  begin: (store: TestStore, id: DeliveryId, of: WebhookId) => Promise<unknown>;
}[] = [
  {
    name: 'a redelivery asked for',
    begin: (store, id) => store.writer.write('deliveries.redeliver', { id }),
  },
  {
    name: 'a delivery whose webhook is disabled and enabled',
    async begin(store, _id, of) {
      await updateWebhook(store, of, { status: 'disabled' });
      await updateWebhook(store, of, { status: 'enabled' });
    },
  },
];

const DURING = [
  { during: 'an attempt', ladderAttempts: 0 },
  { during: 'the last attempt', ladderAttempts: DEFAULT_SCHEDULE.delaysMs.length + 1 },
];

for (const { name, begin } of NEW_LADDERS) {
  for (const { during, ladderAttempts } of DURING) {
    t.test(`${name} during ${during} to a webhook that answered before is sent next`, async (t) => {
      const { store, effects, dispatcher } = dispatching(t);
      const second = held(status(500));
      const receiver = await startReceiver(t, { answers: [status(200), second.answer, status(200)] });
      const webhook = await subscribe(store, receiver.url);
      await newDeliveries(store, webhook.id, 1);
      await deliverDue(dispatcher, effects);
      await receiver.next();
      const [id] = await newDeliveries(store, webhook.id, 1);
      if (id === undefined) throw new Error('there is no delivery');
      store.execute(`UPDATE deliveries SET ladder_attempts = ${ladderAttempts} WHERE id = '${id}'`);
      await dispatcher.tick();
      await receiver.next();

      effects.advance(1);
      await begin(store, id, webhook.id);
      while ((await dispatcher.tick()) !== null);
      t.equal(receiver.requests.length, 2, 'not while the first is under way');
      second.release();
      await dispatcher.settled();
      await deliverDue(dispatcher, effects);
      t.equal(receiver.requests.length, 3);
      t.match(store.query('SELECT status, attempt_count FROM deliveries ORDER BY seq DESC LIMIT 1'), [
        { status: 'delivered', attempt_count: 2 },
      ]);
    });
  }
}

t.test('a delivery first tried after the window has all its retries', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
  const receiver = await startReceiver(t, { answers: [status(500)] });
  await newDeliveries(store, (await subscribe(store, receiver.url)).id, 1);
  effects.advance(30 * HOUR_MS);
  await deliverAll(dispatcher, effects);
  t.equal(receiver.requests.length, DEFAULT_SCHEDULE.delaysMs.length + 2);
  t.match(store.query('SELECT status FROM deliveries'), [{ status: 'exhausted' }]);
});

t.test(
  'a webhook that failed once before a week of downtime is not disabled by its next failure',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const receiver = await startReceiver(t, { answers: [status(502)] });
    const { id } = await subscribe(store, receiver.url);
    await newDeliveries(store, id, 1);
    await deliverDue(testDispatcher(t, store, effects), effects);
    effects.advance(7 * 24 * HOUR_MS);

    await deliverDue(testDispatcher(t, store, effects), effects);
    t.equal(receiver.requests.length, 2);
    t.match(store.reads.webhooks.get(id), { status: 'enabled' });
  },
);

t.test('retries beyond a shortened window are rescheduled once, and that is logged', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { answers: [status(500)] });
  await subscribe(store, receiver.url);
  const { id } = await subscribe(store, receiver.url);
  await newDeliveries(store, id, 1);
  store.execute(`UPDATE deliveries SET next_attempt_at = next_attempt_at + ${3 * HOUR_MS}`);
  copyWaiting(store, 500, effects.now() + 3 * HOUR_MS);
  const { logger, lines } = keptLog({ level: 'debug', base: null });
  const schedule = { delaysMs: [], windowMs: HOUR_MS };
  const dispatcher = testDispatcher(t, store, effects, { logger, schedule });
  await dispatcher.tick();
  // It looks at all again, before the last step.
  await updateWebhook(store, id, { url: `${receiver.url}/new` });
  await dispatcher.tick();
  await dispatcher.settled();
  const said = lines.filter(({ msg }) => msg !== 'delivery attempt');
  t.strictSame(
    said.map(({ msg, window_ms }) => ({ msg, window_ms })),
    [{ msg: 'retries were scheduled beyond the window: they are rescheduled', window_ms: HOUR_MS }],
  );
  t.match(
    store.query('SELECT max(next_attempt_at) <= ? AS isWithin FROM deliveries', effects.now() + HOUR_MS),
    [{ isWithin: 1 }],
  );
});

t.test('a delivery is dated by the end of its attempt, to the millisecond', async (t) => {
  const clock = fakeEffects();
  const effects = { ...clock, now: () => Math.floor(clock.now()) };
  const store = testStore(t, effects);
  const outcome = { ok: true, statusCode: 200, error: null, remoteAddress: null, responseBody: null };
  const sender = {
    ...testSender(t),
    async send() {
      clock.advance(0.7); // what dispatching takes is not the attempt's
      return { ...outcome, durationMs: 0, retryAfter: null };
    },
  };
  const dispatcher = testDispatcher(t, store, effects, { sender });
  await newDeliveries(store, (await subscribe(store, 'https://one.example')).id, 10);
  await deliverDue(dispatcher, effects);
  t.strictSame(
    store.query(`
      SELECT d.delivered_at - a.at AS afterMs, count(*) AS count
        FROM deliveries d JOIN attempts a ON a.delivery_id = d.id GROUP BY 1`),
    [{ afterMs: 0, count: 10 }],
  );
});

t.test('on a full disk nothing is sent twice, and all is recorded once there is room', async (t) => {
  const { store, effects, dispatcher, wakes } = dispatching(t);
  const receiver = await startReceiver(t, { answers: [status(200, { body: 'x'.repeat(4096) })] });
  await newDeliveries(store, (await subscribe(store, receiver.url)).id, 8);
  store.limitPages(true);
  while (receiver.requests.length < 8) {
    const woken = wakes.next();
    await dispatcher.tick();
    await woken;
  }
  const unrecorded = "SELECT count(*) AS count FROM deliveries WHERE status = 'pending'";
  const [{ count } = { count: 0 }] = store.query<{ count: number }>(unrecorded);
  t.ok(count > 0, `${count}`);
  for (let look = 0; look < 10; look++) await dispatcher.tick();
  t.equal(receiver.requests.length, 8);

  store.limitPages(false);
  effects.advance(1_000);
  await dispatcher.settled();
  t.strictSame(store.query(unrecorded), [{ count: 0 }]);
  t.strictSame(store.query('SELECT count(*) AS count FROM attempts'), [{ count: 8 }]);
});
