import fc from 'fast-check';
import parse from 'parse-prometheus-text-format';
import t from 'tap';
import { createHistogram, ownCells, readMetric } from '../../src/metric-cells.ts';
import { exposition } from '../../src/metrics/exposition.ts';

t.test('the text follows the Prometheus text format', async (t) => {
  const histogram = createHistogram(ownCells, { name: 'davit_h', help: 'Two\nlines, a \\.', bounds: [0.5] });
  histogram.observe(0.25);
  const text = exposition([
    readMetric('counter', { name: 'davit_c_total', help: 'A count.' }, [
      { labels: { a: 'x"y\\z\n', b: '' }, value: 1 },
    ]),
    histogram,
    readMetric('gauge', { name: 'davit_nothing', help: 'No series.' }, []),
    readMetric('counter', { name: 'davit_c_total', help: 'A count.' }, [
      { labels: { a: 'z', b: '' }, value: Number.POSITIVE_INFINITY },
    ]),
  ]);
  t.equal(
    text,
    [
      '# HELP davit_c_total A count.',
      '# TYPE davit_c_total counter',
      'davit_c_total{a="x\\"y\\\\z\\n",b=""} 1',
      'davit_c_total{a="z",b=""} +Inf',
      '# HELP davit_h Two\\nlines, a \\\\.',
      '# TYPE davit_h histogram',
      'davit_h_bucket{le="0.5"} 1',
      'davit_h_bucket{le="+Inf"} 1',
      'davit_h_sum 0.25',
      'davit_h_count 1',
      '',
    ].join('\n'),
  );
});

t.test('a parser reads every label and value back as it was', async (t) => {
  fc.assert(
    fc.property(
      fc.string({ unit: fc.constantFrom('a', '"', '\\', '\n', 'n', '{', '}', ',', '=', ' ', '☃') }),
      fc.double({ noNaN: true, noDefaultInfinity: true }),
      (label, value) => {
        const text = exposition([
          readMetric('gauge', { name: 'g', help: 'A label.' }, [{ labels: { label }, value }]),
        ]);
        const [family] = parse(text);
        const [metric] = family?.metrics ?? [];
        return metric?.labels?.['label'] === label && Object.is(Number(metric?.value) + 0, value + 0);
      },
    ),
  );
  t.pass();
});
