import t from 'tap';
import { pageOf, search } from '../../src/store/list-page.ts';

t.test('a page goes on at its last row only if there are more rows behind it', async (t) => {
  const rows = [4, 5, 6].map((seq) => ({ seq }));
  const page = (limit: number) => pageOf(rows, limit, ({ seq }) => `row ${seq}`);
  t.strictSame(page(2), { items: ['row 4', 'row 5'], goOnAt: 5 });
  t.strictSame(page(3), { items: ['row 4', 'row 5', 'row 6'], goOnAt: null });
  t.strictSame(pageOf([], 2, String), { items: [], goOnAt: null });
});

t.test('a search reads each slice in a turn of its own, until it has found enough', async (t) => {
  let turn = 0;
  const counting = setImmediate(function count() {
    turn += 1;
    setImmediate(count).unref();
  });
  t.teardown(() => clearImmediate(counting));
  let readIn: number[] = [];
  const slice = (beforeSeq: number) => {
    readIn.push(turn);
    return { rows: [beforeSeq], endSeq: beforeSeq === 1 ? null : beforeSeq - 1 };
  };
  t.strictSame(await search(slice, 5, 3), { rows: [5, 4, 3], endSeq: 2 });
  t.equal(new Set(readIn).size, 3);
  readIn = [];
  t.strictSame(await search(slice, 5, 9), { rows: [5, 4, 3, 2, 1], endSeq: null });
  t.equal(new Set(readIn).size, 5);
});

t.test('a search ends when its time is over, but not before it has read a slice', async (t) => {
  const found = async (msForEach: number) => {
    let ms = 0;
    const slice = (beforeSeq: number) => {
      ms += msForEach;
      return { rows: [], endSeq: beforeSeq - 1 };
    };
    return await search(slice, 9, 1, { monotonicMs: () => ms });
  };
  t.strictSame(await found(400), { rows: [], endSeq: 6 });
  t.strictSame(await found(5_000), { rows: [], endSeq: 8 });
});
