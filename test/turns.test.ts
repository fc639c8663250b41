import t from 'tap';
import type { KeyId } from '../src/domain.ts';
import { realEffects } from '../src/effects.ts';
import { createTurns, TURN_MAX_MS } from '../src/turns.ts';
import { fakeEffects } from './helpers/effects.ts';

t.test(
  'looks that take long get a turn of the event loop each, in the order of their requests',
  async (t) => {
    t.strictSame(await turnsOfLooks([TURN_MAX_MS, TURN_MAX_MS + 1, TURN_MAX_MS]), [0, 1, 2]);
  },
);

t.test('looks that take little share a turn of the event loop until its time is used up', async (t) => {
  t.strictSame(await turnsOfLooks([1, 1, 1]), [0, 0, 0]);
  const most = TURN_MAX_MS - 1;
  t.strictSame(await turnsOfLooks([most, most, 0, most, 1, 0]), [0, 0, 1, 1, 1, 2]);
});

t.test('looks that may use less of each turn of the event loop take more turns', async (t) => {
  t.strictSame(await turnsOfLooks([1, 0.5, 0.5, 1], 1), [0, 1, 1, 2]);
});

t.test('keys take turns: many looks of one delay another for one look', async (t) => {
  const effects = fakeEffects();
  const inTurn = createTurns(effects);
  const looked: string[] = [];
  const look = (key: string, name: string) =>
    inTurn(() => {
      effects.advance(TURN_MAX_MS);
      looked.push(name);
    }, key as KeyId);
  await Promise.all([
    ...['a1', 'a2', 'a3', 'a4'].map((name) => look('key_a', name)),
    ...['b1', 'b2'].map((name) => look('key_b', name)),
    inTurn(() => looked.push('own'), null),
  ]);
  t.strictSame(looked, ['a1', 'a2', 'b1', 'own', 'a3', 'b2', 'a4']);
});

t.test('a single look does not wait', async (t) => {
  const inTurn = createTurns(realEffects);
  let turned = false;
  setImmediate(() => {
    turned = true;
  });
  await inTurn(() => undefined, null);
  t.equal(turned, false);
});

t.test('a look that fails does not keep the next one from running', async (t) => {
  const effects = fakeEffects();
  const inTurn = createTurns(effects);
  const first = inTurn(() => effects.advance(TURN_MAX_MS), null); // the others wait for their turn
  const failing = inTurn(() => {
    throw new Error('the disk is gone');
  }, null);
  const next = inTurn(() => 'seen', null);
  await t.rejects(failing, { message: 'the disk is gone' });
  t.equal(await next, 'seen');
  await first;
});

/** In which turn of the event loop each look ran; all were requested together, and take so long. */
async function turnsOfLooks(durationsMs: number[], turnMaxMs?: number): Promise<number[]> {
  const effects = fakeEffects();
  const inTurn = createTurns(effects, turnMaxMs);
  let turn = 0;
  // Asked for first, so that it counts before the looks go on.
  const counting = setImmediate(function count() {
    turn += 1;
    setImmediate(count).unref();
  });
  const looks = durationsMs.map((durationMs) =>
    inTurn(() => {
      effects.advance(durationMs);
      return turn;
    }, null),
  );
  const turns = await Promise.all(looks);
  clearImmediate(counting);
  return turns;
}
