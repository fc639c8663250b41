import { execFile } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statfsSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import t from 'tap';
import {
  alternate,
  figureRow,
  rowAgainst,
  rowAtLeast,
  rowAtMost,
  rowBelow,
  rowMissing,
  samplesOf,
} from '../../scripts/bench/measure.ts';
import { table } from '../../scripts/bench/report.ts';
import { median, percentile, summarize } from '../../scripts/bench/statistics.ts';
import { ifHas } from '../helpers/programs.ts';

const execute = promisify(execFile);
const MAIN = join(import.meta.dirname, '../../scripts/bench/main.ts');

t.test('the median is the middle value in any order', async (t) => {
  t.equal(median([9, 1, 5]), 5);
  t.equal(median([9, 1, 5, 7]), 6);
  t.equal(median([4]), 4);
  t.strictSame(summarize([10, 2, 9]), { median: 9, min: 2, max: 10 });
});

t.test('a percentile is one of the measured values', async (t) => {
  const hundred = Array.from({ length: 100 }, (_, index) => 100 - index);
  t.equal(percentile(hundred, 99), 99);
  t.equal(percentile(hundred, 50), 50);
  t.equal(percentile(hundred, 100), 100);
  t.equal(percentile([3, 1, 2], 99), 3);
  t.equal(percentile([7], 50), 7);
});

t.test('contenders alternate, and the rehearsal is not counted', async (t) => {
  const order: string[] = [];
  const contender = (name: string) => ({
    name,
    run: async () => {
      order.push(name);
      return { perSecond: order.length };
    },
  });
  const results = await alternate(
    { rounds: 2, progress: () => undefined },
    [contender('a'), contender('b')],
    { rehearse: true },
  );
  t.strictSame(order, ['a', 'b', 'a', 'b', 'a', 'b']);
  t.strictSame(samplesOf(results, 'a', 'perSecond'), [3, 5]);
  t.strictSame(samplesOf(results, 'b', 'perSecond'), [4, 6]);
  t.throws(() => samplesOf(results, 'c', 'perSecond'));
});

t.test('a value exactly on its target reaches it', async (t) => {
  const reached = (row: { target?: { reached: boolean } }) => row.target?.reached;
  t.equal(reached(rowAgainst([60], 'limit', '/s', [100], 0.6)), true);
  t.equal(reached(rowAgainst([59], 'limit', '/s', [100], 0.6)), false);
  t.equal(reached(rowBelow('p99', 'ms', [14.9], 15)), true);
  t.equal(reached(rowBelow('p99', 'ms', [15], 15)), false);
  t.equal(reached(rowAtMost([10], 'with', 'ms', [30], 3)), true);
  t.equal(reached(rowAtMost([10], 'with', 'ms', [31], 3)), false);
  t.equal(reached(rowAtLeast('beside', 'times', [0.8], 0.8)), true);
  t.equal(reached(rowAtLeast('beside', 'times', [0.7], 0.8)), false);
});

t.test('the table shows every figure, its ratio, its target, and what was skipped', async (t) => {
  const own = [15_000, 14_000, 16_000];
  const rows = [
    figureRow('davit', '/s', own),
    rowBelow('davit, p99', 'ms', [12, 20, 13.25], 15),
    rowAgainst(own, 'bare', '/s', [30_000, 29_000, 31_000], 0.6),
    rowMissing({ name: 'peer', missing: 'not installed' }),
  ];
  t.equal(
    table('created deployments', rows),
    [
      'created deployments',
      '                median        min – max  ratio  to reach',
      '  davit       15,000/s  14,000 – 16,000',
      '  davit, p99   13.3 ms      12.0 – 20.0         < 15 ms   reached',
      '  bare        30,000/s  29,000 – 31,000   0.50  ≥ 0.6     falls short',
      '  peer         skipped',
      '  peer: not installed',
    ].join('\n'),
  );
});

const BUILD = join(import.meta.dirname, '../../build');

/** It refuses a disk in memory, and without strip(1) the executable is larger than it should be. */
const ifMeasurable = [0x01021994, 0x858458f6].includes(statfsSync(BUILD).type)
  ? { skip: 'build/ lies in memory' }
  : ifHas('strip');

t.test('a benchmark run prints the table and leaves only the figures', ifMeasurable, async (t) => {
  const directory = mkdtempSync(join(BUILD, 'bench-test-'));
  t.teardown(() => rmSync(directory, { recursive: true }));
  const output = join(directory, 'bench.json');
  const data = join(directory, 'data');
  const words = ['--quick', '--only', 'executable', '--data-dir', data, '--output', output];
  const { stdout, stderr } = await execute(process.execPath, [MAIN, ...words]);
  t.equal(stderr, '');
  t.match(stdout, /^\d+ cores of .*, Linux .*, data on /m);
  t.match(stdout, /^ {2}build\/davit +\d+ MB +< 116 MB +reached$/m);
  t.match(stdout, /^1 reached, 0 fall short, 0 skipped; /m);
  t.match(JSON.parse(readFileSync(output, 'utf8')), {
    machine: { cores: Number, node: process.version },
    measures: [{ name: 'executable', rows: [{ samples: [Number], target: { reached: true } }] }],
  });
  t.strictSame(readdirSync(data), []);
});

t.test('an unknown measure is refused, and --list shows those that exist', async (t) => {
  const refused = await execute(process.execPath, [MAIN, '--only', 'everything']).catch((error) => error);
  t.match(refused, { code: 2, stderr: /there is no measure everything: see --list/ });
  const { stdout } = await execute(process.execPath, [MAIN, '--list']);
  for (const name of ['accept', 'deliveries', 'commands', 'memory'])
    t.match(stdout, new RegExp(`^${name} `, 'm'));
});
