import { Worker } from 'node:worker_threads';
import t from 'tap';
import {
  createCounter,
  createGauge,
  createHistogram,
  newMetricsMemory,
  ownCells,
  sharedCells,
} from '../src/metric-cells.ts';

t.test('a histogram counts a value in the first bucket that holds it and in all above', async (t) => {
  const histogram = createHistogram(ownCells, { name: 'h', help: 'h', bounds: [1, 2.5] }, { a: 'b' });
  for (const value of [0, 1, 1.001, 2.5, 2.501, 1e9]) histogram.observe(value);
  t.strictSame(histogram.samples(), [
    { suffix: '_bucket', labels: { a: 'b', le: '1' }, value: 2 },
    { suffix: '_bucket', labels: { a: 'b', le: '2.5' }, value: 4 },
    { suffix: '_bucket', labels: { a: 'b', le: '+Inf' }, value: 6 },
    { suffix: '_sum', labels: { a: 'b' }, value: 1 + 1.001 + 2.5 + 2.501 + 1e9 },
    { suffix: '_count', labels: { a: 'b' }, value: 6 },
  ]);
});

t.test('a counter adds up, and a gauge is set and changed', async (t) => {
  const counter = createCounter(ownCells, { name: 'c_total', help: 'c' });
  counter.add();
  counter.add(2);
  const gauge = createGauge(ownCells, { name: 'g', help: 'g' });
  gauge.set(7);
  gauge.add(-2);
  t.match(counter.samples(), [{ value: 3, labels: {} }]);
  t.match(gauge.samples(), [{ value: 5 }]);
});

t.test('metrics that one thread counts can be read by another', async (t) => {
  const memory = newMetricsMemory();
  const cells = sharedCells(memory);
  const counter = createCounter(cells, { name: 'c_total', help: 'c' });
  const histogram = createHistogram(cells, { name: 'h', help: 'h', bounds: [1] });
  const worker = new Worker(
    `import { workerData } from 'node:worker_threads';
     const { createCounter, createHistogram, sharedCells } = await import(workerData.module);
     const cells = sharedCells(workerData.memory);
     createCounter(cells, { name: 'c_total', help: 'c' }).add(5);
     createHistogram(cells, { name: 'h', help: 'h', bounds: [1] }).observe(0.5);`,
    {
      eval: true,
      workerData: { memory, module: new URL('../src/metric-cells.ts', import.meta.url).href },
    },
  );
  await new Promise((resolve, reject) => worker.once('exit', resolve).once('error', reject));
  t.match(counter.samples(), [{ value: 5 }]);
  t.match(histogram.samples(), [{ value: 1 }, { value: 1 }, { value: 0.5 }, { value: 1 }]);
});

t.test('taking more metrics than the memory holds throws', async (t) => {
  const cells = sharedCells(newMetricsMemory());
  t.throws(() => cells.allocate(10_000), /more metrics than the memory/);
});
