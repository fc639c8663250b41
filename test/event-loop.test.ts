import t from 'tap';
import { realEffects } from '../src/effects.ts';
import { lagHistogram, watchLag } from '../src/event-loop.ts';
import { type Histogram, ownCells } from '../src/metric-cells.ts';
import { until } from './helpers/commands.ts';
import { fakeEffects, hurried, stayAlive } from './helpers/effects.ts';

t.test('the lag of an event loop shows for how long its thread was blocked', async (t) => {
  stayAlive(t);
  const beganAtMs = realEffects.monotonicMs();
  const lag = lagHistogram(ownCells, 'http');
  const loop = watchLag(lag, realEffects);
  t.teardown(loop.stop);
  await until(() => read(lag, '_count') > 0);
  const [count, sum] = [read(lag, '_count'), read(lag, '_sum')];
  realEffects.block(400);
  await until(() => read(lag, '_count') > count);
  // It was held up for 300 ms beyond the moment for which its timer was set, or more.
  const lagSeconds = read(lag, '_sum') - sum;
  t.ok(lagSeconds >= 0.295, `${lagSeconds} s`);
  t.ok(lagSeconds <= (realEffects.monotonicMs() - beganAtMs) / 1000, 'in seconds');
});

t.test('an event loop whose timers fire in time has no lag', async (t) => {
  const lag = lagHistogram(ownCells, 'http');
  const loop = watchLag(lag, hurried(fakeEffects()));
  t.teardown(loop.stop);
  await until(() => read(lag, '_count') > 2);
  t.equal(read(lag, '_sum'), 0);
});

function read(lag: Histogram, suffix: '_count' | '_sum'): number {
  return lag.samples().find((sample) => sample.suffix === suffix)?.value ?? 0;
}
