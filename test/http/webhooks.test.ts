import { Webhook as StandardWebhook } from 'standardwebhooks';
import Stripe from 'stripe';
import t, { type Test } from 'tap';
import { createPinger } from '../../src/deliver/ping.ts';
import type { KeyId, Webhook, WebhookId } from '../../src/domain.ts';
import { createAnswers } from '../../src/http/answers.ts';
import { createPages } from '../../src/http/pages.ts';
import { webhooks } from '../../src/http/webhooks.ts';
import { LOOPBACK_RULES, newWebhook, testSender } from '../helpers/deliveries.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { call, startHttp, toldBy } from '../helpers/http.ts';
import { held, type Receiver, startReceiver, status } from '../helpers/receiver.ts';
import { forbidden, malformed, missing, type Refusal, testRefusals } from '../helpers/refusals.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

const NEW = { url: 'https://example.com/hook', events: ['deployment.failed'] };

const one = (id: WebhookId) => `/v2/webhooks/${id}`;
const rotate = (id: WebhookId) => `/v2/webhooks/${id}/rotate`;
const ping = (id: WebhookId) => `/v2/webhooks/${id}/ping`;

const REFUSALS: Refusal<WebhookId, 'owner' | 'reader' | 'writer' | 'stranger'>[] = [
  {
    name: 'a list without a key',
    method: 'GET',
    path: () => '/v2/webhooks',
    key: 'nobody',
    expected: { status: 401, code: 'unauthorized' },
  },
  {
    name: 'a list without the scope',
    method: 'GET',
    path: () => '/v2/webhooks',
    key: 'writer',
    expected: forbidden,
  },
  {
    name: 'a list with an unknown parameter',
    method: 'GET',
    path: () => '/v2/webhooks?status=enabled',
    expected: malformed(['status', 'is not allowed']),
  },
  {
    name: 'a list with an invalid cursor',
    method: 'GET',
    path: () => '/v2/webhooks?cursor=abc',
    expected: malformed(['cursor', /begin without one/]),
  },
  {
    name: 'a new webhook without the scope',
    method: 'POST',
    path: () => '/v2/webhooks',
    body: NEW,
    key: 'reader',
    expected: forbidden,
  },
  {
    name: 'a new webhook without events',
    method: 'POST',
    path: () => '/v2/webhooks',
    body: { url: NEW.url },
    expected: malformed(['events', 'required']),
  },
  {
    name: 'a new webhook with a repeated event',
    method: 'POST',
    path: () => '/v2/webhooks',
    body: { ...NEW, events: ['deployment.failed', 'deployment.failed'] },
    expected: malformed(['events.1', 'must not be repeated']),
  },
  {
    name: 'a new webhook with a description that is too long',
    method: 'POST',
    path: () => '/v2/webhooks',
    body: { ...NEW, description: 'x'.repeat(257) },
    expected: malformed(['description', 'must be at most 256 characters']),
  },

  { name: 'a webhook without the scope', method: 'GET', path: one, key: 'writer', expected: forbidden },
  { name: 'a webhook of another key', method: 'GET', path: one, key: 'stranger', expected: missing },
  {
    name: 'an unknown webhook',
    method: 'GET',
    path: () => one('whk_0000000000000000000000' as WebhookId),
    expected: missing,
  },
  { name: 'a malformed webhook id', method: 'GET', path: () => '/v2/webhooks/whk_', expected: missing },

  {
    name: 'a change without the scope',
    method: 'PATCH',
    path: one,
    body: { status: 'disabled' },
    key: 'reader',
    expected: forbidden,
  },
  { name: 'a change without a body', method: 'PATCH', path: one, expected: malformed(['body', 'required']) },
  {
    name: 'a change with an empty body',
    method: 'PATCH',
    path: one,
    body: {},
    expected: malformed(['body', 'must have at least one field']),
  },
  {
    name: 'a change of an unknown field',
    method: 'PATCH',
    path: one,
    body: { secret: 'x' },
    expected: malformed(['secret', 'is not allowed']),
  },
  {
    name: 'a change to a URL of another scheme',
    method: 'PATCH',
    path: one,
    body: { url: 'ftp://example.com/' },
    expected: malformed(['url', /https/]),
  },
  {
    name: 'a change to a URL of a private address',
    method: 'PATCH',
    path: one,
    body: { url: 'https://10.0.0.1/' },
    expected: malformed(['url', /public address/]),
  },
  {
    name: 'a change to no events',
    method: 'PATCH',
    path: one,
    body: { events: [] },
    expected: malformed(['events', /at least 1/]),
  },
  {
    name: 'a change to an unknown event',
    method: 'PATCH',
    path: one,
    body: { events: ['ping'] },
    expected: malformed(['events.0', /must be one of/]),
  },
  {
    name: 'a change to a repeated event',
    method: 'PATCH',
    path: one,
    body: { events: ['deployment.failed', 'deployment.failed'] },
    expected: malformed(['events.1', 'must not be repeated']),
  },
  {
    name: 'a change to an unknown status',
    method: 'PATCH',
    path: one,
    body: { status: 'paused' },
    expected: malformed(['status', 'must be one of enabled, disabled']),
  },
  {
    name: 'a change of another key’s webhook',
    method: 'PATCH',
    path: one,
    body: { status: 'disabled' },
    key: 'stranger',
    expected: missing,
  },
  {
    name: 'an invalid change of another key’s webhook',
    method: 'PATCH',
    path: one,
    body: { status: 1 },
    key: 'stranger',
    expected: malformed(['status', /must be one of/]),
  },

  { name: 'a deletion without the scope', method: 'DELETE', path: one, key: 'reader', expected: forbidden },
  { name: 'a deletion by another key', method: 'DELETE', path: one, key: 'stranger', expected: missing },

  { name: 'a rotation without the scope', method: 'POST', path: rotate, key: 'reader', expected: forbidden },
  {
    name: 'a rotation with too long an overlap',
    method: 'POST',
    path: rotate,
    body: { overlap_seconds: 604_801 },
    expected: malformed(['overlap_seconds', 'must be at most 604800']),
  },
  {
    name: 'a rotation with a negative overlap',
    method: 'POST',
    path: rotate,
    body: { overlap_seconds: -1 },
    expected: malformed(['overlap_seconds', 'must be at least 0']),
  },
  {
    name: 'a rotation with a string as the overlap',
    method: 'POST',
    path: rotate,
    body: { overlap_seconds: '60' },
    expected: malformed(['overlap_seconds', 'must be a whole number']),
  },
  {
    name: 'a rotation with null as the body',
    method: 'POST',
    path: rotate,
    body: null,
    expected: malformed(['body', 'must be an object']),
  },
  { name: 'a rotation by another key', method: 'POST', path: rotate, key: 'stranger', expected: missing },

  {
    name: 'a rotation with a fractional overlap',
    method: 'POST',
    path: rotate,
    body: { overlap_seconds: 1.5 },
    expected: malformed(['overlap_seconds', 'must be a whole number']),
  },
  { name: 'a ping without the scope', method: 'POST', path: ping, key: 'reader', expected: forbidden },
  {
    name: 'a ping with a body',
    method: 'POST',
    path: ping,
    body: { url: 'https://example.com' },
    expected: malformed(['url', 'is not allowed']),
  },
  { name: 'a ping by another key', method: 'POST', path: ping, key: 'stranger', expected: missing },
];

t.test('a rejected request changes nothing in the database and sends nothing', async (t) => {
  const there = await service(t);
  const { id } = await newWebhook(there.store, there.keys.owner.keyId, { url: there.receiver.url });
  await testRefusals(t, REFUSALS, id, there);
  t.equal(there.receiver.requests.length, 0);
});

t.test('another key’s webhook, a deleted one and an unknown one are answered alike', async (t) => {
  const { http, store, keys } = await service(t);
  const foreign = await newWebhook(store, keys.stranger.keyId);
  const deleted = await newWebhook(store, keys.owner.keyId);
  await call(http, 'DELETE', one(deleted.id), keys.owner.secret);
  const ids = [foreign.id, deleted.id, 'whk_0000000000000000000000' as WebhookId];
  for (const [method, suffix] of [
    ['GET', ''],
    ['DELETE', ''],
    ['POST', '/rotate'],
    ['POST', '/ping'],
  ] as const) {
    const answers = [];
    for (const id of ids) answers.push(await call(http, method, `${one(id)}${suffix}`, keys.owner.secret));
    t.equal(new Set(answers.map(toldBy)).size, 1, `${method} ${suffix}`);
    t.equal(answers[0]?.status, 404);
  }
});

t.test('a list shows the caller’s webhooks, newest first, once each, and never a secret', async (t) => {
  const { http, store, keys } = await service(t);
  const ids: WebhookId[] = [];
  for (let count = 0; count < 5; count++) ids.push((await newWebhook(store, keys.owner.keyId)).id);
  await newWebhook(store, keys.stranger.keyId);

  const seen: Webhook[] = [];
  let cursor: string | null = null;
  do {
    const query: string = cursor === null ? '' : `&cursor=${cursor}`;
    const { status, body } = await call(http, 'GET', `/v2/webhooks?limit=2${query}`, keys.owner.secret);
    t.equal(status, 200);
    const page = body as { data: Webhook[]; next_cursor: string | null };
    seen.push(...page.data);
    cursor = page.next_cursor;
    // Registered while the walk goes on: it comes before where the walk began.
    await newWebhook(store, keys.owner.keyId);
  } while (cursor !== null);
  t.strictSame(
    seen.map(({ id }) => id),
    ids.toReversed(),
  );
  t.notMatch(JSON.stringify(seen), /whsec_|secret/);
});

t.test('GET of a webhook shows what its creation answered, without the secret', async (t) => {
  const { http, keys } = await service(t);
  const made = await call(http, 'POST', '/v2/webhooks', keys.owner.secret, { ...NEW, description: 'mine' });
  const { signing_secret, ...webhook } = made.body as Webhook & { signing_secret: string };
  t.match(signing_secret, /^whsec_[A-Za-z0-9+/]{43}=$/);
  const { status, body } = await call(http, 'GET', made.headers.get('location') ?? '', keys.owner.secret);
  t.equal(status, 200);
  t.strictSame(body, webhook);
  t.strictSame(Object.keys(webhook), [
    'id',
    'url',
    'events',
    'description',
    'status',
    'status_reason',
    'created_at',
    'last_success_at',
    'last_failure_at',
    'consecutive_failures',
  ]);
});

const CHANGES: { body: Record<string, unknown>; expected: Partial<Webhook> }[] = [
  { body: { url: 'HTTPS://Example.COM:443/a/../b' }, expected: { url: 'https://example.com/b' } },
  { body: { url: 'https://example.com/a|b?{x}' }, expected: { url: 'https://example.com/a|b?{x}' } },
  { body: { url: 'https://example.com/%zz' }, expected: { url: 'https://example.com/%zz' } },
  {
    body: { events: ['deployment.started', 'deployment.created'] },
    expected: { events: ['deployment.started', 'deployment.created'] },
  },
  { body: { description: 'the status page' }, expected: { description: 'the status page' } },
  { body: { description: null }, expected: { description: null } },
  {
    body: { status: 'disabled' },
    expected: { status: 'disabled', status_reason: 'disabled through the API' },
  },
  { body: { status: 'enabled' }, expected: { status: 'enabled', status_reason: null } },
  { body: { description: '' }, expected: { description: '' } },
];

t.test('PATCH answers with the changed webhook, as a GET shows it from then on', async (t) => {
  const { http, store, keys } = await service(t);
  const { signing_secret: _, ...made } = await newWebhook(store, keys.owner.keyId);
  let expected: Webhook = made;
  for (const change of CHANGES) {
    expected = { ...expected, ...change.expected };
    const { status, body } = await call(http, 'PATCH', one(made.id), keys.owner.secret, change.body);
    t.equal(status, 200);
    t.strictSame(body, expected, JSON.stringify(change.body));
    t.strictSame((await call(http, 'GET', one(made.id), keys.owner.secret)).body, expected);
  }
});

t.test('a deletion answers 204 without a body, also if repeated with its Idempotency-Key', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  const first = await call(http, 'DELETE', one(id), keys.owner.secret, undefined, 'once');
  t.strictSame([first.status, first.body, first.headers.get('content-type')], [204, null, null]);
  store.execute(`DELETE FROM webhooks WHERE id = '${id}'`); // as retention does
  const repeat = await call(http, 'DELETE', one(id), keys.owner.secret, undefined, 'once');
  t.strictSame([repeat.status, repeat.body, repeat.headers.get('idempotent-replayed')], [204, null, 'true']);
  t.equal((await call(http, 'DELETE', one(id), keys.owner.secret)).status, 404);
  t.equal((await call(http, 'DELETE', one(id), keys.stranger.secret, undefined, 'once')).status, 404);
});

t.test('a write that is repeated after its webhook was deleted gets the first answer', async (t) => {
  const { http, store, receiver, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  receiver.answerWith(status(200));
  const write = (method: string, path: string, body?: object, key = path) =>
    call(http, method, path, keys.owner.secret, body, key);
  const writes = [
    () => write('PATCH', one(id), { description: 'new' }),
    () => write('POST', rotate(id)),
    () => write('POST', ping(id)),
  ];
  const answers = [];
  for (const repeatable of writes) answers.push(await repeatable());
  t.equal((await call(http, 'DELETE', one(id), keys.owner.secret)).status, 204);
  const before = store.dump();
  for (const [index, repeatable] of writes.entries()) {
    const { status, body, headers } = await repeatable();
    t.equal(headers.get('idempotent-replayed'), 'true');
    t.strictSame({ status, body }, { status: answers[index]?.status, body: answers[index]?.body });
  }
  t.equal((await write('POST', ping(id), undefined, 'another')).status, 404);
  t.equal((await write('POST', rotate(id), undefined, ping(id))).status, 404, 'not 422: it is gone');
  t.strictSame(store.dump(), before);
  t.equal((await call(http, 'POST', ping(id), keys.stranger.secret, undefined, ping(id))).status, 404);
  t.equal(receiver.requests.length, 1);
});

t.test('a rotation repeated with its Idempotency-Key is done once and answered alike', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  const rotations = await Promise.all(
    Array.from({ length: 5 }, () => call(http, 'POST', rotate(id), keys.owner.secret, undefined, 'rotate')),
  );
  t.equal(new Set(rotations.map(({ body }) => JSON.stringify(body))).size, 1);
  t.equal(rotations.filter(({ headers }) => headers.get('idempotent-replayed') === 'true').length, 4);
  t.equal(store.query('SELECT * FROM webhook_secrets').length, 2);

  const before = store.dump();
  const other = await call(http, 'POST', rotate(id), keys.owner.secret, { overlap_seconds: 5 }, 'rotate');
  t.match(other, { status: 422, body: { error: { code: 'idempotency_key_reused' } } });
  const patch = await call(http, 'PATCH', one(id), keys.owner.secret, { status: 'disabled' }, 'rotate');
  t.equal(patch.status, 422);
  t.strictSame(store.dump(), before);
  for (const theDefault of [{ overlap_seconds: 86_400 }, {}]) {
    const { headers } = await call(http, 'POST', rotate(id), keys.owner.secret, theDefault, 'rotate');
    t.equal(
      headers.get('idempotent-replayed'),
      'true',
      'a request that states the default is the same request',
    );
  }
});

t.test(
  'after a rotation a ping verifies with both secrets, and only with the new one after the overlap',
  async (t) => {
    const effects = fakeEffects(Date.now());
    const { http, store, receiver, keys } = await service(t, effects);
    const { id, signing_secret: old } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
    const rotation = await call(http, 'POST', rotate(id), keys.owner.secret);
    t.match(rotation, { status: 200, body: { id, signing_secret: /^whsec_/ } });
    const { signing_secret: fresh } = rotation.body as { signing_secret: string };

    t.strictSame(await verifiedBy(http, id, keys.owner.secret, receiver, [old, fresh]), [true, true]);
    effects.advance(86_400_000 - 1);
    t.strictSame(await verifiedBy(http, id, keys.owner.secret, receiver, [old, fresh]), [true, true]);
    effects.advance(1);
    t.strictSame(await verifiedBy(http, id, keys.owner.secret, receiver, [old, fresh]), [false, true]);

    const early = await call(http, 'POST', rotate(id), keys.owner.secret, { overlap_seconds: 0 });
    const { signing_secret: last } = early.body as { signing_secret: string };
    t.strictSame(await verifiedBy(http, id, keys.owner.secret, receiver, [fresh, last]), [false, true]);
  },
);

t.test('a ping is answered 200 with its attempt, whatever the receiver answered', async (t) => {
  const { http, store, receiver, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  receiver.answerWith(status(500, { body: 'no' }), status(204));
  t.match(await call(http, 'POST', ping(id), keys.owner.secret), {
    status: 200,
    body: {
      number: 1,
      status_code: 500,
      error: null,
      response_body: 'no',
      trigger: 'ping',
      duration_ms: Number,
    },
  });
  t.match(await call(http, 'POST', ping(id), keys.owner.secret), { status: 200, body: { status_code: 204 } });
  t.strictSame(store.query('SELECT * FROM attempts'), []);
  t.match(store.query('SELECT last_failure_at, last_success_at, consecutive_failures FROM webhooks'), [
    { last_failure_at: null, last_success_at: null, consecutive_failures: 0 },
  ]);
});

t.test('a ping without an Idempotency-Key is answered also while nothing can be written', async (t) => {
  const { http, store, receiver, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  t.capture(store.writer, 'write', () => Promise.reject(new Error('the disk is full')));
  t.match(await call(http, 'POST', ping(id), keys.owner.secret), { status: 200, body: { status_code: 200 } });
});

t.test('a ping repeated with its Idempotency-Key is sent once, also while it is under way', async (t) => {
  const { http, store, receiver, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const other = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const { answer, release } = held(status(200));
  receiver.answerWith(answer);
  const pings = Array.from({ length: 5 }, () =>
    call(http, 'POST', ping(id), keys.owner.secret, undefined, 'p'),
  );
  await receiver.next();
  const another = call(http, 'POST', ping(id), keys.owner.secret, undefined, 'another');
  await receiver.next(); // before the webhook is deleted
  const reused = await call(http, 'POST', ping(other.id), keys.owner.secret, undefined, 'p');
  t.equal(reused.status, 422, 'another request with the Idempotency-Key of a ping under way');
  await store.writer.write('webhooks.remove', { id });
  pings.push(call(http, 'POST', ping(id), keys.owner.secret, undefined, 'p'));
  const late = await call(http, 'POST', ping(id), keys.owner.secret, undefined, 'late');
  t.equal(late.status, 404, 'only repeats are answered once the webhook is deleted');
  release();
  t.notOk((await another).headers.has('idempotent-replayed'));
  const answers = [
    ...(await Promise.all(pings)),
    await call(http, 'POST', ping(id), keys.owner.secret, undefined, 'p'),
  ];
  t.equal(new Set(answers.map(({ body }) => JSON.stringify(body))).size, 1);
  t.equal(answers.filter(({ headers }) => headers.get('idempotent-replayed') === null).length, 1);
  t.equal(receiver.requests.length, 2, 'one for the repeated ping, one for the other');
  t.equal((await call(http, 'POST', ping(other.id), keys.owner.secret, undefined, 'p')).status, 422);
});

t.test('a ping whose key is revoked while its answer is awaited is answered 401', async (t) => {
  const { http, store, receiver, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const { answer, release } = held(status(200, { body: 'pong' }));
  receiver.answerWith(answer);
  const pings = [undefined, 'p'].map((key) =>
    call(http, 'POST', ping(id), keys.owner.secret, undefined, key),
  );
  for (const _ of pings) await receiver.next();
  await store.writer.write('keys.revoke', { id: keys.owner.keyId });
  release();
  for (const answered of await Promise.all(pings)) {
    t.match(answered, { status: 401, body: { error: { code: 'unauthorized' } } });
  }
  t.strictSame(store.query('SELECT * FROM idempotency_keys'), []);
});

t.test('too many pings at once are answered 429, which is not replayed', async (t) => {
  const { http, store, receiver, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const { answer, release } = held(status(200));
  receiver.answerWith(answer);
  const first = [
    call(http, 'POST', ping(id), keys.owner.secret),
    call(http, 'POST', ping(id), keys.owner.secret),
  ];
  await receiver.next();
  await receiver.next();
  const refused = await call(http, 'POST', ping(id), keys.owner.secret, undefined, 'again');
  t.match(refused, { status: 429, body: { error: { code: 'rate_limited' } } });
  t.equal(refused.headers.get('retry-after'), '8', 'as long as an attempt may take');
  release();
  await Promise.all(first);
  t.equal((await call(http, 'POST', ping(id), keys.owner.secret, undefined, 'again')).status, 200);
  t.equal(receiver.requests.length, 3);
});

interface TestKey {
  keyId: KeyId;
  secret: string;
}

async function service(t: Test, effects: FakeEffects = fakeEffects()) {
  const store = testStore(t, effects);
  const receiver = await startReceiver(t);
  const { port } = await startHttp(t, {
    store,
    effects,
    resources: () => [
      webhooks(
        store.reads,
        createAnswers(store.writer),
        createPages(store.reads.instance.cursorSecret(), effects),
        LOOPBACK_RULES,
        createPinger(store.reads, testSender(t), effects).ping,
        7_500,
      ),
    ],
  });
  const keys: Record<'owner' | 'reader' | 'writer' | 'stranger', TestKey> = {
    owner: await store.key({ scopes: ['webhooks:read', 'webhooks:write'] }),
    reader: await store.key({ scopes: ['webhooks:read'] }),
    writer: await store.key({ scopes: ['webhooks:write'] }),
    stranger: await store.key(),
  };
  return { http: port, store, receiver, keys } satisfies { store: TestStore } & Record<string, unknown>;
}

/** Which of the secrets make two independent libraries accept a ping that is sent now. */
async function verifiedBy(
  port: number,
  id: WebhookId,
  key: string,
  receiver: Receiver,
  secrets: string[],
): Promise<boolean[]> {
  await call(port, 'POST', ping(id), key);
  const { headers, body } = await receiver.next();
  const atMs = Number(headers['webhook-timestamp']) * 1000;
  return secrets.map((secret) => {
    const standard = accepts(() =>
      // It knows no other clock than the machine's: the time is given back to it.
      new StandardWebhook(secret).sign(String(headers['webhook-id']), new Date(atMs), body.toString()),
    );
    const inHeader = String(headers['webhook-signature']).split(' ').includes(String(standard));
    const byStripe = accepts(() =>
      new Stripe('sk_test_nothing').webhooks.constructEvent(
        body.toString(),
        String(headers['service-signature']),
        secret,
        undefined,
        undefined,
        atMs,
      ),
    );
    if (inHeader !== (byStripe !== undefined)) throw new Error('the two signatures do not agree');
    return inHeader;
  });
}

function accepts<Value>(verify: () => Value): Value | undefined {
  try {
    return verify();
  } catch {
    return undefined;
  }
}
