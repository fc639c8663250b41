import t from 'tap';
import { pageOf } from '../../src/store/list-page.ts';

t.test('a page goes on at its last row only if there are more rows behind it', async (t) => {
  const rows = [4, 5, 6].map((seq) => ({ seq }));
  const page = (limit: number) => pageOf(rows, limit, ({ seq }) => `row ${seq}`);
  t.strictSame(page(2), { items: ['row 4', 'row 5'], goOnAt: 5 });
  t.strictSame(page(3), { items: ['row 4', 'row 5', 'row 6'], goOnAt: null });
  t.strictSame(pageOf([], 2, String), { items: [], goOnAt: null });
});
