import t from 'tap';
import { STEP_MS } from '../../src/clock.ts';
import type { DeliveryId, WebhookId } from '../../src/domain.ts';
import { DAY_MS } from '../../src/durations.ts';
import { SLICE_ROWS } from '../../src/store/list-page.ts';
import { type OpenReplay, type ReplaySelection, replayReads } from '../../src/store/replays.ts';
import {
  copyDeliveries,
  endDeliveries,
  newDeliveries,
  newReplay,
  newWebhook,
  storeWithWebhook,
  updateWebhook,
} from '../helpers/deliveries.ts';
import type { FakeEffects } from '../helpers/effects.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import { none, type TestStore } from '../helpers/store.ts';

const YEAR_MS = 365 * DAY_MS;

t.test('a replay counts what was created from since to until and has the status asked for', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const startMs = effects.now();
  const deliveries: DeliveryId[] = [];
  for (let second = 0; second < 5; second++) {
    deliveries.push(...(await newDeliveries(store, id, 1)));
    effects.advance(1_000);
  }
  endDeliveries(store, deliveries.slice(0, 2), 'delivered');
  endDeliveries(store, deliveries.slice(2, 4), 'exhausted');

  const cases: [Partial<ReplaySelection>, number][] = [
    [{}, 5],
    [{ sinceMs: startMs + 1 }, 4],
    [{ sinceMs: startMs + 1_000, untilMs: startMs + 2_000 }, 2],
    [{ untilMs: startMs - 1 }, 0],
    [{ storedStatus: 'delivered' }, 2],
    [{ storedStatus: 'exhausted' }, 2],
    [{ storedStatus: 'pending' }, 1],
    [{ storedStatus: 'exhausted', sinceMs: startMs + 3_000 }, 1],
    [{ webhookId: 'whk_0000000000000000000000' as WebhookId, lastSeq: 0 }, 0],
  ];
  for (const [changes, expected] of cases) {
    const selection = { ...everything(store, id, effects), ...changes };
    t.equal(await store.reads.replays.count(selection), expected, JSON.stringify(changes));
  }
});

t.test('a long past is counted exactly, in slices with turns for others in between', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 1);
  copyDeliveries(store, 3 * SLICE_ROWS + 7);
  const other = await newWebhook(store, (await store.key()).keyId);
  await newDeliveries(store, other.id, 1);
  const database = store.openReader();
  let looks = 0;
  const { count } = replayReads(database, {
    inSpareTurn: async (look) => {
      looks += 1;
      return look();
    },
  });
  t.equal(await count(everything(store, id, effects)), 3 * SLICE_ROWS + 9, 'its own only');
  t.equal(looks, 4);
  for (const extra of [0, 1, SLICE_ROWS - 1, SLICE_ROWS]) {
    const lastSeq = SLICE_ROWS + extra;
    t.equal(await store.reads.replays.count({ ...everything(store, id, effects), lastSeq }), lastSeq);
  }
});

t.test('of many replays at once ten are counted, and none of a webhook with ten open ones', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 1);
  const asked = { sinceMs: 0, untilMs: effects.now(), status: null };
  const plans = () => {
    const webhook = store.reads.webhooks.get(id) ?? none();
    return Promise.all(Array.from({ length: 30 }, () => store.reads.replays.plan(webhook, asked)));
  };
  const counts = (await plans()).map(({ count }) => count);
  t.strictSame(counts, [...Array(10).fill(1), ...Array(20).fill('ofKey')]);
  t.equal((await plans()).filter(({ count }) => count === 1).length, 10, 'the next ones as well');
  for (let open = 0; open < 10; open++) await newReplay(store, effects, id);
  const before = store.dump();
  for (const plan of await plans()) {
    t.equal(plan.count, 'ofWebhook');
    await t.rejects(store.writer.write('replays.create', plan), {
      code: 'rate_limited',
      message: 'too many replays of this webhook are open: wait for them',
    });
  }
  t.strictSame(store.dump(), before);
});

t.test(
  'of all webhooks of a key ten replays are counted at a time, and those of other keys too',
  async (t) => {
    const { store, effects, id, keyId } = await storeWithWebhook(t);
    const webhooks = [store.reads.webhooks.get(id) ?? none()];
    while (webhooks.length < 12) webhooks.push(await newWebhook(store, keyId));
    webhooks.push(await newWebhook(store, (await store.key()).keyId));
    await newDeliveries(store, id, 1);
    const asked = { sinceMs: 0, untilMs: effects.now(), status: null };
    const plans = () => Promise.all(webhooks.map((webhook) => store.reads.replays.plan(webhook, asked)));
    const counts = [...Array(10).fill(1), 'ofKey', 'ofKey', 1];
    t.match(await plans(), Object(counts.map((count) => ({ count }))));
    const [refused] = (await plans()).filter(({ count }) => count === 'ofKey');
    const before = store.dump();
    await t.rejects(store.writer.write('replays.create', refused ?? none()), {
      code: 'rate_limited',
      message: 'too many replays of this key are being counted: wait for them',
    });
    t.strictSame(store.dump(), before);
  },
);

t.test('a step begins new ladders and records its position; the last one ends the replay', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const deliveries = await newDeliveries(store, id, 5);
  endDeliveries(store, deliveries, 'exhausted');
  const heard: string[][] = [];
  store.writer.onCommit((changes) => heard.push([...changes]));
  await newReplay(store, effects, id, { storedStatus: 'exhausted' });
  effects.advance(60_000);

  const [open = none()] = store.reads.replays.open();
  const first = store.reads.replays.slice(open, open.doneSeq, 3);
  t.equal(first.seqs.length, 3);
  await store.writer.write('replays.step', { seq: open.seq, seqs: first.seqs, doneSeq: first.endSeq });
  t.match(
    store.query(
      'SELECT status, next_attempt_at, ladder_attempts, ladder_started_at, ladder_trigger FROM deliveries',
    ),
    [
      ...Array(3).fill({
        status: 'pending',
        next_attempt_at: effects.now(),
        ladder_attempts: 0,
        ladder_started_at: effects.now(),
        ladder_trigger: 'replay',
      }),
      ...Array(2).fill({ status: 'exhausted', next_attempt_at: null }),
    ],
  );

  const [later] = store.reads.replays.open();
  t.equal(later?.doneSeq, first.endSeq, 'a restart goes on here');
  const rest = store.reads.replays.slice(later as OpenReplay, later?.doneSeq ?? 0, 3);
  t.match(rest, { endSeq: null });
  await store.writer.write('replays.step', { seq: open.seq, seqs: rest.seqs, doneSeq: rest.endSeq });
  t.strictSame(store.reads.replays.open(), []);
  t.match(store.query("SELECT count(*) AS pending FROM deliveries WHERE status = 'pending'"), [
    { pending: 5 },
  ]);
  t.match(store.query('SELECT finished_at FROM replays'), [{ finished_at: effects.now() }]);
  t.strictSame(heard, Array(3).fill(['outbox']), 'each of them notifies the outbox');
});

t.test('a delivery that had its 1,000th attempt since it was picked is left alone', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const deliveries = await newDeliveries(store, id, 2);
  endDeliveries(store, deliveries, 'exhausted');
  await newReplay(store, effects, id);
  const [open] = store.reads.replays.open();
  const { seqs } = store.reads.replays.slice(open as OpenReplay, 0, 2);
  store.execute(`UPDATE deliveries SET attempt_count = 1000 WHERE id = '${deliveries[0]}'`);
  await store.writer.write('replays.step', { seq: open?.seq ?? 0, seqs, doneSeq: null });
  t.match(store.query('SELECT status FROM deliveries ORDER BY seq'), [
    { status: 'exhausted' },
    { status: 'pending' },
  ]);
});

t.test('a replay leaves out deliveries that were created after its request', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 2);
  await newReplay(store, effects, id);
  effects.jump(-3_600_000);
  await newDeliveries(store, id, 3);
  const [open = none()] = store.reads.replays.open();
  t.match(store.reads.replays.slice(open, 0, 10), { seqs: { length: 2 }, endSeq: null });
});

t.test('a delivery whose status no longer matches the replay is left alone', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const [one = none(), other = none()] = await newDeliveries(store, id, 2);
  endDeliveries(store, [one, other], 'exhausted');
  await newReplay(store, effects, id, { storedStatus: 'exhausted' });
  const [open = none()] = store.reads.replays.open();
  const { seqs, endSeq } = store.reads.replays.slice(open, 0, 10);
  endDeliveries(store, [one], 'delivered');
  await store.writer.write('replays.step', { seq: open.seq, seqs, doneSeq: endSeq });
  t.match(store.query('SELECT id, status FROM deliveries'), [
    { id: one, status: 'delivered' },
    { id: other, status: 'pending' },
  ]);
});

t.test(
  'a delivery that succeeded since the request is not sent again, whatever the replay selects',
  async (t) => {
    for (const storedStatus of [null, 'delivered'] as const) {
      const { store, effects, id } = await storeWithWebhook(t);
      const [before, since, failed] = await newDeliveries(store, id, 3);
      await attemptNext(store, effects, id, 'delivered');
      await newReplay(store, effects, id, { storedStatus });
      await attemptNext(store, effects, id, 'delivered');
      await attemptNext(store, effects, id, 'exhausted');
      await stepAll(store);
      t.match(store.query('SELECT id, status FROM deliveries'), [
        { id: before, status: 'pending' },
        { id: since, status: 'delivered' },
        { id: failed, status: storedStatus === null ? 'pending' : 'exhausted' },
      ]);
    }
  },
);

t.test('what succeeds while the deliveries of a replay are counted is not sent again', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const [delivery = none()] = await newDeliveries(store, id, 1);
  const webhook = store.reads.webhooks.get(id) ?? none();
  const asked = { sinceMs: 0, untilMs: effects.now(), status: null };
  const plan = await store.reads.replays.plan(webhook, asked);
  await attemptNext(store, effects, id, 'delivered');
  effects.advance(1_000);
  t.match(await store.writer.write('replays.create', plan), { count: 1 });
  await stepAll(store);
  t.match(store.reads.deliveries.get(delivery), { status: 'delivered' });
});

t.test('however the clock is set, only what succeeded since the request is left out', async (t) => {
  for (const byMs of [-900, -5_000, -YEAR_MS, YEAR_MS]) {
    for (const laterMs of [500, 2 * YEAR_MS]) {
      const { store, effects, id } = await storeWithWebhook(t);
      const [before, underWay, since] = await newDeliveries(store, id, 3);
      effects.advance(1_000);
      await attemptNext(store, effects, id, 'delivered');
      const atMs = effects.now();
      effects.jump(byMs);
      if (byMs < -STEP_MS) {
        await store.writer.write('instance.clockWasSet', { atMs: effects.now(), byMs });
      }
      await attemptNext(store, effects, id, 'delivered', { atMs, durationMs: 8_000 });
      await newReplay(store, effects, id, { untilMs: atMs });
      await attemptNext(store, effects, id, 'delivered');
      effects.advance(laterMs);
      await stepAll(store);
      t.match(
        store.query('SELECT id, status FROM deliveries ORDER BY seq'),
        [
          { id: before, status: 'pending' },
          { id: underWay, status: 'pending' },
          { id: since, status: 'delivered' },
        ],
        `set by ${byMs} ms, and carried out ${laterMs} ms later`,
      );
    }
  }
});

t.test('a replay never touches the deliveries of another webhook, which has its own', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  const [own = none()] = await newDeliveries(store, id, 1);
  const other = await newWebhook(store, (await store.key()).keyId);
  const [foreign = none()] = await newDeliveries(store, other.id, 1);
  endDeliveries(store, [foreign], 'delivered');
  await newReplay(store, effects, id);
  const [open] = store.reads.replays.open();
  const seqs = store.query<{ seq: number }>('SELECT seq FROM deliveries').map(({ seq }) => seq);
  await store.writer.write('replays.step', { seq: open?.seq ?? 0, seqs, doneSeq: null });
  t.match(store.reads.deliveries.get(foreign), { status: 'delivered' });

  endDeliveries(store, [own], 'delivered');
  for (const webhookId of [id, other.id]) await newReplay(store, effects, webhookId);
  for (const { seq } of store.reads.replays.open()) {
    await store.writer.write('replays.step', { seq, seqs, doneSeq: 1 });
  }
  for (const delivery of [own, foreign]) {
    t.match(store.reads.deliveries.get(delivery), { status: 'pending' });
  }
});

t.test('a replay of a disabled webhook waits until it is enabled', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 1);
  await updateWebhook(store, id, { status: 'disabled' });
  await newReplay(store, effects, id);
  t.strictSame(store.reads.replays.open(), []);
  await updateWebhook(store, id, { status: 'enabled' });
  t.match(store.reads.replays.open(), [{ webhookId: id }]);
});

t.test('replays of a webhook go one after the other, those of several side by side', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 1);
  const other = await newWebhook(store, (await store.key()).keyId);
  await newDeliveries(store, other.id, 1);
  await newReplay(store, effects, id);
  await newReplay(store, effects, id, { sinceMs: 1 });
  await newReplay(store, effects, other.id);
  const [first, second] = store.reads.replays.open();
  t.match([first, second], [{ webhookId: id, sinceMs: 0 }, { webhookId: other.id }]);
  await store.writer.write('replays.step', { seq: first?.seq ?? 0, seqs: [], doneSeq: null });
  t.match(store.reads.replays.open(), [{ webhookId: id }, { webhookId: other.id }]);
});

t.test(
  'an eleventh open replay is rejected and changes nothing; one that matches nothing is not opened',
  async (t) => {
    const { store, effects, id } = await storeWithWebhook(t);
    await newDeliveries(store, id, 1);
    t.match(await newReplay(store, effects, id, { count: 0 }), { count: 0 });
    t.strictSame(store.query('SELECT * FROM replays'), []);
    for (let count = 0; count < 10; count++) {
      await newReplay(store, effects, id);
      const [open] = store.reads.replays.open();
      await store.writer.write('replays.step', { seq: open?.seq ?? 0, seqs: [], doneSeq: null });
    }
    for (let count = 0; count < 10; count++) await newReplay(store, effects, id);
    const before = store.dump();
    await t.rejects(newReplay(store, effects, id), {
      code: 'rate_limited',
      message: /are open: wait for them$/,
      retryAfterSeconds: 30,
    });
    t.strictSame(store.dump(), before);
    await updateWebhook(store, id, { status: 'disabled' });
    await t.rejects(newReplay(store, effects, id), {
      code: 'rate_limited',
      message: 'too many replays of this webhook are open: they wait until it is enabled',
    });
  },
);

t.test(
  'a deleted webhook cannot be replayed, and a step of a replay that ended with it does nothing',
  async (t) => {
    const { store, effects, id } = await storeWithWebhook(t);
    const [delivery = none()] = await newDeliveries(store, id, 1);
    endDeliveries(store, [delivery], 'exhausted');
    await newReplay(store, effects, id);
    const [open] = store.reads.replays.open();
    await store.writer.write('webhooks.remove', { id });
    const before = store.dump();
    await t.rejects(newReplay(store, effects, id), { code: 'not_found' });
    await store.writer.write('replays.step', { seq: open?.seq ?? 0, seqs: [1], doneSeq: 1 });
    t.strictSame(store.dump(), before);
  },
);

t.test('a webhook is busy if it has at least so many due deliveries', async (t) => {
  const { store, effects, id } = await storeWithWebhook(t);
  await newDeliveries(store, id, 3);
  t.equal(store.reads.replays.isBusy(id, effects.now(), 3), true);
  t.equal(store.reads.replays.isBusy(id, effects.now(), 4), false);
  t.equal(
    store.reads.replays.isBusy(id, effects.now() - 1, 1),
    false,
    'deliveries that are not due yet do not count',
  );
});

t.test('revoking a key ends the replays of its webhooks and rejects new ones; others go on', async (t) => {
  const { store, effects, id, keyId } = await storeWithWebhook(t);
  const other = await newWebhook(store, (await store.key()).keyId);
  await newDeliveries(store, id, 2);
  await newReplay(store, effects, id);
  await newReplay(store, effects, other.id);
  effects.advance(1_000);
  await store.writer.write('keys.revoke', { id: keyId });
  t.match(store.query('SELECT webhook_id, finished_at FROM replays ORDER BY seq'), [
    { webhook_id: id, finished_at: effects.now() },
    { webhook_id: other.id, finished_at: null },
  ]);
  const before = store.dump();
  for (const count of [0, 2]) await t.rejects(newReplay(store, effects, id, { count }), { code: 'conflict' });
  t.strictSame(store.dump(), before);
});

function everything(store: TestStore, webhookId: WebhookId, effects: FakeEffects) {
  const now = store.reads.replays.latest(webhookId);
  return { webhookId, sinceMs: 0, untilMs: effects.now(), storedStatus: null, ...now };
}

/** An attempt of the webhook's next delivery, due or not, with this result. */
async function attemptNext(
  store: TestStore,
  effects: FakeEffects,
  id: WebhookId,
  kind: 'delivered' | 'exhausted',
  attempt: Parameters<typeof settlementOf>[3] = {},
): Promise<void> {
  const [due = none()] = dueOf(store, id, Number.MAX_SAFE_INTEGER, 1);
  await store.writer.write('outbox.settle', settlementOf(due, effects.now(), { kind }, attempt));
}

/** Carries out all of the oldest replay in one step. */
async function stepAll(store: TestStore): Promise<void> {
  const [open = none()] = store.reads.replays.open();
  const { seqs, endSeq } = store.reads.replays.slice(open, open.doneSeq, 10);
  await store.writer.write('replays.step', { seq: open.seq, seqs, doneSeq: endSeq });
}
