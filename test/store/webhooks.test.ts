import t from 'tap';
import type { KeyId, WebhookId } from '../../src/domain.ts';
import { DAY_MS } from '../../src/durations.ts';
import { type Change, enabledChange } from '../../src/store/changes.ts';
import { openForWriting } from '../../src/store/database.ts';
import { WEBHOOKS_OF_KEY_MAX, webhookWrites } from '../../src/store/webhooks.ts';
import {
  newDeliveries,
  newReplay,
  newWebhook,
  storeWithWebhook,
  updateWebhook,
} from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { dueOf } from '../helpers/outbox.ts';
import {
  caller,
  newDeployment,
  preparedBy,
  type TestStore,
  temporaryDirectory,
  testStore,
} from '../helpers/store.ts';

t.test('a key sees the webhooks that it registered and no others', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const stranger = await store.key();
  const { id } = await newWebhook(store, keyId);
  await newWebhook(store, stranger.keyId);

  t.match(store.reads.webhooks.visibleTo(caller({ keyId }), id), { id });
  t.equal(store.reads.webhooks.visibleTo(caller(stranger), id), undefined);
  t.strictSame(idsOf(store, keyId), [id]);
});

t.test('a key has a hundred webhooks at most, however many are registered at once', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const registered = await Promise.allSettled(
    Array.from({ length: WEBHOOKS_OF_KEY_MAX + 5 }, () => newWebhook(store, keyId)),
  );
  t.equal(registered.filter(({ status }) => status === 'fulfilled').length, 100);
  const before = store.dump();
  await t.rejects(newWebhook(store, keyId), { code: 'conflict', message: /has 100 webhooks.*delete one/ });
  t.strictSame(store.dump(), before);

  await newWebhook(store, (await store.key()).keyId); // others count for themselves
  const [id] = idsOf(store, keyId);
  await store.writer.write('webhooks.remove', { id: id as WebhookId });
  await newWebhook(store, keyId);
  await t.rejects(newWebhook(store, keyId), { code: 'conflict' }, 'deleted ones do not count');
});

t.test('a page begins with the newest and goes on before a seq', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const ids: WebhookId[] = [];
  for (let count = 0; count < 5; count++) ids.push((await newWebhook(store, keyId)).id);
  const first = store.reads.webhooks.page(caller({ keyId }), Number.MAX_SAFE_INTEGER, 3);
  const rest = store.reads.webhooks.page(caller({ keyId }), first.goOnAt ?? 0, 3);
  t.strictSame(
    [...first.items, ...rest.items].map(({ id }) => id),
    ids.toReversed(),
  );
});

t.test('an update changes what is given and nothing else', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id, signing_secret: _, ...before } = await newWebhook(store, keyId);
  const changes: Parameters<typeof updateWebhook>[2][] = [
    { description: 'for the status page' },
    { url: 'https://example.net/other' },
    { events: ['deployment.failed', 'deployment.started'] },
    { description: null },
  ];
  let expected = before;
  for (const change of changes) {
    const after = await updateWebhook(store, id, change);
    expected = { ...expected, ...change } as typeof expected;
    t.strictSame(after, { id, ...expected });
    t.strictSame(store.reads.webhooks.get(id), after);
  }
});

t.test('a change of events applies to later events; what is pending stays pending', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId, { events: ['deployment.created'] });
  await newDeliveries(store, id, 2);
  await updateWebhook(store, id, { events: ['deployment.canceled'] });
  await newDeliveries(store, id, 2);
  t.strictSame(store.query('SELECT event_type, status FROM deliveries'), [
    { event_type: 'deployment.created', status: 'pending' },
    { event_type: 'deployment.created', status: 'pending' },
  ]);
  t.strictSame(store.query('SELECT event_type FROM webhook_subscriptions'), [
    { event_type: 'deployment.canceled' },
  ]);
});

t.test(
  'an event goes once to each webhook whose key sees the project, and to none whose key was revoked',
  async (t) => {
    const store = testStore(t);
    const projectId = await store.project();
    const told: WebhookId[] = [];
    for (const sees of [
      { allProjects: true },
      { allProjects: false, projectIds: [projectId] },
      { allProjects: true, projectIds: [projectId] },
    ]) {
      told.push((await newWebhook(store, (await store.key(sees)).keyId)).id);
      const revoked = await store.key(sees);
      await newWebhook(store, revoked.keyId);
      await store.writer.write('keys.revoke', { id: revoked.keyId });
    }
    const heard: Change[] = [];
    store.writer.onCommit((changes) => heard.push(...changes));
    await store.writer.write('deployments.create', newDeployment(projectId));
    t.match(
      store.query('SELECT webhook_id FROM deliveries ORDER BY webhook_id'),
      told.toSorted().map((id) => ({ webhook_id: id })),
    );
    t.strictSame(heard.filter((change) => change.startsWith('whk_')).sort(), told.toSorted());
  },
);

t.test('disabling a webhook sets the reason, and does not replace an earlier one', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  const disabling = { id, status: 'disabled', disableReason: 'tired' } as const;
  t.match(await store.writer.write('webhooks.update', disabling), {
    status: 'disabled',
    status_reason: 'tired',
  });
  store.execute("UPDATE webhooks SET status_reason = 'the receiver answered 410 Gone'");
  t.match(await updateWebhook(store, id, { status: 'disabled' }), { status_reason: /410/ });
});

t.test('enabling a webhook resets its failures, and held deliveries begin their ladder anew', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const [waiting] = await newDeliveries(store, id, 1);
  store.execute(`
    UPDATE deliveries SET next_attempt_at = next_attempt_at + ${DAY_MS / 2}, attempt_count = 8, ladder_attempts = 8;
    UPDATE webhooks SET consecutive_failures = 8, failing_since = created_at`);
  await updateWebhook(store, id, { status: 'disabled' });
  const [arisen] = await newDeliveries(store, id, 1);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);

  effects.advance(60_000);
  const heard: Change[] = [];
  store.writer.onCommit((changes) => heard.push(...changes));
  t.match(await updateWebhook(store, id, { status: 'enabled' }), {
    status: 'enabled',
    status_reason: null,
    consecutive_failures: 0,
  });
  t.strictSame(heard, ['outbox', enabledChange(id)]);
  t.match(store.query('SELECT failing_since, enabled_at FROM webhooks'), [
    { failing_since: null, enabled_at: effects.now() },
  ]);
  await store.writer.write('outbox.retryNow', { webhookId: id, after: null });
  t.match(
    dueOf(store, id, effects.now(), 10).map((due) => [due.id, due.ladder_attempts, due.ladder_started_at]),
    [
      [arisen, 0, effects.now()],
      [waiting, 0, effects.now()],
    ],
    'a delivery that waited for a retry is due, too',
  );
});

t.test('enabling a webhook begins new ladders, also by a clock that was set back', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  effects.advance(DAY_MS);
  const [due, waiting] = await newDeliveries(store, id, 2);
  store.execute(`
    UPDATE deliveries
       SET attempt_count = 8, ladder_attempts = 8, next_attempt_at = ${effects.now() - DAY_MS / 2} + iif(id = '${due}', 0, 20000)`);
  effects.jump(-DAY_MS / 2);
  await updateWebhook(store, id, { status: 'disabled' });
  effects.advance(10_000);
  await updateWebhook(store, id, { status: 'enabled' });
  const claimed = () =>
    dueOf(store, id, effects.now(), 10).map((delivery) => [delivery.id, delivery.ladder_attempts]);
  t.strictSame(claimed(), [[due, 0]]);
  t.ok(
    store.reads.outbox.isRetryNowUnfinished(id, effects.now()),
    'also if no service runs that makes the other one due',
  );
  // Then the clock is right again.
  effects.jump(DAY_MS / 2);
  t.strictSame(claimed(), [
    [due, 0],
    [waiting, 0],
  ]);
});

for (const [sign, isMoved] of [
  ['the newest event', true],
  ['a recorded setting', true],
  ['its own retry, which no walk has moved yet,', false],
] as const) {
  t.test(
    `that a ladder began before the clock was set back, ${sign} tells who enables its webhook`,
    async (t) => {
      const { store, effects, id } = await storeWithWebhook(t);
      await newDeliveries(store, id, 1);
      await updateWebhook(store, id, { status: 'disabled' });
      effects.advance(DAY_MS);
      const before = effects.now();
      effects.jump(-DAY_MS / 2);
      const at = effects.now();
      store.execute(`
      UPDATE deliveries
         SET ladder_started_at = ${before - 1}, ladder_attempts = 1, next_attempt_at = ${isMoved ? at : before + 5000}`);
      if (sign === 'the newest event') store.execute(`UPDATE events SET created_at = ${before - 1}`);
      if (sign === 'a recorded setting') {
        await store.writer.write('instance.clockWasSet', { atMs: at, byMs: -DAY_MS / 2 });
      }
      effects.advance(1_000);
      await updateWebhook(store, id, { status: 'enabled' });
      t.strictSame(store.query('SELECT ladder_started_at FROM deliveries'), [
        { ladder_started_at: effects.now() - 1 },
      ]);
    },
  );
}

t.test('enabling a webhook reads none of what is due, unless the clock was set back', (t) => {
  const database = openForWriting(`${temporaryDirectory(t)}/davit.db`, fakeEffects());
  t.teardown(() => database.close());
  const plans: string[] = [];
  const spied = preparedBy(database, (sql) => {
    if (/UPDATE deliveries/.test(sql)) {
      const plan = database.prepare<[object], { detail: string }>(`EXPLAIN QUERY PLAN ${sql}`);
      plans.push(...plan.all({ id: 'whk_1', at: 1 }).map(({ detail }) => detail));
    }
    return database.prepare(sql);
  });
  webhookWrites({ database: spied, effects: fakeEffects(), changed: () => undefined });
  t.strictSame(
    plans.filter((detail) => /^(SCAN|SEARCH) /.test(detail)),
    [
      'SEARCH deliveries USING INDEX deliveries_pending (webhook_id=? AND next_attempt_at>?)',
      'SEARCH events USING COVERING INDEX events_by_age',
      'SCAN clock_settings',
    ],
  );
  t.end();
});

t.test('enabling an enabled webhook changes nothing', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 1);
  store.execute('UPDATE webhooks SET consecutive_failures = 2, failing_since = created_at');
  effects.advance(1_000);
  const before = store.dump();
  await updateWebhook(store, id, { status: 'enabled' });
  t.strictSame(store.dump(), before);
});

t.test('a webhook whose key was revoked cannot be enabled', async (t) => {
  const { store, keyId, id } = await storeWithWebhook(t);
  await store.writer.write('keys.revoke', { id: keyId });
  const before = store.dump();
  await t.rejects(updateWebhook(store, id, { status: 'enabled', url: 'https://example.net/' }), {
    code: 'conflict',
  });
  t.strictSame(store.dump(), before);
});

t.test('a new url resets the failures of a webhook, the same url does not', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const { id, url } = await newWebhook(store, keyId);
  store.execute('UPDATE webhooks SET consecutive_failures = 2, failing_since = created_at');
  const heard: Change[] = [];
  store.writer.onCommit((changes) => heard.push(...changes));
  t.match(await updateWebhook(store, id, { url }), { consecutive_failures: 2 });
  t.strictSame(heard, []);
  t.match(await updateWebhook(store, id, { url: 'https://example.net/' }), { consecutive_failures: 0 });
  t.strictSame(heard, ['outbox'], 'the outbox is notified');
  t.match(store.query('SELECT failing_since FROM webhooks'), [{ failing_since: null }]);
});

t.test('after a rotation both secrets sign until the overlap is over', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id, signing_secret: first } = await newWebhook(store, keyId);
  effects.advance(1_000);
  const { signing_secret: second } = await rotate(store, id, DAY_MS);
  await newWebhook(store, keyId); // has a secret of its own, with which nothing of this one is signed
  const live = () => store.reads.webhooks.pingRecipient(id, effects.now())?.secrets ?? [];

  t.not(second, first);
  t.strictSame(live(), [second, first], 'the newest first');
  effects.advance(DAY_MS - 1);
  t.strictSame(live(), [second, first]);
  effects.advance(1);
  t.strictSame(live(), [second]);
  for (let count = 0; count < 4; count++) {
    const { signing_secret } = await rotate(store, id, DAY_MS);
    t.equal(live()[0], signing_secret, 'also within one millisecond');
  }
});

t.test('a rotation without an overlap removes the old secrets at once', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  await rotate(store, id, DAY_MS);
  const { signing_secret: last } = await rotate(store, id, 0);
  t.strictSame(store.query('SELECT secret, expires_at FROM webhook_secrets'), [
    { secret: last, expires_at: null },
  ]);
});

t.test('a later rotation may shorten the life of a secret and never lengthens it', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  effects.advance(1);
  const { signing_secret: second } = await rotate(store, id, 1_000);
  effects.advance(1);
  const { signing_secret: third } = await rotate(store, id, DAY_MS);
  effects.advance(1_000);
  const live = () => store.reads.webhooks.pingRecipient(id, effects.now())?.secrets;
  t.strictSame(live(), [third, second], 'the first one ended after its second');
  const { signing_secret: fourth } = await rotate(store, id, 1_000);
  effects.advance(1_000);
  t.strictSame(live(), [fourth], 'the second one, which had a day, ended after a second');
});

t.test('at most five secrets live: a sixth ends the oldest', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id, signing_secret } = await newWebhook(store, keyId);
  const secrets = [signing_secret];
  for (let count = 0; count < 6; count++) {
    effects.advance(1);
    secrets.push((await rotate(store, id, DAY_MS)).signing_secret);
  }
  t.strictSame(store.reads.webhooks.pingRecipient(id, effects.now())?.secrets, secrets.slice(-5).reverse());
});

t.test(
  'a rotation never ends the secret that was current until then, also with a clock set back',
  async (t) => {
    const { store, effects, id } = await storeWithWebhook(t);
    for (let count = 0; count < 4; count++) {
      effects.advance(1);
      await rotate(store, id, DAY_MS);
    }
    effects.jump(-3_600_000);
    const { signing_secret: current } = await rotate(store, id, DAY_MS);
    const { signing_secret: next } = await rotate(store, id, DAY_MS);
    const live = store.reads.webhooks.pingRecipient(id, effects.now())?.secrets ?? [];
    t.equal(live.length, 5);
    t.equal(live[0], next);
    t.ok(live.includes(current));
  },
);

t.test('a deleted webhook has no deliveries, open replays, subscriptions or secrets', async (t) => {
  const { store, keyId, id } = await storeWithWebhook(t);
  const [delivery] = await newDeliveries(store, id, 1);
  await newReplay(store, fakeEffects(), id);
  await store.writer.write('webhooks.remove', { id });

  t.equal(store.reads.webhooks.get(id), undefined);
  t.strictSame(idsOf(store, keyId), []);
  t.equal(store.reads.deliveries.get(delivery ?? ''), undefined);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
  t.strictSame(store.reads.replays.open(), []);
  t.strictSame(store.query('SELECT * FROM webhook_secrets'), []);
  t.strictSame(store.query('SELECT * FROM webhook_subscriptions'), []);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  t.equal(store.query('SELECT * FROM deliveries').length, 1, 'no new delivery is made for it');
});

t.test('whatever is done to a webhook, the others stay as they are', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const [one, other] = [await newWebhook(store, keyId), await newWebhook(store, keyId)];
  await newDeliveries(store, other.id, 1);
  await rotate(store, other.id, DAY_MS);
  for (const { id } of [one, other]) await newReplay(store, effects, id);
  store.execute('UPDATE webhooks SET consecutive_failures = 2, failing_since = created_at');
  const ofOther = () => {
    const tables = ['webhook_subscriptions', 'webhook_secrets', 'deliveries', 'replays'];
    const rows = tables.map((table) => store.query(`SELECT * FROM ${table} WHERE webhook_id = ?`, other.id));
    return [store.query('SELECT * FROM webhooks WHERE id = ?', other.id), ...rows];
  };
  const before = ofOther();
  t.ok(before.every(({ length }) => length > 0));
  effects.advance(1);
  await updateWebhook(store, one.id, {
    ...{
      url: 'https://example.net/',
      events: ['deployment.failed'],
      description: 'moved',
      status: 'disabled',
    },
  });
  await updateWebhook(store, one.id, { status: 'enabled' });
  await rotate(store, one.id, 0);
  await store.writer.write('webhooks.remove', { id: one.id });
  t.strictSame(ofOther(), before);
  t.equal(store.reads.webhooks.visibleTo(caller({ keyId }), one.id), undefined);
});

t.test('an unknown or deleted webhook is not_found for every change, and nothing changes', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const deleted = await newWebhook(store, keyId);
  await store.writer.write('webhooks.remove', { id: deleted.id });
  const before = store.dump();
  for (const id of [deleted.id, 'whk_0000000000000000000000' as WebhookId]) {
    await t.rejects(updateWebhook(store, id, { description: 'x' }), { code: 'not_found' });
    await t.rejects(rotate(store, id, 0), { code: 'not_found' });
    await t.rejects(store.writer.write('webhooks.remove', { id }), { code: 'not_found' });
  }
  t.strictSame(store.dump(), before);
});

function rotate(store: TestStore, id: WebhookId, overlapMs: number) {
  return store.writer.write('webhooks.rotate', { id, overlapMs });
}

function idsOf(store: TestStore, keyId: KeyId): WebhookId[] {
  const { items } = store.reads.webhooks.page(caller({ keyId }), Number.MAX_SAFE_INTEGER, 10);
  return items.map(({ id }) => id);
}
