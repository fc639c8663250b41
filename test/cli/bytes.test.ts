import t from 'tap';
import { formatBytes } from '../../src/cli/bytes.ts';

t.test('sizes are shown in decimal units', async (t) => {
  for (const [bytes, text] of [
    [0, '0 B'],
    [1, '1 B'],
    [999, '999 B'],
    [1_000, '1.0 kB'],
    [196_608, '196.6 kB'],
    [231_900_000, '231.9 MB'],
    [81_400_000_000, '81.4 GB'],
    [5e18, '5000.0 PB'],
  ] as const) {
    t.equal(formatBytes(bytes), text);
  }
});
