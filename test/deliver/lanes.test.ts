import fc from 'fast-check';
import t from 'tap';
import {
  createLanes,
  LANE_LIMITS,
  type Lane,
  type Lanes,
  type SlotEnd,
  type TakenSlot,
  type Turn,
} from '../../src/deliver/lanes.ts';
import type { KeyId, WebhookId } from '../../src/domain.ts';
import type { PendingWebhook, WebhookHistory } from '../../src/store/outbox.ts';
import { WEBHOOKS_OF_KEY_MAX } from '../../src/store/webhooks.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';

/** More than any look begins. */
const MANY = 10_000;

const NOTHING_HAPPENED: WebhookHistory = { key_id: null, failing_since: null, last_success_at: null };

t.test('a new webhook gets one attempt at a time until one succeeds, then four', async (t) => {
  const model = outbox();
  model.add('a', 10);
  model.look();
  t.equal(model.underWay('a'), 1);
  model.look();
  t.equal(model.underWay('a'), 1);
  model.end('a', 'succeeded');
  model.look();
  t.equal(model.underWay('a'), LANE_LIMITS.perWebhook);
});

t.test('all webhooks together have 256 slots, and each gets one before any gets two', async (t) => {
  const model = outbox();
  const ids = model.proven(300);
  for (const id of ids.slice(0, 200)) model.add(id, 10);
  model.look();
  t.ok(ids.slice(0, 200).every((id) => model.underWay(id) === 1));
  for (const id of ids.slice(200)) model.add(id, 10);
  model.look();
  t.equal(model.total(), LANE_LIMITS.total);
});

t.test('the last quarter of the slots is for webhooks with nothing under way', async (t) => {
  const model = outbox();
  const ids = model.proven(60);
  for (const id of ids) model.add(id, 10);
  for (let look = 0; look < 4; look++) model.look();
  t.equal(model.total(), 48 * 4 + 12);
});

t.test('webhooks with a backlog take turns', async (t) => {
  const model = outbox();
  const ids = model.proven(40);
  for (const id of ids) model.add(id, 100);
  model.look();
  for (const id of ids) while (model.underWay(id) > 0) model.end(id, 'succeeded');
  const before = ids.map(model.begun);
  for (let look = 0; look < 8; look++) {
    model.look(MANY, 5);
    for (const id of ids) while (model.underWay(id) > 0) model.end(id, 'succeeded');
  }
  t.strictSame(
    ids.map((id, index) => model.begun(id) - (before[index] ?? 0)),
    ids.map(() => 1),
  );
});

t.test('an event of a webhook without a backlog goes before all backlogs', async (t) => {
  const model = outbox();
  const behind = model.proven(30);
  const [quick = ''] = model.proven(1);
  for (const id of behind) model.add(id, 100);
  model.look(MANY, 10);
  model.add(quick, 1);
  model.look(1, 0);
  t.equal(model.underWay(quick), 1);
});

t.test('any number of new webhooks that hang hold half of the slots', async (t) => {
  const model = outbox();
  for (let count = 0; count < 500; count++) model.add(`new${count}`, 1_000);
  model.look();
  t.equal(model.total(), LANE_LIMITS.new);
  model.effects.advance(9_000);
  model.look();
  t.equal(model.total(), LANE_LIMITS.new, 'also while they are slow');
});

t.test('after a restart, webhooks that had succeeded do not wait for new ones that hang', async (t) => {
  const proven = { failing_since: null, last_success_at: 1 };
  const failing = { failing_since: 2, last_success_at: 1 };
  const model = outbox({ histories: { proven, failing } });
  const hanging = Array.from({ length: 500 }, (_, index) => ({ id: `new${index}`, count: 1 }));
  model.replace([...hanging, { id: 'waiting', count: 10, ...proven }]);
  model.look();
  t.equal(model.underWay('waiting'), LANE_LIMITS.perWebhook);
  t.equal(model.total(), LANE_LIMITS.perWebhook + LANE_LIMITS.new);
  // Nor do those that had nothing to be sent when davit was started.
  for (const id of ['proven', 'failing']) model.add(id, 10);
  model.look();
  t.equal(model.underWay('proven'), LANE_LIMITS.perWebhook);
  t.equal(model.underWay('failing'), 1);
});

t.test('webhooks that fail hold a quarter of the slots, one each', async (t) => {
  const model = outbox();
  const ids = Array.from({ length: 200 }, (_, index) => `dead${index}`);
  model.replace(ids.map((id) => ({ id, count: 1_000, failing_since: 0 })));
  for (let look = 0; look < 10; look++) {
    model.look();
    model.effects.advance(100);
  }
  t.equal(model.total(), LANE_LIMITS.share);
  t.ok(ids.every((id) => model.underWay(id) <= 1));
});

t.test('new and failing webhooks that hang leave slots to others, however many they are', async (t) => {
  const model = outbox();
  const ids = (name: string) => Array.from({ length: 300 }, (_, index) => `${name}${index}`);
  model.replace([
    ...ids('new').map((id) => ({ id, count: 1 })),
    ...ids('dead').map((id) => ({ id, count: 1, failing_since: 0 })),
  ]);
  for (let look = 0; look < 10; look++) {
    model.look();
    model.effects.advance(100);
  }
  t.equal(model.total(), LANE_LIMITS.unproven);
});

t.test('webhooks that answer slowly hold a quarter of the slots', async (t) => {
  const model = outbox();
  const ids = model.proven(100);
  for (const id of ids) model.add(id, 1);
  model.look();
  model.effects.advance(2_000);
  for (const id of ids) model.end(id, 'succeeded');
  for (const id of ids) model.add(id, 100);
  model.look();
  t.equal(model.total(), LANE_LIMITS.share);
});

t.test('an attempt counts as slow after a second, and a quick answer resets that', async (t) => {
  for (const how of ['succeeded', 'failed'] as const) {
    // One slow attempt fills the share of the slow: a webhook that is has no more beside it.
    const model = outbox({ limits: { ...LANE_LIMITS, total: 16, share: 1 } });
    const [id = ''] = model.proven(1);
    model.add(id, 10);
    model.look(1);
    t.equal(model.underWay(id), 1);
    model.effects.advance(999);
    model.look(0, 1);
    t.equal(model.underWay(id), 2);
    model.effects.advance(1);
    model.look();
    t.equal(model.underWay(id), 2, 'the first is slow now');
    model.end(id, how);
    model.look();
    t.equal(model.underWay(id), 1, `as its last attempt was, which ${how}`);
    model.end(id, 'succeeded');
    model.look();
    t.equal(model.underWay(id), 4);
  }
});

t.test('the end of a slow attempt does not keep a later one from counting as slow', async (t) => {
  const model = outbox({ limits: { ...LANE_LIMITS, total: 16, share: 1 } });
  const [slow = ''] = model.proven(1);
  const [quick = ''] = model.proven(2);
  model.add(slow, 1);
  model.look();
  model.effects.advance(1_000);
  model.look();
  model.add(quick, 1);
  model.look();
  model.end(slow, 'succeeded');
  model.effects.advance(1_000);
  model.add(quick, 9);
  model.look();
  t.equal(model.underWay(quick), 1, 'the later attempt is slow, too');
});

t.test('a hundred quick receivers that all begin to hang at once leave slots for others', async (t) => {
  const model = outbox();
  const hanging = model.proven(100);
  const [quick = ''] = model.proven(1);
  for (const id of hanging) model.add(id, 1_000);
  for (let look = 0; look < 10; look++) {
    model.look();
    model.effects.advance(50);
  }
  model.add(quick, 1);
  model.look();
  t.equal(model.underWay(quick), 1);
});

/** How many keys have a hundred webhooks each whose receivers hang, and what these did before. */
const HANGING = {
  'of five keys that are new': [5, () => {}],
  'of five keys that failed before': [
    5,
    (model, ids) => {
      const failing_since = model.effects.now();
      model.replace(ids.map((id) => ({ id, count: 1_000, failing_since })));
    },
  ],
  'of five keys that answered slowly': [5, (model, ids) => model.succeedAll(ids, 2_000)],
  'of a key that answered quickly': [1, (model, ids) => model.succeedAll(ids)],
} satisfies Record<string, [keys: number, before: (model: Outbox, ids: readonly string[]) => void]>;

for (const [name, [keys, before]] of Object.entries(HANGING)) {
  t.test(`webhooks ${name} and hang leave slots to those of another`, async (t) => {
    const model = outbox();
    const hanging = Array.from(
      { length: keys * WEBHOOKS_OF_KEY_MAX },
      (_, index) => `key${Math.floor(index / WEBHOOKS_OF_KEY_MAX)}/${index}`,
    );
    before(model, hanging);
    model.succeed('other/proven');
    model.succeed('other/slow', 2_000);
    model.replace([{ id: 'other/failing', count: 0, failing_since: model.effects.now() }]);
    for (const id of hanging) model.add(id, 1_000);
    for (let look = 0; look < 20; look++) {
      model.look();
      model.effects.advance(100);
    }
    t.ok(model.total() > 0);
    for (const standing of ['new', 'proven', 'slow', 'failing']) {
      model.add(`other/${standing}`, 1);
      model.look();
      t.equal(model.underWay(`other/${standing}`), 1, standing);
    }
  });
}

t.test('all new webhooks of a key are tried at once, however many of them hang', async (t) => {
  const model = outbox();
  const ids = Array.from({ length: WEBHOOKS_OF_KEY_MAX }, (_, index) => `key/${index}`);
  for (const id of ids) model.add(id, 1_000);
  model.look();
  t.ok(ids.every((id) => model.underWay(id) === 1));
  for (const id of ids) model.end(id, 'failed');
  model.effects.advance(100);
  for (let look = 0; look < 10; look++) {
    model.look();
    model.effects.advance(100);
  }
  t.equal(model.total(), 51, 'and once they have failed, half of them');
});

t.test('keys take turns, and within a key its webhooks', async (t) => {
  const model = outbox();
  const ids = ['one/a', 'one/b', 'one/c', 'two/a', 'two/b', 'three/a'];
  for (const id of ids) model.add(id, 1);
  const begun: string[][] = [];
  for (let look = 0; look < 3; look++) {
    const before = ids.filter((id) => model.underWay(id) > 0);
    model.look(2, 0);
    begun.push(ids.filter((id) => model.underWay(id) > 0 && !before.includes(id)));
  }
  t.strictSame(begun, [
    ['one/a', 'two/a'],
    ['one/b', 'three/a'],
    ['one/c', 'two/b'],
  ]);
});

t.test('an endless backlog of quick receivers leaves turns to slow and failing ones', async (t) => {
  const model = outbox();
  const quick = Array.from({ length: WEBHOOKS_OF_KEY_MAX }, (_, index) => `key/${index}`);
  model.succeedAll(quick);
  model.succeed('other/slow', 2_000);
  model.replace([{ id: 'other/failing', count: 0, failing_since: model.effects.now() }]);
  for (const id of [...quick, 'other/slow', 'other/failing']) model.add(id, 100_000);
  for (let look = 0; look < 1_000; look++) {
    model.look(64, 2);
    for (const id of quick) while (model.underWay(id) > 0) model.end(id, 'succeeded');
    if (model.underWay('other/failing') > 0) model.end('other/failing', 'failed');
    if (look % 100 === 99 && model.underWay('other/slow') > 0) model.end('other/slow', 'succeeded');
    model.effects.advance(10);
  }
  t.ok(model.begun('other/failing') > 400, `${model.begun('other/failing')} probes in 10 s`);
  t.ok(model.begun('other/slow') > 10, `${model.begun('other/slow')} slow attempts`);
});

t.test('the slots of a turn that came to nothing are free again', async (t) => {
  const model = outbox();
  const ids = model.proven(300);
  for (const id of ids) model.add(id, 1);
  model.lanes.turns(model.effects.now(), MANY, MANY); // and its claim fails
  t.strictSame(model.lanes.turns(model.effects.now(), MANY, MANY), []);
  model.lookAtAll();
  while (model.look() > 0);
  t.equal(model.total(), LANE_LIMITS.total);
});

t.test('a proven webhook fails three times before it is probed, a new one once', async (t) => {
  const model = outbox();
  const [proven = ''] = model.proven(1);
  model.add(proven, 100);
  for (let failures = 1; failures <= 3; failures++) {
    model.look();
    t.equal(model.underWay(proven), LANE_LIMITS.perWebhook);
    model.end(proven, 'failed');
  }
  model.look();
  t.equal(model.underWay(proven), 3, 'those that were under way');

  model.add('new', 100);
  model.look();
  model.end('new', 'failed');
  model.look();
  t.equal(model.underWay('new'), 0, 'not at once');
  model.effects.advance(10);
  model.look();
  t.equal(model.underWay('new'), 1);
});

t.test('a failing webhook is probed less often the longer it fails, at least every 5 s', async (t) => {
  const model = outbox();
  model.add('dead', 100_000);
  const begunAfter = (durationMs: number) => {
    const begun = model.begun('dead');
    for (let elapsedMs = 0; elapsedMs < durationMs; elapsedMs += 5) {
      model.look();
      while (model.underWay('dead') > 0) model.end('dead', 'failed');
      model.effects.advance(5);
    }
    return model.begun('dead') - begun;
  };
  t.equal(begunAfter(10_000), 1_000);
  t.ok(begunAfter(50_000) < 1_900);
  model.effects.advance(24 * 60 * 60_000);
  t.equal(begunAfter(20_000), 4);
});

t.test('after one success, a webhook that failed for days has four slots again', async (t) => {
  const model = outbox();
  model.replace([{ id: 'dead', count: 1_000, failing_since: 0 }]);
  model.look();
  t.equal(model.underWay('dead'), 1);
  model.end('dead', 'succeeded');
  model.look();
  t.equal(model.underWay('dead'), LANE_LIMITS.perWebhook);
});

t.test('all failing webhooks together start at most 500 attempts a second', async (t) => {
  const model = outbox();
  const ids = Array.from({ length: 1_000 }, (_, index) => `dead${index}`);
  model.replace(ids.map((id) => ({ id, count: 1_000, failing_since: model.effects.now() })));
  for (let elapsedMs = 0; elapsedMs < 2_000; elapsedMs += 10) {
    model.look();
    for (const id of ids) while (model.underWay(id) > 0) model.end(id, 'failed');
    model.effects.advance(10);
  }
  const begun = ids.map((id) => model.begun(id));
  const total = begun.reduce((sum, count) => sum + count, 0);
  t.ok(total >= 990 && total <= 1_060, `${total}`);
  t.equal(Math.min(...begun), 1, 'webhooks take turns');
});

t.test('failing webhooks are looked at again once one of them may be probed, and not before', async (t) => {
  const model = outbox();
  const { lanes, effects } = model;
  const ids = Array.from({ length: 60 }, (_, index) => `key/dead${index}`);
  model.replace(ids.map((id) => ({ id, count: 1_000, failing_since: effects.now() })));
  const nextAfterMs = () => (lanes.nextTurnAtMs(effects.now()) ?? 0) - effects.now();
  model.look();
  t.equal(model.total(), 50);
  t.equal(nextAfterMs(), 2);
  effects.advance(2);
  model.look();
  t.equal(model.total(), 51, 'the share of their key');
  t.equal(nextAfterMs(), 8, 'when the first one may be probed again');
});

t.test('a webhook whose attempts are not recorded starts at most 64', async (t) => {
  const model = outbox({ recording: false });
  model.add('a', 1_000);
  const carryOut = () => {
    model.look();
    while (model.underWay('a') > 0) model.end('a', 'succeeded');
  };
  for (let look = 0; look < 1_000; look++) carryOut();
  t.equal(model.begun('a'), 64);
  model.record();
  carryOut();
  t.equal(model.begun('a'), 65, 'each that is recorded lets another one start');
  model.effects.advance(60 * 60_000 + 1);
  model.lookAtAll();
  model.add('a', 1);
  carryOut();
  t.equal(model.begun('a'), 65, 'they are not forgotten either');
});

t.test('all webhooks together have at most 4,096 attempts unrecorded', async (t) => {
  const model = outbox({ recording: false });
  const ids = Array.from({ length: 200 }, (_, index) => `a${index}`);
  for (const id of ids) model.add(id, 1_000);
  for (let look = 0; look < 1_000; look++) {
    model.look();
    for (const id of ids) while (model.underWay(id) > 0) model.end(id, 'succeeded');
  }
  t.equal(
    ids.reduce((sum, id) => sum + model.begun(id), 0),
    4_096,
  );
});

t.test('the next look is when the next webhook is due, whichever was added first', async (t) => {
  const effects = fakeEffects();
  const lanes = createLanes(effects, () => NOTHING_HAPPENED);
  const nowMs = effects.now();
  t.equal(lanes.nextTurnAtMs(nowMs), null);
  lanes.schedule('b' as WebhookId, nowMs + 2_000, nowMs);
  lanes.schedule('a' as WebhookId, nowMs + 1_000, nowMs);
  lanes.schedule('a' as WebhookId, nowMs + 3_000, nowMs);
  t.equal(lanes.nextTurnAtMs(nowMs), nowMs + 1_000);
  t.strictSame(lanes.turns(nowMs + 999, MANY, MANY), []);
  t.match(lanes.turns(nowMs + 1_000, MANY, MANY), [{ lane: { webhookId: 'a' }, slots: 1 }]);
  t.equal(lanes.nextTurnAtMs(nowMs + 1_000), nowMs + 2_000);
});

t.test('sleeping webhooks are woken when they are due', async (t) => {
  const effects = fakeEffects();
  const lanes = createLanes(effects, () => NOTHING_HAPPENED);
  const nowMs = effects.now();
  for (const [index, id] of ['a', 'b', 'c', 'd'].entries()) {
    lanes.schedule(id as WebhookId, nowMs + 1_000 * (index + 1), nowMs);
  }
  for (const [index, id] of ['a', 'b', 'c', 'd'].entries()) {
    const atMs = nowMs + 1_000 * (index + 1);
    t.match(lanes.turns(atMs, MANY, MANY), [{ lane: { webhookId: id } }]);
    t.equal(lanes.nextTurnAtMs(atMs), index === 3 ? null : atMs + 1_000);
  }
});

t.test('recorded attempts are no longer under way, in whichever order they are recorded', async (t) => {
  const effects = fakeEffects();
  const succeeded = { ...NOTHING_HAPPENED, last_success_at: 1 };
  const lanes = createLanes(effects, () => succeeded);
  lanes.schedule('a' as WebhookId, effects.now(), effects.now());
  const { lane } = firstTurn(lanes, effects.now());
  const [one, two, three] = [1, 2, 3].map((seq) => lanes.begin(lane, seq, effects.now()));
  const left: number[][] = [];
  for (const slot of [two, one, three] as TakenSlot[]) {
    lanes.end(slot, 'succeeded', effects.now());
    lanes.recorded(slot, effects.now());
    left.push([...lane.underWay].sort());
  }
  t.strictSame(left, [[1, 3], [3], []]);
});

t.test('deliveries looked up ahead are forgotten when the pending ones are replaced', async (t) => {
  const effects = fakeEffects();
  const lanes = createLanes(effects, () => NOTHING_HAPPENED);
  const pending = pendingOne('a', effects.now());
  lanes.replace([pending], effects.now());
  const turn = firstTurn(lanes, effects.now());
  turn.lane.ahead.push(1, 2);
  lanes.finishTurn(turn.lane, effects.now(), effects.now());
  t.strictSame(lanes.turns(effects.now(), MANY, MANY)[0]?.lane.ahead, [1, 2]);
  lanes.replace([pending], effects.now());
  t.strictSame(turn.lane.ahead, []);
});

t.test('a webhook with nothing pending is not looked at, and is forgotten after an hour', async (t) => {
  const effects = fakeEffects();
  const lanes = createLanes(effects, () => NOTHING_HAPPENED);
  const id = 'a' as WebhookId;
  lanes.schedule(id, effects.now() + 1_000, effects.now());
  lanes.replace([], effects.now());
  t.equal(lanes.nextTurnAtMs(effects.now()), null);

  const succeed = () => {
    lanes.schedule(id, effects.now(), effects.now());
    const turn = firstTurn(lanes, effects.now());
    const slot = lanes.begin(turn.lane, 1, effects.now());
    lanes.finishTurn(turn.lane, null, effects.now());
    lanes.end(slot, 'succeeded', effects.now());
    lanes.recorded(slot, effects.now());
    return turn.slots;
  };
  t.equal(succeed(), 1);
  effects.advance(60 * 60_000);
  lanes.replace([], effects.now());
  t.equal(succeed(), 4, 'remembered');
  effects.advance(60 * 60_000 + 1);
  lanes.replace([], effects.now());
  t.equal(succeed(), 1, 'forgotten');
});

t.test('a webhook that waits more than an hour for a retry is not forgotten', async (t) => {
  const model = outbox();
  const [id = ''] = model.proven(1);
  const retryAtMs = model.effects.now() + 2 * 60 * 60_000;
  model.lanes.schedule(id as WebhookId, retryAtMs, model.effects.now());
  model.effects.advance(60 * 60_000 + 1);
  model.lanes.replace([pendingOne(id, retryAtMs)], model.effects.now());
  model.effects.advance(60 * 60_000);
  model.lanes.schedule(id as WebhookId, model.effects.now(), model.effects.now());
  const turns = model.lanes.turns(model.effects.now(), MANY, MANY);
  t.match(turns, [{ lane: { webhookId: id }, slots: 4 }]);
  t.equal(turns.length, 1, 'a new event has no turn of its own, which would send the retry twice');
});

t.test('a webhook whose failures were reset is healthy once its last attempt is recorded', async (t) => {
  const effects = fakeEffects();
  const lanes = createLanes(effects, () => NOTHING_HAPPENED);
  const pending = pendingOne('a', effects.now());
  lanes.replace([pending], effects.now());
  const turn = firstTurn(lanes, effects.now());
  const slot = lanes.begin(turn.lane, 1, effects.now());
  lanes.end(slot, 'failed', effects.now());
  lanes.replace([pending], effects.now());
  t.equal(turn.lane.failures, 1, 'as this one is not recorded yet');
  lanes.recorded(slot, effects.now());
  lanes.replace([pending], effects.now());
  t.equal(turn.lane.failures, 0);
  t.match(lanes.turns(effects.now(), MANY, MANY), [{ lane: { webhookId: 'a' } }], 'it is no more probed');
});

t.test('setting the clock back does not keep a failing webhook from being probed', async (t) => {
  const effects = fakeEffects();
  const failing = { ...NOTHING_HAPPENED, failing_since: effects.now() };
  const lanes = createLanes(effects, () => failing);
  lanes.replace([pendingOne('a', effects.now(), failing)], effects.now());
  const turn = firstTurn(lanes, effects.now());
  const slot = lanes.begin(turn.lane, 1, effects.now());
  lanes.end(slot, 'failed', effects.now());
  lanes.recorded(slot, effects.now());
  effects.jump(-3_600_000);
  lanes.replace([pendingOne('a', effects.now(), failing)], effects.now());
  effects.advance(5_000);
  t.match(lanes.turns(effects.now(), MANY, MANY), [{ lane: { webhookId: 'a' } }]);
});

t.test('nor an event of one that had nothing pending when the clock was set back', async (t) => {
  const effects = fakeEffects();
  const lanes = createLanes(effects, () => ({ ...NOTHING_HAPPENED, failing_since: effects.now() }));
  const webhookId = 'a' as WebhookId;
  lanes.schedule(webhookId, effects.now(), effects.now());
  const { lane } = firstTurn(lanes, effects.now());
  const slot = lanes.begin(lane, 1, effects.now());
  lanes.finishTurn(lane, null, effects.now());
  lanes.end(slot, 'failed', effects.now());
  lanes.recorded(slot, effects.now());
  effects.jump(-3_600_000);
  lanes.replace([], effects.now());
  lanes.schedule(webhookId, effects.now(), effects.now());
  effects.advance(5_000);
  t.match(lanes.turns(effects.now(), MANY, MANY), [{ lane: { webhookId } }]);
});

t.test('in any sequence of events the limits hold, and all that is due is started in the end', async () => {
  const limits = { perWebhook: 4, total: 16, share: 4, new: 8, unproven: 9 };
  const ids = Array.from({ length: 12 }, (_, index) => `key${index % 3}/${index}`);
  const step = fc.oneof(
    fc.record({
      kind: fc.constant('add' as const),
      id: fc.constantFrom(...ids),
      count: fc.integer({ min: 1, max: 6 }),
    }),
    fc.record({ kind: fc.constant('look' as const), freshMax: fc.nat(20), behindMax: fc.nat(20) }),
    fc.record({
      kind: fc.constant('end' as const),
      id: fc.constantFrom(...ids),
      how: fc.constantFrom<SlotEnd>('succeeded', 'failed'),
    }),
    fc.record({ kind: fc.constant('advance' as const), byMs: fc.constantFrom(1, 60, 1_100) }),
    fc.record({ kind: fc.constant('lookAtAll' as const) }),
  );
  fc.assert(
    fc.property(fc.array(step, { maxLength: 120 }), (steps) => {
      const model = outbox({ limits });
      for (const step of steps) {
        switch (step.kind) {
          case 'add':
            model.add(step.id, step.count);
            break;
          case 'look':
            model.look(step.freshMax, step.behindMax);
            break;
          case 'end':
            if (model.underWay(step.id) > 0) model.end(step.id, step.how);
            break;
          case 'advance':
            model.effects.advance(step.byMs);
            break;
          case 'lookAtAll':
            model.lookAtAll();
            break;
          default:
            step satisfies never;
        }
        if (model.total() > limits.total) return false;
        if (model.ids().some((id) => model.underWay(id) > limits.perWebhook)) return false;
      }
      for (let look = 0; look < 300 && model.ids().some((id) => model.pending(id) > 0); look++) {
        model.look();
        for (const id of model.ids()) while (model.underWay(id) > 0) model.end(id, 'succeeded');
        model.effects.advance(60);
      }
      return model.ids().every((id) => model.pending(id) === 0);
    }),
  );
});

function firstTurn(lanes: Lanes, nowMs: number): Turn {
  const [turn] = lanes.turns(nowMs, MANY, MANY);
  if (turn === undefined) throw new Error('no turn');
  return turn;
}

function pendingOne(id: string, atMs: number, history?: Partial<WebhookHistory>): PendingWebhook {
  return {
    webhook_id: id as WebhookId,
    next_attempt_at: atMs,
    last_attempt_at: atMs,
    ...newOf(id),
    ...history,
  };
}

/** Of a new webhook. Those of one key have ids that begin alike, `key/webhook`; any other has a key of its own. */
function newOf(id: string): WebhookHistory {
  return { ...NOTHING_HAPPENED, key_id: id.replace(/\/.*/, '') as KeyId };
}

type Outbox = ReturnType<typeof outbox>;

/** Lanes over an outbox that is a number for each webhook, all of it due. */
function outbox({
  limits = LANE_LIMITS,
  recording = true,
  histories = {} as Record<string, Partial<WebhookHistory>>,
} = {}) {
  const effects: FakeEffects = fakeEffects();
  const lanes: Lanes = createLanes(effects, (id) => ({ ...newOf(id), ...histories[id] }), limits);
  const pendingOf = new Map<string, number>();
  const begunOf = new Map<string, number>();
  const slotsOf = new Map<string, TakenSlot[]>();
  const unrecorded: TakenSlot[] = [];
  let lastSeq = 0;

  const underWay = (id: string) => slotsOf.get(id)?.length ?? 0;
  const pending = (id: string) => pendingOf.get(id) ?? 0;

  return {
    effects,
    lanes,
    underWay,
    pending,
    begun: (id: string) => begunOf.get(id) ?? 0,
    ids: () => [...pendingOf.keys()],
    total: () => [...slotsOf.values()].reduce((sum, slots) => sum + slots.length, 0),
    add,
    look,
    lookAtAll,
    replace(rows: ({ id: string; count: number } & Partial<WebhookHistory>)[]) {
      for (const { id, count } of rows) pendingOf.set(id, count);
      lanes.replace(
        rows.map(({ id, count: _, ...history }) => pendingOne(id, effects.now(), history)),
        effects.now(),
      );
    },
    end,
    /** What `recording` false has left undone: records the attempt that ended first. */
    record(): void {
      const slot = unrecorded.shift();
      if (slot === undefined) throw new Error('nothing is unrecorded');
      lanes.recorded(slot, effects.now());
    },
    succeed,
    succeedAll,
    /** Webhooks that have just answered well. */
    proven(count: number): string[] {
      const ids = Array.from({ length: count }, (_, index) => `proven${count}-${index}`);
      succeedAll(ids);
      begunOf.clear();
      return ids;
    },
  };

  function succeedAll(ids: readonly string[], afterMs = 0): void {
    for (const id of ids) succeed(id, afterMs);
  }

  /** The webhook answers one attempt well. */
  function succeed(id: string, afterMs = 0): void {
    add(id, 1);
    look();
    effects.advance(afterMs);
    end(id, 'succeeded');
  }

  function add(id: string, count: number): void {
    pendingOf.set(id, pending(id) + count);
    lanes.schedule(id as WebhookId, effects.now(), effects.now());
  }

  /** Returns how many turns there were. */
  function look(freshMax = MANY, behindMax = MANY): number {
    const turns = lanes.turns(effects.now(), freshMax, behindMax);
    for (const { lane, slots } of turns) claim(lane, slots);
    return turns.length;
  }

  /** As the dispatcher does. */
  function claim(lane: Lane, slots: number): void {
    const id = lane.webhookId;
    const claimed = Math.min(slots, pending(id));
    for (let count = 0; count < claimed; count++) {
      lastSeq += 1;
      slotsOf.set(id, [...(slotsOf.get(id) ?? []), lanes.begin(lane, lastSeq, effects.now())]);
    }
    pendingOf.set(id, pending(id) - claimed);
    begunOf.set(id, (begunOf.get(id) ?? 0) + claimed);
    lanes.finishTurn(lane, pending(id) > 0 ? effects.now() : null, effects.now());
  }

  function lookAtAll(): void {
    lanes.replace(
      [...pendingOf].flatMap(([id, count]) => (count === 0 ? [] : [pendingOne(id, effects.now())])),
      effects.now(),
    );
  }

  function end(id: string, how: SlotEnd): void {
    const [slot, ...rest] = slotsOf.get(id) ?? [];
    if (slot === undefined) throw new Error(`nothing of ${id} is under way`);
    slotsOf.set(id, rest);
    lanes.end(slot, how, effects.now());
    if (recording) lanes.recorded(slot, effects.now());
    else unrecorded.push(slot);
  }
}
