import t from 'tap';
import type { KeyId } from '../../src/domain.ts';
import { pageOf, search } from '../../src/store/list-page.ts';

const KEY = 'key_one' as KeyId;

t.test('a page goes on at its last row only if there are more rows behind it', async (t) => {
  const rows = [4, 5, 6].map((seq) => ({ seq }));
  const page = (limit: number) => pageOf(rows, limit, ({ seq }) => `row ${seq}`);
  t.strictSame(page(2), { items: ['row 4', 'row 5'], goOnAt: 5 });
  t.strictSame(page(3), { items: ['row 4', 'row 5', 'row 6'], goOnAt: null });
  t.strictSame(pageOf([], 2, String), { items: [], goOnAt: null });
});

t.test(
  'a search reads its first slice as lists are read, and others in spare turns, until it has enough',
  async (t) => {
    let reads: string[] = [];
    const searching = {
      inTurn: async <Result>(task: () => Result) => {
        reads.push('turn');
        return task();
      },
      inSpareTurn: async <Result>(task: () => Result) => {
        reads.push('spare turn');
        return task();
      },
    };
    const slice = (beforeSeq: number) => ({
      rows: [beforeSeq],
      endSeq: beforeSeq === 1 ? null : beforeSeq - 1,
    });
    t.strictSame(await search(slice, KEY, 5, 3, searching), { rows: [5, 4, 3], endSeq: 2 });
    t.strictSame(reads, ['turn', 'spare turn', 'spare turn']);
    reads = [];
    t.strictSame(await search(slice, KEY, 2, 9, searching), { rows: [2, 1], endSeq: null });
    t.strictSame(reads, ['turn', 'spare turn']);
  },
);

t.test('a search ends when its time is over, but not before it has read a slice', async (t) => {
  const found = async (msForEach: number) => {
    let ms = 0;
    const slice = (beforeSeq: number) => {
      ms += msForEach;
      return { rows: [], endSeq: beforeSeq - 1 };
    };
    return await search(slice, KEY, 9, 1, { monotonicMs: () => ms });
  };
  t.strictSame(await found(400), { rows: [], endSeq: 6 });
  t.strictSame(await found(5_000), { rows: [], endSeq: 8 });
});

t.test('a search whose time is over when its turn comes reads nothing more', async (t) => {
  let ms = 0;
  const slice = (beforeSeq: number) => ({ rows: [beforeSeq], endSeq: beforeSeq - 1 });
  const inSpareTurn = async <Result>(task: () => Result) => {
    ms += 1_000; // others had their turns
    return task();
  };
  t.strictSame(await search(slice, KEY, 9, 3, { inSpareTurn, monotonicMs: () => ms }), {
    rows: [9],
    endSeq: 8,
  });
});
