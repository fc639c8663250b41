import t from 'tap';
import { createStopTime } from '../src/stop-time.ts';
import { fakeEffects } from './helpers/effects.ts';

t.test('all waits of a stop together end within 27.5 s of its begin, however late it begins', async (t) => {
  const effects = fakeEffects();
  const { begin, atMost } = createStopTime(effects);
  effects.advance(60_000);
  t.equal(atMost(1_500), 1_500, 'a start that is told to stop has all of the time');
  begin();
  effects.advance(26_000);
  t.equal(atMost(1_000), 1_000);
  t.equal(atMost(2_500), 1_500);
  effects.advance(2_000);
  t.equal(atMost(1_000), 0);
});
