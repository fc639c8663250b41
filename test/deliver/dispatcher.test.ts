import { pino } from 'pino';
import { Webhook as StandardWebhook } from 'standardwebhooks';
import Stripe from 'stripe';
import t, { type Test } from 'tap';
import { parseCidr } from '../../src/address.ts';
import { createDispatcher, type Dispatcher } from '../../src/deliver/dispatcher.ts';
import { RETRY_SCHEDULE } from '../../src/deliver/retry.ts';
import { createSender } from '../../src/deliver/send.ts';
import type { EventType } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { redirect, startReceiver, status } from '../helpers/receiver.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

t.test('an event arrives signed, and stripe and standardwebhooks both accept it as it came', async (t) => {
  const { store, dispatcher } = service(t, fakeEffects(Date.now()));
  const receiver = await startReceiver(t);
  const secret = await subscribe(store, receiver.url);
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
  t.match(store.query('SELECT status, attempt_count, next_attempt_at FROM deliveries'), [
    { status: 'delivered', attempt_count: 1, next_attempt_at: null },
  ]);
});

t.test('what fails is retried on the schedule, with the same bytes and a fresh signature', async (t) => {
  const effects = fakeEffects();
  const { store, dispatcher } = service(t, effects);
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
  'a delivery that never succeeds ends as exhausted, with its last attempt 24 h after the event',
  async (t) => {
    const effects = fakeEffects();
    const { store, dispatcher } = service(t, effects);
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
    t.equal(receiver.requests.length, RETRY_SCHEDULE.delaysMs.length + 2);
    t.equal(lastAtMs - startedAtMs, 24 * 60 * 60_000);
    t.match(store.query('SELECT status FROM deliveries'), [{ status: 'exhausted' }]);
  },
);

t.test('410 disables the webhook and says why', async (t) => {
  const { store, dispatcher } = service(t, fakeEffects());
  const receiver = await startReceiver(t, { answers: [status(410)] });
  await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await dispatcher.tick();
  await dispatcher.settled();
  t.match(store.query('SELECT status, status_reason FROM webhooks'), [
    { status: 'disabled', status_reason: /410/ },
  ]);
});

t.test('a redirect is a failure, and the second URL was never visited', async (t) => {
  const { store, dispatcher } = service(t, fakeEffects());
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

t.test('what was under way when the service died is sent again after a restart', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { answers: [() => {}, status(200)] });
  await subscribe(store, receiver.url);
  await store.writer.write('deployments.create', newDeployment(await store.project()));

  await dispatcherOn(t, store, effects).tick();
  await receiver.next();
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'pending', attempt_count: 0 },
  ]);

  const restarted = dispatcherOn(t, store, effects);
  await restarted.tick();
  await restarted.settled();
  t.equal(receiver.requests.length, 2);
  t.match(store.query('SELECT status FROM deliveries'), [{ status: 'delivered' }]);
});

t.test('one webhook has at most four attempts under way, and another is not held up by it', async (t) => {
  const effects = fakeEffects();
  const { store, dispatcher } = service(t, effects);
  const silent = await startReceiver(t, { answers: [() => {}] });
  const quick = await startReceiver(t);
  await subscribe(store, silent.url);
  const projectId = await store.project();
  for (let count = 0; count < 10; count++) {
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  await subscribe(store, quick.url);
  await store.writer.write('deployments.create', newDeployment(projectId));

  await dispatcher.tick();
  await quick.next();
  for (let count = 0; count < 4; count++) await silent.next();
  await dispatcher.tick();
  t.equal(silent.requests.length, 4);
});

function service(t: Test, effects: FakeEffects): { store: TestStore; dispatcher: Dispatcher } {
  const store = testStore(t, effects);
  return { store, dispatcher: dispatcherOn(t, store, effects) };
}

function dispatcherOn(t: Test, store: TestStore, effects: FakeEffects): Dispatcher {
  const loopback = parseCidr('127.0.0.0/8');
  if (!loopback.ok) throw new Error(loopback.reason);
  const sender = createSender(
    { version: 'test', allowHttp: true, allowedCidrs: [loopback.cidr] },
    realEffects,
  );
  t.teardown(sender.close);
  return createDispatcher({
    reads: store.reads,
    writer: store.writer,
    sender,
    schedule: RETRY_SCHEDULE,
    effects,
    logger: pino({ level: 'silent' }),
  });
}

/** A webhook of a key that sees all projects; gives its signing secret. */
async function subscribe(
  store: TestStore,
  url: string,
  events: EventType[] = ['deployment.created'],
): Promise<string> {
  const { keyId } = await store.key();
  const webhook = await store.writer.write('webhooks.create', { keyId, url, events, description: null });
  return webhook.signing_secret;
}
