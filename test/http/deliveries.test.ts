import t, { type Test } from 'tap';
import { createReplayer } from '../../src/deliver/replays.ts';
import type { Delivery, DeliveryId, KeyId, Page, WebhookId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { createAnswers } from '../../src/http/answers.ts';
import { deliveries } from '../../src/http/deliveries.ts';
import { createPages } from '../../src/http/pages.ts';
import { inSpareTurn } from '../../src/turns.ts';
import {
  copyDeliveries,
  endDeliveries,
  newDeliveries,
  newWebhook,
  updateWebhook,
} from '../helpers/deliveries.ts';
import { deliverDue, testDispatcher } from '../helpers/dispatcher.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { call, startHttp } from '../helpers/http.ts';
import { startReceiver, status } from '../helpers/receiver.ts';
import { forbidden, malformed, missing, type Refusal, testRefusals } from '../helpers/refusals.ts';
import { pruneAll } from '../helpers/retention.ts';
import { none, testStore } from '../helpers/store.ts';

const list = ({ webhook }: Place) => `/v2/webhooks/${webhook}/deliveries`;
const one = ({ delivery }: Place) => `/v2/deliveries/${delivery}`;
const redeliver = ({ delivery }: Place) => `/v2/deliveries/${delivery}/redeliver`;
const replay = ({ webhook }: Place) => `/v2/webhooks/${webhook}/replay`;
const SINCE = '2026-11-21T00:00:00Z';
const NOWHERE = { webhook: 'whk_0000000000000000000000', delivery: 'dlv_0000000000000000000000' } as Place;

interface Place {
  webhook: WebhookId;
  delivery: DeliveryId;
}

const REFUSALS: Refusal<Place, 'owner' | 'reader' | 'unscoped' | 'stranger'>[] = [
  {
    name: 'a list without a key',
    method: 'GET',
    path: list,
    key: 'nobody',
    expected: { status: 401, code: 'unauthorized' },
  },
  { name: 'a list without the scope', method: 'GET', path: list, key: 'unscoped', expected: forbidden },
  { name: 'a list of another key’s webhook', method: 'GET', path: list, key: 'stranger', expected: missing },
  { name: 'a list of an unknown webhook', method: 'GET', path: () => list(NOWHERE), expected: missing },
  {
    name: 'a list with an unknown status',
    method: 'GET',
    path: (place) => `${list(place)}?status=failed`,
    expected: malformed(['status', 'must be one of pending, delivered, exhausted, held']),
  },
  {
    name: 'a list with a valid and an empty status',
    method: 'GET',
    path: (place) => `${list(place)}?status=held&status=`,
    expected: malformed(['status', /must be one of/]),
  },
  {
    name: 'a list with an unknown event type',
    method: 'GET',
    path: (place) => `${list(place)}?event_type=ping`,
    expected: malformed(['event_type', /must be one of/]),
  },
  {
    name: 'a list with a date in place of a time',
    method: 'GET',
    path: (place) => `${list(place)}?created_after=2026-11-21`,
    expected: malformed(['created_after', /must be a time/]),
  },
  {
    name: 'a list with a repeated created_before',
    method: 'GET',
    path: (place) => `${list(place)}?created_before=${SINCE}&created_before=${SINCE}`,
    expected: malformed(['created_before', 'must not be repeated']),
  },
  {
    name: 'a list with an unknown parameter',
    method: 'GET',
    path: (place) => `${list(place)}?type=x`,
    expected: malformed(['type', 'is not allowed']),
  },
  {
    name: 'a list of an unknown webhook with an invalid cursor',
    method: 'GET',
    path: () => `${list(NOWHERE)}?cursor=abc`,
    expected: malformed(['cursor', /begin without one/]),
  },
  {
    name: 'a list of a malformed webhook id with an invalid cursor',
    method: 'GET',
    path: () => '/v2/webhooks/1/deliveries?cursor=abc',
    expected: malformed(['cursor', /begin without one/]),
  },
  {
    name: 'a list of another key’s webhook with an invalid limit',
    method: 'GET',
    path: (place) => `${list(place)}?limit=0`,
    key: 'stranger',
    expected: malformed(['limit', /from 1 to 200/]),
  },

  { name: 'a delivery without the scope', method: 'GET', path: one, key: 'unscoped', expected: forbidden },
  {
    name: 'a delivery of another key’s webhook',
    method: 'GET',
    path: one,
    key: 'stranger',
    expected: missing,
  },
  { name: 'an unknown delivery', method: 'GET', path: () => one(NOWHERE), expected: missing },
  { name: 'a malformed delivery id', method: 'GET', path: () => '/v2/deliveries/1', expected: missing },

  {
    name: 'a redelivery without the scope',
    method: 'POST',
    path: redeliver,
    key: 'reader',
    expected: forbidden,
  },
  {
    name: 'a redelivery by another key',
    method: 'POST',
    path: redeliver,
    key: 'stranger',
    expected: missing,
  },
  {
    name: 'a redelivery with a body',
    method: 'POST',
    path: redeliver,
    body: { url: 'https://example.com/' },
    expected: malformed(['url', 'is not allowed']),
  },

  {
    name: 'a replay without the scope',
    method: 'POST',
    path: replay,
    body: { since: SINCE },
    key: 'reader',
    expected: forbidden,
  },
  {
    name: 'a replay by another key',
    method: 'POST',
    path: replay,
    body: { since: SINCE },
    key: 'stranger',
    expected: missing,
  },
  {
    name: 'a replay without a body',
    method: 'POST',
    path: replay,
    expected: malformed(['body', 'required']),
  },
  {
    name: 'a replay without since',
    method: 'POST',
    path: replay,
    body: {},
    expected: malformed(['since', 'required']),
  },
  {
    name: 'a replay that ends before it begins',
    method: 'POST',
    path: replay,
    body: { since: SINCE, until: '2026-11-20T23:59:59.999Z' },
    expected: malformed(['until', /^must not be before since, /]),
  },
  {
    name: 'a replay of a moment within a millisecond',
    method: 'POST',
    path: replay,
    body: { since: '2026-11-21T00:00:00.0005Z', until: '2026-11-21T00:00:00.0005Z' },
    expected: malformed([
      'until',
      'must not be before since, once since is rounded up to a millisecond and until down',
    ]),
  },
  {
    name: 'a replay that begins in the future',
    method: 'POST',
    path: replay,
    body: { since: '2026-11-21T08:00:00.001Z' },
    expected: malformed(['since', 'must not be in the future']),
  },
  {
    name: 'a replay that begins and ends in the future',
    method: 'POST',
    path: replay,
    body: { since: '2099-01-01T00:00:00Z', until: '2099-01-02T00:00:00Z' },
    expected: malformed(['since', 'must not be in the future']),
  },
  {
    name: 'a replay since a time that is in the year 10000 in UTC',
    method: 'POST',
    path: replay,
    body: { since: '9999-12-31T23:59:59-01:00' },
    expected: malformed(['since', /must be a time/]),
  },
  {
    name: 'a replay since a number',
    method: 'POST',
    path: replay,
    body: { since: 0 },
    expected: malformed(['since', /must be a string|must be a time/]),
  },
  {
    name: 'a replay of an unknown status',
    method: 'POST',
    path: replay,
    body: { since: SINCE, status: 'failed' },
    expected: malformed(['status', /must be one of/]),
  },
  {
    name: 'a replay of several statuses',
    method: 'POST',
    path: replay,
    body: { since: SINCE, status: ['exhausted'] },
    expected: malformed(['status', /must be one of/]),
  },
  {
    name: 'a replay without since by another key',
    method: 'POST',
    path: replay,
    body: {},
    key: 'stranger',
    expected: malformed(['since', 'required']),
  },
];

t.test('a rejected request changes nothing in the database', async (t) => {
  const there = await service(t);
  const { id: webhook } = await newWebhook(there.store, there.keys.owner.keyId);
  const [delivery = none()] = await newDeliveries(there.store, webhook, 1);
  endDeliveries(there.store, [delivery], 'exhausted');
  await testRefusals(t, REFUSALS, { webhook, delivery }, there);
});

t.test('paging yields every delivery of a webhook exactly once, newest first', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  const ids = await newDeliveries(store, id, 7);
  const other = await newWebhook(store, keys.owner.keyId);
  await newDeliveries(store, other.id, 1);

  const seen: DeliveryId[] = [];
  for (let cursor: string | null = ''; cursor !== null; ) {
    const query: string = cursor === '' ? '' : `&cursor=${cursor}`;
    const { body } = await call(
      http,
      'GET',
      `/v2/webhooks/${id}/deliveries?limit=3${query}`,
      keys.owner.secret,
    );
    const page = body as Page<Delivery>;
    seen.push(...page.data.map((delivery) => delivery.id));
    cursor = page.next_cursor;
  }
  // The first is of the deployment made for the other webhook: its event is delivered to both.
  t.strictSame(seen.slice(1), ids.toReversed());
  t.equal(new Set(seen).size, 8);
});

t.test('a list is filtered by status, event type and time of creation', async (t) => {
  const { http, store, effects, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  const created: DeliveryId[] = [];
  for (let minute = 0; minute < 4; minute++) {
    created.push(...(await newDeliveries(store, id, 1)));
    effects.advance(60_000);
  }
  const [first = none(), second = none(), third = none(), fourth = none()] = created;
  endDeliveries(store, [first], 'delivered');
  endDeliveries(store, [second], 'exhausted');

  const cases: [query: string, expected: DeliveryId[]][] = [
    ['', [fourth, third, second, first]],
    ['status=delivered', [first]],
    ['status=delivered&status=exhausted', [second, first]],
    ['status=pending', [fourth, third]],
    ['status=held', []],
    ['event_type=deployment.created', [fourth, third, second, first]],
    ['event_type=deployment.failed&event_type=deployment.canceled', []],
    ['created_after=2026-11-21T08:01:00Z', [fourth, third]],
    ['created_before=2026-11-21T09:01:00%2B01:00', [first]],
    ['created_before=2026-11-21T08:00:00.0005Z', [first]],
    ['created_after=2026-11-21T08:00:00Z&created_before=2026-11-21T08:03:00Z&status=pending', [third]],
  ];
  for (const [query, expected] of cases) {
    const { status, body } = await call(
      http,
      'GET',
      `/v2/webhooks/${id}/deliveries?${query}`,
      keys.owner.secret,
    );
    t.equal(status, 200);
    t.strictSame(
      (body as Page<Delivery>).data.map((delivery) => delivery.id),
      expected,
      query,
    );
  }

  store.execute("UPDATE webhooks SET status = 'disabled'");
  const held = await call(http, 'GET', `/v2/webhooks/${id}/deliveries?status=held`, keys.owner.secret);
  t.match((held.body as Page<Delivery>).data, [
    { id: fourth, status: 'held', next_attempt_at: null },
    { id: third, status: 'held', next_attempt_at: null },
  ]);
  const pending = await call(http, 'GET', `/v2/webhooks/${id}/deliveries?status=pending`, keys.owner.secret);
  t.strictSame((pending.body as Page<Delivery>).data, []);
});

t.test(
  'a cursor is valid only for its own webhook and its own filters, in whatever order these come',
  async (t) => {
    const { http, store, keys } = await service(t);
    const { id } = await newWebhook(store, keys.owner.keyId);
    const other = await newWebhook(store, keys.owner.keyId);
    await newDeliveries(store, id, 3);
    const path = `/v2/webhooks/${id}/deliveries`;
    const { body } = await call(http, 'GET', `${path}?limit=1&status=pending&status=held`, keys.owner.secret);
    const { next_cursor: cursor } = body as Page<Delivery>;
    const statusOf = async (place: string) => (await call(http, 'GET', place, keys.owner.secret)).status;

    t.equal(await statusOf(`${path}?status=held&status=pending&cursor=${cursor}`), 200);
    t.equal(await statusOf(`${path}?status=pending&cursor=${cursor}`), 400);
    t.equal(await statusOf(`${path}?cursor=${cursor}`), 400);
    t.equal(
      await statusOf(`${path}?status=held&status=pending&created_after=${SINCE}&cursor=${cursor}`),
      400,
    );
    t.equal(
      await statusOf(`/v2/webhooks/${other.id}/deliveries?status=held&status=pending&cursor=${cursor}`),
      400,
    );
    t.equal(await statusOf(`${path}?status=held&status=pending&cursor=${cursor}x`), 400);

    const [created, started] = ['event_type=deployment.created', 'event_type=deployment.started'];
    const ofTypes = await call(http, 'GET', `${path}?limit=1&${started}&${created}`, keys.owner.secret);
    const { next_cursor: next } = ofTypes.body as Page<Delivery>;
    t.not(next, null);
    t.equal(await statusOf(`${path}?${created}&${started}&cursor=${next}`), 200);
    t.equal(await statusOf(`${path}?${created}&cursor=${next}`), 400);
  },
);

t.test('GET of a delivery shows the payload as it was sent and the result of each attempt', async (t) => {
  const { http, store, effects, keys, deliver } = await service(t);
  const receiver = await startReceiver(t, {
    answers: [status(500, { body: 'no' }), status(200, { body: 'yes' })],
  });
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const [delivery = none()] = await newDeliveries(store, id, 1);
  await deliver();
  effects.advance(6_000);
  await deliver();

  const { status: code, body } = await call(http, 'GET', `/v2/deliveries/${delivery}`, keys.owner.secret);
  t.equal(code, 200);
  t.match(body, {
    id: delivery,
    webhook_id: id,
    event_type: 'deployment.created',
    status: 'delivered',
    attempt_count: 2,
    next_attempt_at: null,
    attempts: [
      { number: 1, status_code: 500, response_body: 'no', trigger: 'schedule', remote_address: '127.0.0.1' },
      { number: 2, status_code: 200, response_body: 'yes', trigger: 'schedule' },
    ],
  });
  const { payload } = body as { payload: unknown };
  t.equal(JSON.stringify(payload), receiver.requests[0]?.body.toString());
});

t.test('other requests are answered while many deliveries are read with all their attempts', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  const [large = none(), small = none()] = await newDeliveries(store, id, 2);
  store.execute(`UPDATE deliveries SET attempt_count = 21 WHERE id = '${large}'`);
  // As many others that were requested before.
  const before = Array.from({ length: 100 }, () => inSpareTurn(() => realEffects.block(2), keys.owner.keyId));
  const get = (delivery: DeliveryId) => call(http, 'GET', `/v2/deliveries/${delivery}`, keys.owner.secret);
  let shown = false;
  const showing = get(large).then((answer) => {
    shown = true;
    return answer;
  });
  t.match(await call(http, 'GET', `/v2/webhooks/${id}/deliveries`, keys.owner.secret), { status: 200 });
  t.match(await get(small), { status: 200, body: { id: small } }, 'nor does one with few attempts wait');
  t.equal(shown, false);
  t.match(await showing, { status: 200, body: { id: large, attempts: [] } });
  await Promise.all(before);
});

t.test('a redelivery is sent once more, and the trigger of its attempt is redeliver', async (t) => {
  const { http, store, keys, deliver } = await service(t);
  const receiver = await startReceiver(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const [delivery = none()] = await newDeliveries(store, id, 1);
  await deliver();
  const asked = await call(http, 'POST', `/v2/deliveries/${delivery}/redeliver`, keys.owner.secret);
  t.match(asked, {
    status: 202,
    body: { id: delivery, status: 'pending', next_attempt_at: '2026-11-21T08:00:00.000Z' },
  });
  await deliver();
  t.equal(receiver.requests.length, 2);
  t.equal(receiver.requests[0]?.headers['webhook-id'], receiver.requests[1]?.headers['webhook-id']);
  t.match(await call(http, 'GET', `/v2/deliveries/${delivery}`, keys.owner.secret), {
    body: { status: 'delivered', attempts: [{ trigger: 'schedule' }, { trigger: 'redeliver' }] },
  });
});

t.test('a redelivery repeated with its Idempotency-Key is sent once', async (t) => {
  const { http, store, keys, deliver } = await service(t);
  const receiver = await startReceiver(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const [delivery = none()] = await newDeliveries(store, id, 1);
  await deliver();
  const path = `/v2/deliveries/${delivery}/redeliver`;
  const first = await call(http, 'POST', path, keys.owner.secret, undefined, 'again');
  await deliver();
  const repeat = await call(http, 'POST', path, keys.owner.secret, undefined, 'again');
  await deliver();
  t.strictSame(repeat.body, first.body);
  t.equal(repeat.headers.get('idempotent-replayed'), 'true');
  t.equal(receiver.requests.length, 2);
});

t.test('after its delivery was pruned, a redelivery is still replayed, to its key alone', async (t) => {
  const { http, store, effects, keys, deliver } = await service(t);
  const receiver = await startReceiver(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const [delivery = none()] = await newDeliveries(store, id, 1);
  const path = `/v2/deliveries/${delivery}/redeliver`;
  const first = await call(http, 'POST', path, keys.owner.secret, undefined, 'again');
  await deliver();
  effects.advance(1_000);
  await pruneAll(store, 500);
  t.equal((await call(http, 'GET', `/v2/deliveries/${delivery}`, keys.owner.secret)).status, 404);

  const repeat = await call(http, 'POST', path, keys.owner.secret, undefined, 'again');
  t.strictSame([repeat.status, repeat.body], [202, first.body]);
  t.equal(repeat.headers.get('idempotent-replayed'), 'true');
  t.equal((await call(http, 'POST', path, keys.stranger.secret, undefined, 'again')).status, 404);
  t.equal((await call(http, 'POST', path, keys.owner.secret, undefined, 'new')).status, 404);
  t.equal(
    (await call(http, 'POST', redeliver(NOWHERE), keys.owner.secret, undefined, 'again')).status,
    404,
    'an unknown delivery is 404, even if the Idempotency-Key was used',
  );
});

t.test('a redelivery of a disabled webhook is held and sent once the webhook is enabled', async (t) => {
  const { http, store, keys, deliver } = await service(t);
  const receiver = await startReceiver(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const [delivery = none()] = await newDeliveries(store, id, 1);
  endDeliveries(store, [delivery], 'exhausted');
  const setStatus = (status: 'enabled' | 'disabled') => updateWebhook(store, id, { status });
  await setStatus('disabled');
  const asked = await call(http, 'POST', `/v2/deliveries/${delivery}/redeliver`, keys.owner.secret);
  t.match(asked, { status: 202, body: { status: 'held', next_attempt_at: null } });
  await deliver();
  t.equal(receiver.requests.length, 0);
  await setStatus('enabled');
  await deliver();
  t.equal(receiver.requests.length, 1);
});

t.test('a replay answers how many deliveries match, and sends each of them once more', async (t) => {
  const { http, store, effects, keys, deliver } = await service(t);
  const receiver = await startReceiver(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  const old = await newDeliveries(store, id, 2);
  effects.advance(60_000);
  const recent = await newDeliveries(store, id, 3);
  endDeliveries(store, [...old, ...recent.slice(1)], 'exhausted');
  endDeliveries(store, recent.slice(0, 1), 'delivered');

  const asked = await call(http, 'POST', `/v2/webhooks/${id}/replay`, keys.owner.secret, {
    since: '2026-11-21T08:00:00.0005Z',
    status: 'exhausted',
  });
  t.match(asked, { status: 202 });
  t.strictSame(asked.body, {
    webhook_id: id,
    since: '2026-11-21T08:00:00.001Z',
    until: '2026-11-21T08:01:00.000Z',
    status: 'exhausted',
    count: 2,
  });
  await deliver();
  t.strictSame(
    receiver.requests.map(({ headers }) => headers['webhook-id']),
    recent.slice(1).map((delivery) => eventOf(store.reads.deliveries.get(delivery))),
  );
  t.match(store.query('SELECT trigger FROM attempts'), [{ trigger: 'replay' }, { trigger: 'replay' }]);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
});

const COUNTS: { name: string; body: Record<string, string>; webhook?: 'disabled'; count: number }[] = [
  { name: 'all deliveries since a time', body: { since: SINCE }, count: 5 },
  {
    name: 'those up to now, if until is in the future',
    body: { since: SINCE, until: '2099-01-01T00:00:00Z' },
    count: 5,
  },
  {
    name: 'none, if all were created after until',
    body: { since: '2026-11-20T00:00:00Z', until: '2026-11-21T07:59:59.999Z' },
    count: 0,
  },
  {
    name: 'those at since and at until, to the millisecond',
    body: { since: '2026-11-21T08:00:00.000Z', until: '2026-11-21T08:00:00.000Z' },
    count: 5,
  },
  { name: 'delivered ones', body: { since: SINCE, status: 'delivered' }, count: 2 },
  { name: 'pending ones', body: { since: SINCE, status: 'pending' }, count: 2 },
  { name: 'no held ones while enabled', body: { since: SINCE, status: 'held' }, count: 0 },
  { name: 'held ones', body: { since: SINCE, status: 'held' }, webhook: 'disabled', count: 2 },
  {
    name: 'no pending ones while disabled',
    body: { since: SINCE, status: 'pending' },
    webhook: 'disabled',
    count: 0,
  },
];
for (const { name, body, webhook, count } of COUNTS) {
  t.test(`a replay counts ${name}`, async (t) => {
    const { http, store, keys } = await service(t);
    const { id } = await newWebhook(store, keys.owner.keyId);
    const ids = await newDeliveries(store, id, 5);
    endDeliveries(store, ids.slice(0, 2), 'delivered');
    endDeliveries(store, ids.slice(2, 3), 'exhausted');
    if (webhook === 'disabled') {
      await updateWebhook(store, id, { status: webhook });
    }
    const asked = await call(http, 'POST', `/v2/webhooks/${id}/replay`, keys.owner.secret, body);
    t.match(asked, { status: 202, body: { count, status: body['status'] ?? null } });
    const { until } = asked.body as { until: string };
    t.ok(until <= '2026-11-21T08:00:00.000Z', 'until is now at the latest: later events are sent anyway');
    t.equal(store.query('SELECT * FROM replays').length, count === 0 ? 0 : 1);
  });
}

t.test('a replay repeated with its Idempotency-Key is one, and answered with the first count', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  endDeliveries(store, await newDeliveries(store, id, 2), 'delivered');
  const path = `/v2/webhooks/${id}/replay`;
  const first = await call(http, 'POST', path, keys.owner.secret, { since: SINCE }, 'again');
  await newDeliveries(store, id, 1);
  const repeat = await call(http, 'POST', path, keys.owner.secret, { since: SINCE }, 'again');
  t.strictSame([repeat.status, repeat.body], [202, first.body]);
  t.equal(repeat.headers.get('idempotent-replayed'), 'true');
  t.equal(store.query('SELECT * FROM replays').length, 1);

  await store.writer.write('webhooks.remove', { id });
  const afterDeletion = await call(http, 'POST', path, keys.owner.secret, { since: SINCE }, 'again');
  t.strictSame([afterDeletion.status, afterDeletion.body], [202, first.body]);
  t.equal((await call(http, 'POST', path, keys.owner.secret, { since: SINCE }, 'new')).status, 404);
});

t.test('a repeat of a replay gets the stored answer also after the clock was set back', async (t) => {
  const { http, store, effects, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  await newDeliveries(store, id, 1);
  const ask = (key: string) =>
    call(http, 'POST', `/v2/webhooks/${id}/replay`, keys.owner.secret, { since: SINCE }, key);
  const first = await ask('again');
  effects.jump(Date.parse(SINCE) - effects.now() - 1);
  const repeat = await ask('again');
  t.strictSame([repeat.status, repeat.body], [202, first.body]);
  t.match(await ask('new'), { status: 400, body: { error: { details: [{ field: 'since' }] } } });
  const unknown = await call(http, 'POST', '/v2/webhooks/whk_unknown/replay', keys.owner.secret, {
    since: SINCE,
  });
  t.equal(unknown.status, 400, 'a wrong value comes before what is not visible');
  t.equal(store.query('SELECT * FROM replays').length, 1);
});

t.test('what succeeds while the answer to an earlier replay is looked for is not sent again', async (t) => {
  const { http, store, keys, deliver } = await service(t);
  const receiver = await startReceiver(t);
  const { id } = await newWebhook(store, keys.owner.keyId, { url: receiver.url });
  await newDeliveries(store, id, 1);
  const { write } = store.writer;
  t.intercept(store.writer, 'write', {
    value: async (...[name, input]: Parameters<typeof write>) => {
      if (name === 'idempotency.recall') await deliver();
      return write(name, input);
    },
  });
  const path = `/v2/webhooks/${id}/replay`;
  const asked = await call(http, 'POST', path, keys.owner.secret, { since: SINCE }, 'once');
  t.match(asked, { status: 202, body: { count: 1 } });
  t.equal(receiver.requests.length, 1);
  await deliver();
  t.equal(receiver.requests.length, 1);
});

t.test('repeats of a replay that is being counted are no further replays', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  await newDeliveries(store, id, 1);
  copyDeliveries(store, 20_000);
  const ask = () =>
    call(http, 'POST', `/v2/webhooks/${id}/replay`, keys.owner.secret, { since: SINCE }, 'once');
  const asked = await Promise.all(Array.from({ length: 12 }, ask));
  t.strictSame(
    asked.map(({ status, body }) => [status, body]),
    asked.map(() => [202, asked[0]?.body]),
  );
  t.equal(asked.filter(({ headers }) => headers.get('idempotent-replayed') === 'true').length, 11);
  t.equal(store.query('SELECT * FROM replays').length, 1);
});

t.test('an eleventh open replay is 429 and changes nothing', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  await newDeliveries(store, id, 1);
  const ask = () => call(http, 'POST', `/v2/webhooks/${id}/replay`, keys.owner.secret, { since: SINCE });
  for (let count = 0; count < 10; count++) t.equal((await ask()).status, 202);
  const before = store.dump();
  const refused = await ask();
  t.match(refused, { status: 429, body: { error: { code: 'rate_limited' } } });
  t.equal(refused.headers.get('retry-after'), '30');
  t.strictSame(store.dump(), before);
});

t.test('other requests are answered while a replay counts 100,000 deliveries', async (t) => {
  const { http, store, keys } = await service(t);
  const { id } = await newWebhook(store, keys.owner.keyId);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  copyDeliveries(store, 100_000);
  let counted = false;
  const counting = call(http, 'POST', `/v2/webhooks/${id}/replay`, keys.owner.secret, { since: SINCE }).then(
    (asked) => {
      counted = true;
      return asked;
    },
  );
  let answered = 0;
  while (!counted) {
    await call(http, 'GET', `/v2/deliveries/${delivery}`, keys.owner.secret);
    if (!counted) answered += 1;
  }
  t.match(await counting, { status: 202, body: { count: 100_001 } });
  t.ok(answered > 0);
});

async function service(t: Test) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { port } = await startHttp(t, {
    store,
    effects,
    resources: () => [
      deliveries(
        store.reads,
        createAnswers(store.writer),
        createPages(store.reads.instance.cursorSecret(), effects),
        effects,
      ),
    ],
  });
  const keys: Record<'owner' | 'reader' | 'unscoped' | 'stranger', { keyId: KeyId; secret: string }> = {
    owner: await store.key({ scopes: ['webhooks:read', 'webhooks:write'] }),
    reader: await store.key({ scopes: ['webhooks:read'] }),
    unscoped: await store.key({ scopes: ['deployments:read'] }),
    stranger: await store.key(),
  };
  const dispatcher = testDispatcher(t, store, effects);
  const replayer = createReplayer(store.reads, store.writer, effects);
  /** Carries out all replays and deliveries that are due. */
  const deliver = async () => {
    while ((await replayer.tick()) !== null);
    await deliverDue(dispatcher, effects);
  };
  return { http: port, store, effects, keys, deliver };
}

function eventOf(delivery: Delivery | undefined): string | undefined {
  return delivery?.event_id;
}
