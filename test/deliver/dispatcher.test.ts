import { pino } from 'pino';
import { Webhook as StandardWebhook } from 'standardwebhooks';
import Stripe from 'stripe';
import t, { type Test } from 'tap';
import type { Dispatcher } from '../../src/deliver/dispatcher.ts';
import { LANE_LIMITS } from '../../src/deliver/lanes.ts';
import { verify } from '../../src/deliver/sign.ts';
import type { DeliveryId, WebhookId } from '../../src/domain.ts';
import { DAY_MS, HOUR_MS } from '../../src/durations.ts';
import type { WebhookWithSecret } from '../../src/store/webhooks.ts';
import { copyWaiting, endDeliveries, newDeliveries, newWebhook, testSender } from '../helpers/deliveries.ts';
import { deliverDue, testDispatcher } from '../helpers/dispatcher.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { startProxy } from '../helpers/proxy.ts';
import { CA_PEM, held, redirect, silence, startReceiver, status } from '../helpers/receiver.ts';
import { DEFAULT_SCHEDULE } from '../helpers/schedule.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

t.test('a delivery is signed, and the stripe and standardwebhooks packages accept it', async (t) => {
  const atSeconds = Math.floor(Date.now() / 1000);
  const { store, dispatcher } = service(t, fakeEffects(atSeconds * 1000 + 999));
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
  const { store, effects, dispatcher } = service(t);
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
    const { store, effects, dispatcher } = service(t);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    await subscribe(store, receiver.url);
    await store.writer.write('deployments.create', newDeployment(await store.project()));
    const startedAtMs = effects.now();

    let lastAtMs = 0;
    for (;;) {
      await dispatcher.tick();
      await dispatcher.settled();
      lastAtMs = effects.now();
      const nextAtMs = await dispatcher.tick();
      if (nextAtMs === null) break;
      effects.advance(nextAtMs - effects.now());
    }
    t.equal(receiver.requests.length, DEFAULT_SCHEDULE.delaysMs.length + 2);
    t.equal(lastAtMs - startedAtMs, 24 * 60 * 60_000);
    t.match(store.query('SELECT status FROM deliveries'), [{ status: 'exhausted' }]);
  },
);

for (const { byHours, after, redelivered = false, wasDown = false, lateMs = 0 } of [
  { byHours: -1, after: 5 },
  { byHours: -12, after: 6 },
  { byHours: -24, after: 3 },
  { byHours: -72, after: 9 },
  { byHours: -30, after: 9, redelivered: true },
  // The first attempt is late: by the newest event, the clock is set back by less than it is, or not at all.
  { byHours: -72, after: 1, wasDown: true, lateMs: 2_000 },
  { byHours: -14, after: 1, wasDown: true, lateMs: 20 * HOUR_MS },
]) {
  const name = redelivered ? 'a redelivery requested after' : 'a ladder during which';
  const setBack = `the clock was set back by ${-byHours} h${wasDown ? ' while davit was down' : ''}`;
  t.test(`${name} ${setBack} lasts 24 h at most`, async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    const { id: webhookId } = await subscribe(store, receiver.url);
    let dispatcher = testDispatcher(t, store, effects);
    effects.advance(100 * HOUR_MS);
    const [id] = await newDeliveries(store, webhookId, 1);
    if (id === undefined) throw new Error('there is no delivery');
    effects.advance(lateMs);
    let startedAtMs = effects.monotonicMs();
    let lastAtMs = 0;
    for (let requests = 0; ; ) {
      const nextAtMs = await deliverDue(dispatcher, effects);
      const isSent = receiver.requests.length > requests;
      if (isSent) lastAtMs = effects.monotonicMs();
      requests = receiver.requests.length;
      if (nextAtMs === null) break;
      effects.advance(nextAtMs - effects.now());
      if (!isSent || requests !== after) continue;
      effects.jump(byHours * HOUR_MS);
      if (!wasDown) await dispatcher.tick();
      await dispatcher.settled();
      dispatcher = testDispatcher(t, store, effects);
      await dispatcher.settled();
      if (!redelivered) continue;
      await store.writer.write('deliveries.redeliver', { id });
      startedAtMs = effects.monotonicMs();
    }
    const before = redelivered ? after : 0;
    t.equal(receiver.requests.length - before, DEFAULT_SCHEDULE.delaysMs.length + 2);
    const lastedMs = lastAtMs - startedAtMs;
    t.ok(lastedMs >= 22.5 * HOUR_MS && lastedMs <= 24 * HOUR_MS, `${lastedMs / HOUR_MS} h`);
    t.match(store.query('SELECT status FROM deliveries'), [{ status: 'exhausted' }]);
  });
}

for (const { byHours, isOlder = false, wasDown = false } of [
  { byHours: -30 },
  { byHours: -12 },
  { byHours: 12 },
  { byHours: 12, isOlder: true },
  { byHours: -30, wasDown: true },
]) {
  const direction = byHours < 0 ? 'back' : 'ahead';
  const name = `${Math.abs(byHours)} h ${direction}${wasDown ? ' while davit was down' : ''}`;
  const event = `an event from ${isOlder ? 'before' : 'after'} that`;
  t.test(`as it is noticed that the clock was set ${name}, ${event} begins a whole ladder`, async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    const { id } = await subscribe(store, receiver.url);
    let dispatcher = testDispatcher(t, store, effects);
    effects.advance(100 * HOUR_MS);
    await deliverDue(dispatcher, effects);
    if (wasDown) {
      const [former] = await newDeliveries(store, id, 1);
      if (former !== undefined) endDeliveries(store, [former], 'delivered');
    }
    if (isOlder) await newDeliveries(store, id, 1);
    effects.jump(byHours * HOUR_MS);
    effects.advance(20);
    if (!isOlder) await newDeliveries(store, id, 1);
    effects.advance(1);
    if (wasDown) dispatcher = testDispatcher(t, store, effects);
    const startedAtMs = effects.monotonicMs();
    for (;;) {
      const nextAtMs = await deliverDue(dispatcher, effects);
      if (nextAtMs === null) break;
      effects.advance(nextAtMs - effects.now());
    }
    t.equal(receiver.requests.length, DEFAULT_SCHEDULE.delaysMs.length + 2);
    const lastedMs = effects.monotonicMs() - startedAtMs;
    t.ok(lastedMs >= 22.5 * HOUR_MS && lastedMs <= 24 * HOUR_MS, `${lastedMs / HOUR_MS} h`);
  });
}

t.test('Retry-After of a receiver delays the retry', async (t) => {
  const { store, effects, dispatcher } = service(t);
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
    await store.writer.write('webhooks.update', { id, status: 'enabled', disableReason: 'tired' });
    await deliverDue(dispatcher, effects);
    t.match(store.reads.deliveries.get(deliveryId), { status: 'delivered', attempt_count: 3 });
  },
);

t.test('410 from a former url of a webhook does not disable it', async (t) => {
  const { store, effects, dispatcher } = service(t);
  const gone = held(status(410));
  const receiver = await startReceiver(t, { answers: [gone.answer] });
  const elsewhere = await startReceiver(t);
  const { id } = await subscribe(store, receiver.url);
  await newDeliveries(store, id, 1);
  await dispatcher.tick();
  await receiver.next();
  await store.writer.write('webhooks.update', { id, url: elsewhere.url, disableReason: 'tired' });
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
  const { store, dispatcher } = service(t);
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
  await sender.close();
  await dispatcher.settled();
  t.strictSame(store.dump(), before);
});

t.test('a webhook has one attempt under way until it has answered once, then four', async (t) => {
  const { store, dispatcher, wakes } = service(t);
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
  const { store, effects, dispatcher } = service(t);
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
  const { store, effects, dispatcher } = service(t);
  const receiver = await startReceiver(t);
  const elsewhere = await startReceiver(t);
  const moved = await subscribe(store, receiver.url);
  const disabled = await subscribe(store, receiver.url);
  const deleted = await subscribe(store, receiver.url);
  await dispatcher.tick();
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  // The dispatcher has heard of the event, and of nothing else.
  const change = { disableReason: 'tired' };
  await store.writer.write('webhooks.update', { id: moved.id, url: elsewhere.url, ...change });
  await store.writer.write('webhooks.update', { id: disabled.id, status: 'disabled', ...change });
  await store.writer.write('webhooks.remove', { id: deleted.id });

  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 0);
  t.equal(elsewhere.requests.length, 1);
  t.match(store.query('SELECT status, attempt_count FROM deliveries WHERE webhook_id <> ?', moved.id), [
    { status: 'pending', attempt_count: 0 },
    { status: 'pending', attempt_count: 0 },
  ]);

  await store.writer.write('webhooks.update', { id: disabled.id, status: 'enabled', ...change });
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
  const change = { disableReason: 'tired' };
  await store.writer.write('webhooks.update', { id: moved.id, url: elsewhere.url, ...change });
  await store.writer.write('webhooks.update', { id: disabled.id, status: 'disabled', ...change });
  await store.writer.write('webhooks.remove', { id: deleted.id });
  for (const status of ['disabled', 'enabled'] as const) {
    await store.writer.write('webhooks.update', { id: enabledAgain.id, status, ...change });
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
  const { store, effects, dispatcher } = service(t);
  const { id } = await subscribe(store, 'https://example.com/hook');
  await newDeliveries(store, id, 1);
  copyWaiting(store, 1_500, effects.now() + HOUR_MS);
  for (const status of ['disabled', 'enabled'] as const) {
    effects.advance(1_000);
    await store.writer.write('webhooks.update', { id, status, disableReason: 'tired' });
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
    await store.writer.write('webhooks.update', { id, status, disableReason: 'tired' });
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
  const { store, effects, dispatcher } = service(t);
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
      await store.writer.write('webhooks.update', { id: of, status: 'disabled', disableReason: 'tired' });
      await store.writer.write('webhooks.update', { id: of, status: 'enabled', disableReason: 'tired' });
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
      const { store, effects, dispatcher } = service(t);
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
  const { store, effects, dispatcher } = service(t);
  const receiver = await startReceiver(t, { answers: [status(500)] });
  await newDeliveries(store, (await subscribe(store, receiver.url)).id, 1);
  effects.advance(30 * HOUR_MS);
  for (;;) {
    const nextAtMs = await deliverDue(dispatcher, effects);
    if (nextAtMs === null) break;
    effects.advance(nextAtMs - effects.now());
  }
  t.equal(receiver.requests.length, DEFAULT_SCHEDULE.delaysMs.length + 2);
  t.match(store.query('SELECT status FROM deliveries'), [{ status: 'exhausted' }]);
});

t.test('setting the clock back by an hour delays no retry and no event', async (t) => {
  const { store, effects, dispatcher } = service(t);
  const receiver = await startReceiver(t, { answers: [status(500), status(200)] });
  const { id } = await subscribe(store, receiver.url);
  await newDeliveries(store, id, 1);
  await deliverDue(dispatcher, effects);
  await newDeliveries(store, id, 1);

  effects.jump(-HOUR_MS);
  await probe(dispatcher, effects, 3, 50);
  t.equal(receiver.requests.length, 2, 'the event is sent, the retry is not');
  const nextAtMs = await deliverDue(dispatcher, effects);
  t.ok(nextAtMs !== null && nextAtMs > effects.now() && nextAtMs <= effects.now() + 5_500, `${nextAtMs}`);
  effects.advance(5_500);
  await deliverDue(dispatcher, effects);
  t.match(store.query('SELECT status, attempt_count FROM deliveries ORDER BY seq'), [
    { status: 'delivered', attempt_count: 2 },
    { status: 'delivered', attempt_count: 1 },
  ]);
});

t.test('a clock set back by ten hours while davit was down delays no retry and no event', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { answers: [status(500), status(200)] });
  const { id } = await subscribe(store, receiver.url);
  await newDeliveries(store, id, 1);
  await deliverDue(testDispatcher(t, store, effects), effects);
  await newDeliveries(store, id, 1);

  effects.jump(-10 * HOUR_MS);
  const { logger, lines } = keptLog({ level: 'debug', base: null });
  const dispatcher = testDispatcher(t, store, effects, { logger });
  await dispatcher.settled();
  t.match(lines, [{ msg: 'the clock was set back: pending retries are rescheduled', by_ms: 10 * HOUR_MS }]);
  await deliverDue(dispatcher, effects);
  effects.advance(5_500);
  await deliverDue(dispatcher, effects);
  t.match(store.query('SELECT status FROM deliveries'), [{ status: 'delivered' }, { status: 'delivered' }]);

  await testDispatcher(t, store, effects, { logger }).settled();
  t.strictSame(
    lines.filter(({ by_ms }) => by_ms !== undefined).map(({ by_ms }) => by_ms),
    [10 * HOUR_MS],
    'the next start knows of it',
  );
});

t.test(
  'a clock set back while davit ran is heeded at the next start if that was cut off, and not else',
  async (t) => {
    for (const isCutOff of [true, false]) {
      const effects = fakeEffects();
      const store = testStore(t, effects);
      const receiver = await startReceiver(t, { answers: [status(500)] });
      const { id } = await subscribe(store, receiver.url);
      const never = { ...store.writer, write: () => new Promise<never>(() => {}) };
      const dispatcher = testDispatcher(t, store, effects, isCutOff ? { writer: never } : {});
      effects.jump(10 * HOUR_MS);
      await dispatcher.tick();
      await newDeliveries(store, id, 1);
      copyWaiting(store, 300, effects.now() + HOUR_MS);
      effects.jump(-10 * HOUR_MS);
      await dispatcher.tick();
      if (!isCutOff) await dispatcher.settled();

      const { logger, lines } = keptLog({ level: 'debug', base: null });
      await testDispatcher(t, store, effects, { logger }).settled();
      t.strictSame(
        lines.map(({ by_ms }) => by_ms),
        isCutOff ? [10 * HOUR_MS] : [],
      );
      t.match(
        store.query('SELECT max(next_attempt_at) < ? AS isNear FROM deliveries', effects.now() + 2 * HOUR_MS),
        [{ isNear: 1 }],
      );
    }
  },
);

t.test('a clock that was set back and, while davit was down, put right ends no ladder', async (t) => {
  for (const ranMeanwhile of [true, false]) {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    const { id } = await subscribe(store, receiver.url);
    effects.advance(60 * DAY_MS);
    await newDeliveries(store, id, 1);
    const dispatcher = testDispatcher(t, store, effects);
    await deliverDue(dispatcher, effects);
    effects.jump(-30 * HOUR_MS);
    if (ranMeanwhile) await dispatcher.tick();
    await (ranMeanwhile ? dispatcher : testDispatcher(t, store, effects)).settled();
    effects.jump(30 * HOUR_MS);
    effects.advance(6_000);
    await deliverDue(testDispatcher(t, store, effects), effects);
    t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
      { status: 'pending', attempt_count: 2 },
    ]);
  }
});

for (const isDue of [false, true]) {
  const held = isDue ? 'what is due' : 'what waits';
  t.test(`enabling a webhook after the clock was set back begins a new ladder for ${held}`, async (t) => {
    const { store, effects, dispatcher } = service(t);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    const { id } = await subscribe(store, receiver.url);
    const turn = (status: 'disabled' | 'enabled') =>
      store.writer.write('webhooks.update', { id, status, disableReason: 'tired' });
    effects.advance(24 * HOUR_MS);
    await newDeliveries(store, id, 1);
    for (let attempts = 0; attempts < 8; attempts++) {
      const nextAtMs = await deliverDue(dispatcher, effects);
      effects.advance((nextAtMs ?? 0) - effects.now());
    }
    await deliverDue(dispatcher, effects);
    const { length } = receiver.requests;

    effects.jump(-24 * HOUR_MS);
    await deliverDue(dispatcher, effects);
    t.equal(receiver.requests.length, length, 'the retry is hours away');
    await turn('disabled');
    if (isDue) effects.advance(8 * HOUR_MS);
    await turn('enabled');
    effects.advance(5_000);
    await dispatcher.settled();
    await deliverDue(dispatcher, effects);
    t.equal(receiver.requests.length, length + 1);
    t.match(store.query('SELECT ladder_attempts FROM deliveries'), [{ ladder_attempts: 1 }]);
  });
}

t.test('that the clock was set ahead is recorded at once, whatever walk is under way', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t);
  await newDeliveries(store, (await subscribe(store, receiver.url)).id, 1);
  copyWaiting(store, 1, effects.now() + 100 * DAY_MS);
  let walks = 0;
  const write: TestStore['writer']['write'] = (name, input) => {
    if (name !== 'outbox.setBack') return store.writer.write(name, input);
    walks += 1;
    return new Promise<never>(() => {});
  };
  const dispatcher = testDispatcher(t, store, effects, { writer: { ...store.writer, write } });
  await dispatcher.tick();
  await store.writer.write('instance.probe', undefined);
  t.equal(walks, 1, 'for the one beyond the window');
  effects.jump(6 * DAY_MS);
  await dispatcher.tick();
  await store.writer.write('instance.probe', undefined);
  t.match(store.query('SELECT by_ms FROM clock_settings'), [{ by_ms: 6 * DAY_MS }]);
});

for (const [delayed, ...settings] of [
  ['outbox.setBack', -HOUR_MS, 2 * HOUR_MS],
  ['instance.clockWasSet', 2 * HOUR_MS, HOUR_MS],
  ['instance.clockWasSet', 2 * HOUR_MS, -2 * HOUR_MS],
] as const) {
  const name = settings.map((byMs) => byMs / HOUR_MS).join(' and ');
  t.test(
    `that the clock was set by ${name} h is recorded in order, whatever ${delayed} waits for`,
    async (t) => {
      const effects = fakeEffects();
      const store = testStore(t, effects);
      const { promise: freed, resolve: free } = Promise.withResolvers<void>();
      let isFirst = true;
      const write: TestStore['writer']['write'] = async (name, input) => {
        if (isFirst && name === delayed) {
          isFirst = false;
          await freed;
        }
        return store.writer.write(name, input);
      };
      const dispatcher = testDispatcher(t, store, effects, { writer: { ...store.writer, write } });
      for (const byMs of settings) {
        effects.jump(byMs);
        await dispatcher.tick();
      }
      for (let turn = 0; turn < 3; turn++) await store.writer.write('instance.probe', undefined);
      const recorded = () => store.query('SELECT by_ms FROM clock_settings ORDER BY seq');
      t.strictSame(recorded(), []);
      free();
      await dispatcher.settled();
      t.strictSame(
        recorded(),
        settings.map((by_ms) => ({ by_ms })),
      );
    },
  );
}

t.test('setting the clock forward by an hour sends each retry once', async (t) => {
  const { store, effects, dispatcher } = service(t);
  const receiver = await startReceiver(t, { answers: [status(500)] });
  await newDeliveries(store, (await subscribe(store, receiver.url)).id, 5);
  await probe(dispatcher, effects, 5, 50);
  t.equal(receiver.requests.length, 5);

  effects.jump(HOUR_MS);
  await probe(dispatcher, effects, 5, 4_000);
  t.equal(receiver.requests.length, 10);
  const [{ first } = { first: 0 }] = store.query<{ first: number }>(
    'SELECT min(next_attempt_at) AS first FROM deliveries',
  );
  t.ok(first >= effects.now() + 9_000, 'and then waits for the 30 s of the schedule');
});

t.test('setting the clock ahead exhausts no delivery and disables no webhook', async (t) => {
  const { effects, store, dispatcher, receiver, id } = await setAheadAfterFailure(t);
  const nextAtMs = await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 2);
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'pending', attempt_count: 2 },
  ]);
  t.ok((nextAtMs ?? 0) - effects.now() <= 33_000, 'the next one is the next of the schedule');
  t.match(store.reads.webhooks.get(id), { status: 'enabled' });

  effects.advance(1_000);
  effects.jump(-6 * 24 * HOUR_MS);
  await deliverDue(dispatcher, effects);
  effects.advance(25 * HOUR_MS);
  await probe(dispatcher, effects, 2, 5_000);
  t.match(
    store.query('SELECT status FROM deliveries'),
    [{ status: 'exhausted' }],
    'once the clock is right, time counts again',
  );
});

t.test('setting the clock ahead again and again disables no webhook', async (t) => {
  const { effects, store, dispatcher, receiver, id } = await setAheadAfterFailure(t);
  await deliverDue(dispatcher, effects);
  // After three days without an attempt it would count as failing anew.
  for (const days of [6, 2, 2, 2, 2]) {
    effects.advance(1_000);
    effects.jump(days * 24 * HOUR_MS);
    await deliverDue(dispatcher, effects);
  }
  t.equal(receiver.requests.length, 7);
  t.match(store.reads.webhooks.get(id), { status: 'enabled', consecutive_failures: 7 });
});

t.test('three days without an attempt count also after the clock was set ahead before them', async (t) => {
  const { store, effects, id, failAfter } = await failingAtOnce(t);
  effects.jump(100 * DAY_MS);
  for (const days of [0, 4, 2]) await failAfter(days);
  t.match(store.reads.webhooks.get(id), { status: 'enabled', consecutive_failures: 3 });
});

t.test('a clock that was set back and is put right again disables no webhook', async (t) => {
  const { store, effects, id, failAfter } = await failingAtOnce(t);
  effects.jump(-2.5 * DAY_MS);
  for (const days of [0, 1, 1, 0.6]) await failAfter(days);
  effects.jump(2.5 * DAY_MS);
  await failAfter(0.1);
  t.match(store.reads.webhooks.get(id), { status: 'enabled', consecutive_failures: 5 });
});

t.test('a clock that was ahead and is put right during an attempt disables no webhook', async (t) => {
  const { store, effects, dispatcher, receiver, id, failAfter } = await failingAtOnce(t);
  await failAfter(0);
  await receiver.next();
  effects.jump(6 * DAY_MS);
  await failAfter(0.1);
  await receiver.next();
  const third = held(status(500));
  receiver.answerWith(third.answer);
  effects.advance(0.1 * DAY_MS);
  await newDeliveries(store, id, 1);
  await dispatcher.tick();
  await receiver.next();
  effects.jump(-6 * DAY_MS);
  third.release();
  await dispatcher.settled();
  t.match(store.reads.webhooks.get(id), { status: 'enabled', consecutive_failures: 3 });
});

t.test(
  'a clock that is set back and put right during an attempt disables no webhook by another one',
  async (t) => {
    const { store, effects, dispatcher, receiver, id, failAfter } = await failingAtOnce(t);
    await failAfter(0);
    receiver.answerWith(status(200));
    await failAfter(0.1);
    for (let count = 0; count < 2; count++) await receiver.next();
    const [first, second] = [held(status(500)), held(status(500))];
    receiver.answerWith(first.answer, second.answer);
    for (const days of [0, -6]) {
      effects.jump(days * DAY_MS);
      await newDeliveries(store, id, 1);
      await dispatcher.tick();
      await receiver.next();
    }
    effects.jump(6 * DAY_MS);
    const secondIsSettled = new Promise<void>((resolve) => {
      store.writer.onCommit((changes) => changes.has('settled') && resolve());
    });
    second.release();
    await secondIsSettled;
    first.release();
    await dispatcher.settled();
    t.match(store.reads.webhooks.get(id), { status: 'enabled', consecutive_failures: 2 });
  },
);

t.test('a success ends a row of failures also if the clock is put right meanwhile', async (t) => {
  const { store, effects, dispatcher, receiver, id, failAfter } = await failingAtOnce(t);
  await failAfter(0);
  await receiver.next();
  effects.jump(-DAY_MS);
  for (let looks = 0; looks < 2; looks++) await deliverDue(dispatcher, effects);
  effects.advance(1_000);
  const success = held(status(200));
  receiver.answerWith(success.answer);
  await newDeliveries(store, id, 1);
  await dispatcher.tick();
  await receiver.next();
  effects.jump(DAY_MS);
  success.release();
  await dispatcher.settled();
  t.match(store.reads.webhooks.get(id), { consecutive_failures: 0 });
});

/** A webhook whose deliveries fail once each, without a retry. */
async function failingAtOnce(t: Test) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const dispatcher = testDispatcher(t, store, effects, { schedule: { delaysMs: [], windowMs: 0 } });
  const receiver = await startReceiver(t, { answers: [status(500)] });
  const { id } = await subscribe(store, receiver.url);
  const failAfter = async (days: number) => {
    effects.advance(days * DAY_MS);
    await newDeliveries(store, id, 1);
    await deliverDue(dispatcher, effects);
  };
  return { store, effects, dispatcher, receiver, id, failAfter };
}

t.test('after a restart, a clock set ahead still exhausts no delivery and disables no webhook', async (t) => {
  const { effects, store, dispatcher, receiver, id } = await setAheadAfterFailure(t);
  await deliverDue(dispatcher, effects);
  effects.advance(40_000);
  await deliverDue(testDispatcher(t, store, effects), effects);
  t.equal(receiver.requests.length, 3);
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'pending', attempt_count: 3 },
  ]);
  t.match(store.reads.webhooks.get(id), { status: 'enabled' });
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

/** A delivery that failed once, before the clock was set ahead by six days. */
async function setAheadAfterFailure(t: Test) {
  const effects = fakeEffects();
  const rest = service(t, effects);
  const receiver = await startReceiver(t, { answers: [status(500)] });
  const { id } = await subscribe(rest.store, receiver.url);
  await newDeliveries(rest.store, id, 1);
  await deliverDue(rest.dispatcher, effects);
  effects.advance(1_000);
  effects.jump(6 * 24 * HOUR_MS);
  return { ...rest, effects, receiver, id };
}

t.test('a retry that a wrong clock scheduled years ahead is sent after a restart', async (t) => {
  for (const others of [0, 1]) {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const receiver = await startReceiver(t);
    await newDeliveries(store, (await subscribe(store, receiver.url)).id, 1 + others);
    const years = 4 * 365 * 24 * HOUR_MS;
    store.execute(`
      UPDATE deliveries
         SET ladder_attempts = 1, next_attempt_at = next_attempt_at + CASE seq WHEN 1 THEN ${years} ELSE ${HOUR_MS} END`);
    const dispatcher = testDispatcher(t, store, effects);
    await deliverDue(dispatcher, effects);
    await deliverDue(dispatcher, effects);
    t.equal(receiver.requests.length, 1, `${others} that wait for an hour`);
  }
});

t.test('a step of the clock that is too small to be noticed sends no last attempt early', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const schedule = { delaysMs: [], windowMs: 24 * HOUR_MS };
  const dispatcher = testDispatcher(t, store, effects, { schedule });
  const receiver = await startReceiver(t, { answers: [status(500)] });
  const { id } = await subscribe(store, receiver.url);
  await newDeliveries(store, id, 1);
  await deliverDue(dispatcher, effects);
  for (const byMs of [-900, -800, -1_100]) {
    effects.jump(byMs);
    // It looks at all again.
    await store.writer.write('webhooks.update', {
      id,
      url: `${receiver.url}/${byMs}`,
      disableReason: 'tired',
    });
    await deliverDue(dispatcher, effects);
  }
  effects.advance(6_000);
  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 1);
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'pending', attempt_count: 1 },
  ]);
});

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
  await store.writer.write('webhooks.update', { id, url: `${receiver.url}/new`, disableReason: 'tired' });
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

t.test('on a full disk nothing is sent twice, and all is recorded once there is room', async (t) => {
  const { store, effects, dispatcher, wakes } = service(t);
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

function service(t: Test, effects = fakeEffects()) {
  const store = testStore(t, effects);
  const wakes = createWakes();
  return { store, effects, wakes, dispatcher: testDispatcher(t, store, effects, { wake: wakes.wake }) };
}

/** Tells when a dispatcher wants to look again. */
function createWakes() {
  let waiting: (() => void)[] = [];
  return {
    wake() {
      for (const resolve of waiting) resolve();
      waiting = [];
    },
    next: () => new Promise<void>((resolve) => waiting.push(resolve)),
  };
}

/** A receiver that fails is tried again after a while only. */
async function probe(
  dispatcher: Dispatcher,
  effects: FakeEffects,
  times: number,
  everyMs: number,
): Promise<void> {
  for (let time = 0; time < times; time++) {
    await deliverDue(dispatcher, effects);
    effects.advance(everyMs);
  }
}

/** A webhook of a key that sees all projects. */
async function subscribe(store: TestStore, url: string): Promise<WebhookWithSecret> {
  const { keyId } = await store.key();
  return await newWebhook(store, keyId, { url });
}
