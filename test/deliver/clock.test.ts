import t from 'tap';
import { createWatchedClock } from '../../src/deliver/clock.ts';
import { fakeEffects } from '../helpers/effects.ts';

t.test('a clock that is set back is noticed once, at the next reading, by how much', async (t) => {
  const effects = fakeEffects();
  const setBacks: number[] = [];
  const now = createWatchedClock(effects, (byMs) => setBacks.push(byMs));
  effects.advance(60_000);
  effects.jump(-3_600_000);
  effects.advance(250);
  t.equal(now(), effects.now());
  t.strictSame(setBacks, [3_600_000]);
  effects.advance(1_000);
  now();
  t.strictSame(setBacks, [3_600_000]);
});

t.test('time that passes, a clock that is set forward and one that is slewed are believed', async (t) => {
  const effects = fakeEffects();
  const now = createWatchedClock(effects, () => t.fail('nothing was set back'));
  effects.advance(86_400_000);
  t.equal(now(), effects.now());
  effects.jump(3_600_000);
  t.equal(now(), effects.now());
  for (let step = 0; step < 100; step++) {
    effects.jump(-500);
    t.equal(now(), effects.now());
  }
});
