import t from 'tap';
import { fromNow, tookText } from '../../src/cli/moments.ts';
import { timestamp } from '../../src/domain.ts';

const NOW_MS = Date.parse('2026-11-21T08:00:00.000Z');

t.test('a time is shown relative to now in its largest unit, rounded towards now', async (t) => {
  const cases: [awayMs: number, text: string][] = [
    [0, 'now'],
    [-999, 'now'],
    [999, 'now'],
    [-1_000, '1s ago'],
    [-59_999, '59s ago'],
    [-60_000, '1m ago'],
    [-3_599_999, '59m ago'],
    [-3_600_000, '1h ago'],
    [-86_400_000, '1d ago'],
    [-364 * 86_400_000, '364d ago'],
    [-800 * 86_400_000, '2y ago'],
    [5_000, 'in 5s'],
    [90 * 86_400_000, 'in 90d'],
  ];
  for (const [awayMs, text] of cases) t.equal(fromNow(timestamp(NOW_MS + awayMs), NOW_MS), text);
});

t.test('how long something took is told in milliseconds below a second', async (t) => {
  const texts = [0, 999, 1_000, 90_000].map(tookText);
  t.strictSame(texts, ['0ms', '999ms', '1s', '1m30s']);
});
