import t from 'tap';
import { putLatest } from '../src/latest.ts';

t.test('the latest entries are kept, and an entry that is put again is the latest', async (t) => {
  const map = new Map<string, number>();
  for (const [value, key] of ['a', 'b', 'a', 'c'].entries()) putLatest(map, key, value, 2);
  t.strictSame(
    [...map],
    [
      ['a', 2],
      ['c', 3],
    ],
  );
});
