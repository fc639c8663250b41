import t from 'tap';
import { realEffects } from '../src/effects.ts';
import { lagHistogram, watchLag } from '../src/event-loop.ts';
import { ownCells } from '../src/metric-cells.ts';
import { until } from './helpers/commands.ts';
import { stayAlive } from './helpers/effects.ts';

t.test('the lag of an event loop shows for how long its thread was blocked', async (t) => {
  stayAlive(t);
  const beganAtMs = realEffects.monotonicMs();
  const lag = lagHistogram(ownCells, 'http');
  const loop = watchLag(lag, realEffects);
  t.teardown(loop.stop);
  const read = (suffix: string) => lag.samples().find((sample) => sample.suffix === suffix)?.value ?? 0;
  await until(() => read('_count') > 0);
  const [count, sum] = [read('_count'), read('_sum')];
  realEffects.block(400);
  await until(() => read('_count') > count);
  // It was held up for 300 ms beyond the moment for which its timer was set, or more.
  const lagSeconds = read('_sum') - sum;
  t.ok(lagSeconds >= 0.295, `${lagSeconds} s`);
  t.ok(lagSeconds <= (realEffects.monotonicMs() - beganAtMs) / 1000, 'in seconds');
});
