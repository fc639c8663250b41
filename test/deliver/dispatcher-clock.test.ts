import t, { type Test } from 'tap';
import type { Dispatcher } from '../../src/deliver/dispatcher.ts';
import { DAY_MS, HOUR_MS } from '../../src/durations.ts';
import { copyWaiting, endDeliveries, newDeliveries, updateWebhook } from '../helpers/deliveries.ts';
import { deliverAll, deliverDue, dispatching, subscribe, testDispatcher } from '../helpers/dispatcher.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { held, startReceiver, status } from '../helpers/receiver.ts';
import { DEFAULT_SCHEDULE } from '../helpers/schedule.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

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
    await deliverAll(dispatcher, effects);
    t.equal(receiver.requests.length, DEFAULT_SCHEDULE.delaysMs.length + 2);
    const lastedMs = effects.monotonicMs() - startedAtMs;
    t.ok(lastedMs >= 22.5 * HOUR_MS && lastedMs <= 24 * HOUR_MS, `${lastedMs / HOUR_MS} h`);
  });
}

t.test('setting the clock back by an hour delays no retry and no event', async (t) => {
  const { store, effects, dispatcher } = dispatching(t);
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
    const { store, effects, dispatcher } = dispatching(t);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    const { id } = await subscribe(store, receiver.url);
    const turn = (status: 'disabled' | 'enabled') => updateWebhook(store, id, { status });
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
  const { store, effects, dispatcher } = dispatching(t);
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

/** A delivery that failed once, before the clock was set ahead by six days. */
async function setAheadAfterFailure(t: Test) {
  const effects = fakeEffects();
  const rest = dispatching(t, effects);
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
    await updateWebhook(store, id, { url: `${receiver.url}/${byMs}` });
    await deliverDue(dispatcher, effects);
  }
  effects.advance(6_000);
  await deliverDue(dispatcher, effects);
  t.equal(receiver.requests.length, 1);
  t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
    { status: 'pending', attempt_count: 1 },
  ]);
});

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
