import t, { type Test } from 'tap';
import { createReplayer, type Replayer } from '../../src/deliver/replays.ts';
import {
  copyDeliveries,
  endDeliveries,
  newDeliveries,
  newReplay,
  newWebhook,
  storeWithWebhook,
} from '../helpers/deliveries.ts';
import { deliverDue, testDispatcher } from '../helpers/dispatcher.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { startReceiver, status } from '../helpers/receiver.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

/** As in src/deliver/replays.ts. */
const STEP_ROWS = 500;

t.test(
  'a replayed delivery arrives again with the same bytes, and its attempts name the replay',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const receiver = await startReceiver(t, { answers: [status(200)] });
    const { keyId } = await store.key();
    const { id } = await newWebhook(store, keyId, { url: receiver.url });
    await newDeliveries(store, id, 3);
    const deliver = async () => {
      await deliverDue(testDispatcher(t, store, effects), effects);
      const bodies = receiver.requests.slice(sent).map(({ body }) => body.toString());
      sent = receiver.requests.length;
      return bodies.sort();
    };
    let sent = 0;
    const before = await deliver();

    await newReplay(store, effects, id);
    await replayerOn(store, effects).tick();
    t.strictSame(await deliver(), before);
    t.match(store.query('SELECT status, attempt_count FROM deliveries'), [
      { status: 'delivered', attempt_count: 2 },
      { status: 'delivered', attempt_count: 2 },
      { status: 'delivered', attempt_count: 2 },
    ]);
    t.match(store.query('SELECT trigger FROM attempts WHERE number = 2'), [
      { trigger: 'replay' },
      { trigger: 'replay' },
      { trigger: 'replay' },
    ]);
    t.strictSame(store.reads.outbox.pendingWebhooks(), []);
  },
);

t.test('a replay resumes after a restart and sends nothing twice', async (t) => {
  const { store, effects, id } = await longPast(t, 2 * STEP_ROWS + 200);
  await newReplay(store, effects, id, { storedStatus: 'delivered' });
  await replayerOn(store, effects).tick();
  t.equal(rearmed(store), STEP_ROWS);

  // Those that were sent meanwhile are delivered again, and so they fit once more.
  store.execute(
    "UPDATE deliveries SET status = 'delivered', delivered_at = 1, next_attempt_at = NULL, attempt_count = 2 WHERE status = 'pending'",
  );
  const restarted = replayerOn(store, effects);
  await restarted.tick();
  store.execute(
    "UPDATE deliveries SET status = 'delivered', delivered_at = 1, next_attempt_at = NULL, attempt_count = 2 WHERE status = 'pending'",
  );
  await restarted.tick();
  t.match(
    store.query('SELECT attempt_count, count(*) AS deliveries FROM deliveries GROUP BY attempt_count'),
    [
      { attempt_count: 1, deliveries: 200 },
      { attempt_count: 2, deliveries: 2 * STEP_ROWS },
    ],
  );
  t.equal(rearmed(store), 200);
  t.strictSame(store.reads.replays.open(), []);
  t.equal(await restarted.tick(), null);
});

t.test('a replay is at most one step ahead of its receiver', async (t) => {
  const { store, effects, id } = await longPast(t, 3 * STEP_ROWS);
  await newReplay(store, effects, id);
  const replayer = replayerOn(store, effects);
  t.equal(await replayer.tick(), effects.now(), 'look again at once');
  t.equal(await replayer.tick(), null, 'nothing to do before something is sent');
  t.equal(rearmed(store), STEP_ROWS);

  store.execute(`
    UPDATE deliveries SET next_attempt_at = next_attempt_at + 5000
     WHERE seq = (SELECT min(seq) FROM deliveries WHERE status = 'pending')`);
  await replayer.tick();
  t.equal(rearmed(store), 2 * STEP_ROWS, 'a delivery that waits for its retry makes room');
});

t.test('rare matches are found in one step, however far apart they are', async (t) => {
  const { store, effects, id } = await longPast(t, 10_000);
  store.execute("UPDATE deliveries SET status = 'exhausted', delivered_at = NULL WHERE seq % 2500 = 0");
  await newReplay(store, effects, id, { storedStatus: 'exhausted' });
  await replayerOn(store, effects).tick();
  t.equal(rearmed(store), 4);
  t.strictSame(store.reads.replays.open(), []);
});

t.test('a step reads no more than its rows, wherever they lie', async (t) => {
  const { store, effects, id } = await longPast(t, 6_000);
  // Some before the end of what is looked at at once, and all behind it.
  store.execute(
    "UPDATE deliveries SET status = 'exhausted', delivered_at = NULL WHERE seq < 100 OR seq > 2000",
  );
  await newReplay(store, effects, id, { storedStatus: 'exhausted' });
  await replayerOn(store, effects).tick();
  t.equal(rearmed(store), STEP_ROWS);
});

t.test('a replay that waits does not hold up that of another webhook', async (t) => {
  const { store, effects, id } = await longPast(t, 2 * STEP_ROWS);
  const other = await newWebhook(store, (await store.key()).keyId);
  const deliveries = await newDeliveries(store, other.id, 1);
  endDeliveries(store, deliveries, 'delivered');
  await newReplay(store, effects, id);
  const replayer = replayerOn(store, effects);
  await replayer.tick();
  await newReplay(store, effects, other.id);
  await replayer.tick();
  t.strictSame(
    store.reads.replays.open().map(({ webhookId }) => webhookId),
    [id],
  );
});

t.test('on a full disk a replay stays where it is and resumes once there is room', async (t) => {
  const { store, effects, id } = await longPast(t, 2 * STEP_ROWS);
  await newReplay(store, effects, id);
  const before = store.dump();
  store.limitPages(true);
  const replayer = replayerOn(store, effects);
  t.equal(await replayer.tick(), null);
  t.strictSame(store.dump(), before);
  store.limitPages(false);
  await replayer.tick();
  t.equal(rearmed(store), STEP_ROWS);
});

t.test('a bug is not taken for a full disk, of which nobody is told', async (t) => {
  const { store, effects, id } = await longPast(t, 1);
  await newReplay(store, effects, id);
  const write = () => Promise.reject(new Error('a bug'));
  await t.rejects(replayerOn({ ...store, writer: { ...store.writer, write } }, effects).tick(), {
    message: 'a bug',
  });
});

async function longPast(t: Test, count: number) {
  const { store, effects, id } = await storeWithWebhook(t);
  endDeliveries(store, await newDeliveries(store, id, 1), 'delivered');
  copyDeliveries(store, count - 1);
  return { store, effects, id };
}

function replayerOn(store: TestStore, effects: FakeEffects): Replayer {
  return createReplayer(store.reads, store.writer, effects);
}

/** How many stand on a ladder that a replay began, and wait. */
function rearmed(store: TestStore): number {
  const [row] = store.query<{ count: number }>(
    "SELECT count(*) AS count FROM deliveries WHERE status = 'pending' AND ladder_trigger = 'replay'",
  );
  return row?.count ?? 0;
}
