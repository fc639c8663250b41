import Stripe from 'stripe';
import t, { type Test } from 'tap';
import { createPinger, type Pinger } from '../../src/deliver/ping.ts';
import { createSender } from '../../src/deliver/send.ts';
import { verify } from '../../src/deliver/sign.ts';
import type { WebhookId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import type { WebhookWithSecret } from '../../src/store/webhooks.ts';
import { newWebhook, testSender, updateWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { startProxy } from '../helpers/proxy.ts';
import { type Answer, CA_PEM, hangUp, held, redirect, startReceiver, status } from '../helpers/receiver.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

t.test('a ping is signed, and the stripe package accepts it', async (t) => {
  const { pinger, webhook, receiver } = await service(t);
  const result = await pinger.ping(webhook.id);
  const { method, headers, body } = await receiver.next();
  const text = body.toString();

  t.equal(method, 'POST');
  t.strictSame(JSON.parse(text), {
    id: headers['webhook-id'],
    type: 'ping',
    created_at: '2026-11-21T08:00:00.000Z',
    data: { webhook_id: webhook.id },
  });
  t.match(headers['webhook-id'], /^evt_/);
  const seconds = Date.parse('2026-11-21T08:00:00Z') / 1000;
  t.match(headers['service-signature'], new RegExp(`^t=${seconds},v1=[0-9a-f]{64}$`));
  t.match(
    new Stripe('sk_test_nothing').webhooks.constructEvent(
      text,
      String(headers['service-signature']),
      webhook.signing_secret,
      undefined,
      undefined,
      seconds * 1000,
    ),
    { type: 'ping' },
  );
  t.match(result, {
    kind: 'attempted',
    attempt: {
      number: 1,
      at: '2026-11-21T08:00:00.000Z',
      status_code: 200,
      error: null,
      duration_ms: Number,
      remote_address: '127.0.0.1',
      response_body: 'pong',
      trigger: 'ping',
    },
  });
});

const OUTCOMES: { name: string; answer: Answer; expected: Record<string, unknown> }[] = [
  { name: 'an error of the receiver', answer: status(503), expected: { status_code: 503 } },
  { name: 'a redirect', answer: redirect('http://127.0.0.1:1/'), expected: { status_code: 302 } },
  { name: '410', answer: status(410), expected: { status_code: 410 } },
  {
    name: 'a hang-up',
    answer: hangUp(),
    expected: { status_code: null, error: 'connection_closed' },
  },
];
for (const { name, answer, expected } of OUTCOMES) {
  t.test(`${name} is reported by a ping and leaves the webhook unchanged`, async (t) => {
    const { store, pinger, webhook, receiver } = await service(t, answer);
    const before = store.dump();
    t.match(await pinger.ping(webhook.id), { kind: 'attempted', attempt: expected });
    t.equal(receiver.requests.length, 1, 'a ping is not retried');
    t.strictSame(store.dump(), before);
  });
}

t.test('a ping is refused every address that a delivery is', async (t) => {
  const { store, webhook, receiver } = await service(t);
  const sender = createSender({ timeoutMs: 10_000, allowHttp: true, allowedCidrs: [] }, realEffects);
  t.teardown(() => sender.close());
  const pinger = createPinger(store.reads, sender, realEffects);
  t.match(await pinger.ping(webhook.id), {
    kind: 'attempted',
    attempt: { status_code: null, error: 'address_refused' },
  });
  t.equal(receiver.connections(), 0);
});

t.test('a disabled webhook can be pinged, a deleted one cannot', async (t) => {
  const { store, pinger, webhook, receiver } = await service(t);
  const { id } = webhook;
  await updateWebhook(store, id, { status: 'disabled' });
  t.match(await pinger.ping(id), { kind: 'attempted', attempt: { status_code: 200 } });
  await store.writer.write('webhooks.remove', { id });
  t.strictSame(await pinger.ping(id), { kind: 'gone' });
  t.equal(receiver.requests.length, 1);
});

t.test('a ping is signed when its connection is made, with the secrets of that moment', async (t) => {
  const { effects, store, id, result, receiver, proxy } = await slowPing(t);
  effects.advance(7_000);
  const { signing_secret: secret } = await store.writer.write('webhooks.rotate', { id, overlapMs: 0 });
  proxy.release();
  t.match(await result, { kind: 'attempted', attempt: { status_code: 200 } });
  const { headers, body } = await receiver.next();
  const header = String(headers['service-signature']);
  const nowSeconds = Math.floor(effects.now() / 1000);
  t.strictSame(verify({ secret, header, body, nowSeconds, toleranceSeconds: 0 }), { ok: true });
});

t.test('a ping is not sent if its webhook was deleted until its connection was made', async (t) => {
  const { store, id, result, receiver, proxy } = await slowPing(t);
  await store.writer.write('webhooks.remove', { id });
  proxy.release();
  t.strictSame(await result, { kind: 'gone' });
  t.equal(receiver.requests.length, 0);
});

t.test('a ping goes to the URL that its webhook has when its connection is made', async (t) => {
  const { effects, store, id, result, receiver, proxy } = await slowPing(t);
  const moved = await startReceiver(t);
  await updateWebhook(store, id, { url: moved.url });
  const { signing_secret: secret } = await store.writer.write('webhooks.rotate', { id, overlapMs: 0 });
  proxy.release();
  t.match(await result, { kind: 'attempted', attempt: { number: 1, status_code: 200 } });
  t.equal(receiver.requests.length, 0);
  const [request] = moved.requests;
  if (request === undefined) throw new Error('it was not sent there');
  const { headers, body } = request;
  const header = String(headers['service-signature']);
  const nowSeconds = Math.floor(effects.now() / 1000);
  t.strictSame(verify({ secret, header, body, nowSeconds, toleranceSeconds: 0 }), { ok: true });
});

t.test('a ping follows each change of the URL until a connection to the present one is made', async (t) => {
  const { store, id, result, receiver, proxy } = await slowPing(t);
  const next = await startProxy(t, receiver.url);
  next.fates('hold');
  const moveTo = (url: string) => updateWebhook(store, id, { url });
  await moveTo(next.url.replace('http:', 'https:'));
  proxy.release();
  await next.connected(1);
  const moved = await startReceiver(t);
  await moveTo(moved.url);
  next.release();
  t.match(await result, { kind: 'attempted', attempt: { number: 1, status_code: 200 } });
  t.strictSame([receiver.requests.length, moved.requests.length], [0, 1]);
});

t.test('a ping is not sent if the key of its webhook is revoked until its connection is made', async (t) => {
  const { store, id, keyId, pinger, result, receiver, proxy } = await slowPing(t);
  await store.writer.write('keys.revoke', { id: keyId });
  proxy.release();
  t.strictSame(await result, { kind: 'gone' });
  t.strictSame(await pinger.ping(id), { kind: 'gone' });
  t.equal(proxy.connections(), 1);
  t.equal(receiver.requests.length, 0);
});

t.test('a ping fails unsent if its webhook cannot be read when its connection is made', async (t) => {
  const { store, result, receiver, proxy } = await slowPing(t);
  store.execute('ALTER TABLE webhook_secrets RENAME TO lost');
  proxy.release();
  await t.rejects(result, /no such table/);
  t.equal(receiver.requests.length, 0);
});

/** A ping whose handshake waits for the `release` of `proxy`. */
async function slowPing(t: Test) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { tls: 'localhost' });
  const proxy = await startProxy(t, receiver.url);
  proxy.fates('hold');
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId, { url: proxy.url.replace('http:', 'https:') });
  const sender = testSender(t, { caPem: CA_PEM });
  const pinger = createPinger(store.reads, sender, effects);
  const result = pinger.ping(id);
  await proxy.connected(1);
  return { effects, store, id, keyId, pinger, result, receiver, proxy };
}

t.test('a third ping of a webhook at the same time is refused, one of another webhook is not', async (t) => {
  const { answer, release } = held(status(200));
  const { store, pinger, webhook, receiver } = await service(t, answer);
  const quick = await startReceiver(t);
  const other = await newWebhook(store, (await store.key()).keyId, { url: quick.url });

  const first = [pinger.ping(webhook.id), pinger.ping(webhook.id)];
  t.strictSame(await pinger.ping(webhook.id), { kind: 'busy' });
  t.match(await pinger.ping(other.id), { kind: 'attempted' });
  await receiver.next();
  await receiver.next();
  release();
  await Promise.all(first);
  t.match(await pinger.ping(webhook.id), { kind: 'attempted' });
  t.equal(receiver.requests.length, 3);
});

t.test('a fifth ping of a key at the same time is refused, those of other keys are not', async (t) => {
  const { answer, release } = held(status(200));
  const { store, pinger, receiver } = await service(t, answer);
  const ofKey = async (count: number) => {
    const { keyId } = await store.key();
    return await Promise.all(
      Array.from({ length: count }, () => newWebhook(store, keyId, { url: receiver.url })),
    );
  };
  const webhooks = [...(await ofKey(5)), ...(await ofKey(1))];
  const pingAll = async () => {
    const results = await Promise.all(webhooks.map(({ id }) => pinger.ping(id)));
    return results.map(({ kind }) => kind);
  };
  const kinds = pingAll();
  for (let count = 0; count < 5; count++) await receiver.next();
  release();
  const four = Array(4).fill('attempted');
  t.strictSame(await kinds, [...four, 'busy', 'attempted']);
  t.strictSame(await pingAll(), [...four, 'busy', 'attempted'], 'those that ended count no more');
});

t.test('a seventeenth ping at the same time is refused, whoever asks', async (t) => {
  const { answer, release } = held(status(200));
  const { store, pinger, receiver } = await service(t, answer);
  const webhooks: WebhookId[] = [];
  for (let count = 0; count < 17; count++) {
    webhooks.push((await newWebhook(store, (await store.key()).keyId, { url: receiver.url })).id);
  }
  const pings = webhooks.map((id) => pinger.ping(id));
  t.strictSame(await pings.pop(), { kind: 'busy' });
  for (const _ of pings) await receiver.next();
  release();
  for (const ping of pings) t.match(await ping, { kind: 'attempted' });
});

async function service(
  t: Test,
  answer: Answer = status(200, { body: 'pong' }),
): Promise<{
  store: TestStore;
  pinger: Pinger;
  webhook: WebhookWithSecret & { id: WebhookId };
  receiver: Awaited<ReturnType<typeof startReceiver>>;
}> {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t, { answers: [answer] });
  const { keyId } = await store.key();
  const webhook = await newWebhook(store, keyId, { url: receiver.url });
  return {
    store,
    pinger: createPinger(store.reads, testSender(t), effects),
    webhook,
    receiver,
  };
}
