import t from 'tap';
import { latestOf } from '../../src/cli/lists.ts';

t.test('a list reads only as many pages as its limit needs', async (t) => {
  for (const pageMax of [1, 2, 3, 100]) {
    for (let limit = 1; limit <= 7; limit++) {
      const { page, asked } = listOf(6, pageMax);
      const name = `${limit} in pages of ${pageMax}`;
      const items = [6, 5, 4, 3, 2, 1].slice(0, limit);
      t.strictSame(await latestOf(limit, page), { items, isAll: limit >= 6 }, name);
      t.strictSame(
        asked,
        asked.map((_, index) => limit + 1 - index * pageMax),
        `${name}: one more than is shown tells whether there are more`,
      );
    }
  }
});

t.test('an empty page of a rare filter does not end the list', async (t) => {
  const pages = [
    { items: [], goOnAt: 7 },
    { items: ['found'], goOnAt: 3 },
    { items: [], goOnAt: null },
  ];
  const asked: number[] = [];
  const found = await latestOf(1, (beforeSeq) => {
    asked.push(beforeSeq);
    return pages.shift() ?? { items: ['never'], goOnAt: null };
  });
  t.strictSame(found, { items: ['found'], isAll: true });
  t.strictSame(asked, [Number.MAX_SAFE_INTEGER, 7, 3]);
});

t.test('a long list is read in pages of 1,000', async (t) => {
  const { page, asked } = listOf(2_600, 1_000);
  const { items, isAll } = await latestOf(2_500, page);
  t.equal(items.length, 2_500);
  t.notOk(isAll);
  t.strictSame(asked, [1_000, 1_000, 501]);
});

/** As many as `count` items, the newest first, of which a page has `pageMax` at most, and as many as are asked for. */
function listOf(count: number, pageMax: number) {
  const asked: number[] = [];
  const page = (beforeSeq: number, limit: number) => {
    asked.push(limit);
    const newest = Math.min(beforeSeq - 1, count);
    const oldest = Math.max(1, newest + 1 - Math.min(limit, pageMax));
    const items = Array.from({ length: newest + 1 - oldest }, (_, index) => newest - index);
    return { items, goOnAt: oldest === 1 ? null : oldest };
  };
  return { page, asked };
}
