import t from 'tap';
import { createClockHistory, createWatchedClock } from '../src/clock.ts';
import { fakeEffects } from './helpers/effects.ts';

t.test('setting the wall clock is reported once, at the next reading, by how much', async (t) => {
  for (const byMs of [-3_600_000, 3_600_000]) {
    const effects = fakeEffects();
    const steps: number[] = [];
    const now = createWatchedClock(effects, (stepMs) => steps.push(stepMs));
    effects.advance(60_000);
    effects.jump(byMs);
    effects.advance(250);
    t.equal(now(), effects.now());
    t.strictSame(steps, [byMs]);
    effects.advance(1_000);
    now();
    t.strictSame(steps, [byMs]);
  }
});

t.test('a setting is dated as the reading that notices it, although time goes on', async (t) => {
  const fake = fakeEffects();
  const effects = {
    ...fake,
    now() {
      fake.advance(1);
      return fake.now();
    },
  };
  const noticedAtMs: number[] = [];
  const now = createWatchedClock(effects, (_, atMs) => noticedAtMs.push(atMs));
  fake.jump(3_600_000);
  t.strictSame([now()], noticedAtMs);
});

t.test('elapsed time and a slewed clock are not reported', async (t) => {
  const effects = fakeEffects();
  effects.advance(86_400_000);
  const now = createWatchedClock(effects, () => t.fail('it was not set'));
  effects.advance(86_400_000);
  t.equal(now(), effects.now());
  for (const byMs of [500, -500]) {
    for (let step = 0; step < 100; step++) {
      effects.jump(byMs);
      t.equal(now(), effects.now());
    }
  }
});

t.test('since() tells how much of the time since a moment was set, and never passed', async (t) => {
  const settings = createClockHistory([]);
  t.equal(settings.since(0), 0);
  settings.add(500, 2_000);
  settings.add(-200, 2_300);
  t.equal(settings.since(1_000), 300);
  t.equal(settings.since(2_100), -200, 'after the first setting');
  t.equal(settings.since(2_300), 0);
  t.equal(settings.since(2_299), 0, 'a ladder is dated a millisecond before its first attempt');
  t.equal(settings.since(2_298), -200);
  settings.add(90_000, 100_000);
  t.equal(settings.since(9_000), 90_000);
  settings.add(-90_000, 11_000);
  t.equal(settings.since(9_000), 0, 'set ahead and back again');
  t.equal(settings.since(12_000), 0, 'also later');
  for (let count = 0; count < 100; count++) settings.add(1, 10_000);
  t.equal(settings.since(1_000), 100, 'the latest hundred are remembered');
  const before = { atMs: 5_000, byMs: 700 };
  t.equal(createClockHistory([before]).since(4_998), 700, 'and earlier ones that were given');
});

t.test('recent() gives the recent settings with their age in elapsed time', async (t) => {
  const settings = createClockHistory([]);
  settings.add(-50, 1_000);
  settings.add(10_000, 11_500);
  settings.add(-10_000, 1_700);
  t.strictSame(settings.recent(1_000, 1_900), [
    { atMs: 1_000, byMs: -50, agoMs: 900 },
    { atMs: 11_500, byMs: 10_000, agoMs: 400 },
    { atMs: 1_700, byMs: -10_000, agoMs: 200 },
  ]);
  t.strictSame(settings.recent(400, 1_900), [{ atMs: 1_700, byMs: -10_000, agoMs: 200 }]);
});

t.test('saidTwice() tells what the clock was set back past in the last while', async (t) => {
  const settings = createClockHistory([]);
  settings.add(-90_000, 100_000);
  settings.add(20_000, 130_000);
  const twice = (saidMs: number, nowMs = 140_000) => settings.saidTwice(saidMs, 60_000, nowMs);
  t.strictSame(
    [99_998, 99_999, 140_000, 190_000].map((saidMs) => twice(saidMs)),
    [false, true, true, true],
  );
  t.notOk(twice(192_000), 'it never said that');
  t.ok(twice(120_000, 179_999));
  t.notOk(twice(120_000, 180_000), 'that is too long ago');
});
