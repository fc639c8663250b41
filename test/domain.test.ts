import t from 'tap';
import {
  DEPLOYMENT_STATUSES,
  isTerminal,
  newId,
  optionalTimestamp,
  parseId,
  randomBase62,
  timestamp,
} from '../src/domain.ts';
import { fakeEffects } from './helpers/effects.ts';

/** In the order of their bytes. */
const BASE62 = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';

t.test('an id begins with its time, so that ids sort by time, and the rest is random', async (t) => {
  const effects = fakeEffects();
  const ids = Array.from({ length: 200 }, () => {
    effects.advance(1);
    return newId('dpl', effects);
  });
  t.strictSame(ids.toSorted(), ids);
  for (const id of ids) t.match(id, /^dpl_[0-9A-Za-z]{24}$/);
  const parts = ids.map((id) => [id.slice(0, 11), id.slice(11)] as const);
  t.equal(new Set(parts.map(([time]) => time)).size, ids.length);
  const again = newId('dpl', effects);
  t.equal(again.slice(0, 11), parts.at(-1)?.[0]);
  t.not(again.slice(11), parts.at(-1)?.[1]);

  const untilYear = (year: number) => newId('dpl', fakeEffects(Date.UTC(year)));
  const years = [2026, 2027, 2040, 2060, 2080].map(untilYear);
  t.strictSame(years.toSorted(), years);
});

t.test('each character of a random text is equally likely', async (t) => {
  let next = 200;
  const everyByteInTurn = (size: number) => Uint8Array.from({ length: size }, () => next++ % 256);
  // The bytes from 248 on, in the middle of it, would favour some.
  const text = randomBase62(248, everyByteInTurn);
  t.equal([...text].sort().join(''), [...BASE62].map((character) => character.repeat(4)).join(''));
  t.equal(randomBase62(5, everyByteInTurn).length, 5);
});

t.test('parseId takes the prefix and 1 to 60 alphanumeric characters, and nothing else', async (t) => {
  for (const suffix of ['1', 'azAZ09', 'a'.repeat(60)])
    t.equal(parseId('prj', `prj_${suffix}`), `prj_${suffix}`);
  const others = [
    'prj_',
    'prj',
    'dpl_1',
    'prjx_1',
    'prj-1',
    'PRJ_1',
    ' prj_1',
    'prj_1 ',
    'prj_1\n',
    'prj_é',
    'prj__',
  ];
  for (const other of [...others, `prj_${'a'.repeat(61)}`, '', null, undefined, 1, ['prj_1']]) {
    t.equal(parseId('prj', other), undefined, String(other));
  }
});

t.test('succeeded, failed and canceled are the terminal statuses', async (t) => {
  t.strictSame(DEPLOYMENT_STATUSES.filter(isTerminal), ['succeeded', 'failed', 'canceled']);
});

t.test('a timestamp is in UTC with milliseconds, whichever was formatted before', async (t) => {
  for (const [atMs, text] of [
    [1_795_248_000_000, '2026-11-21T08:00:00.000Z'],
    [1_795_248_000_001, '2026-11-21T08:00:00.001Z'],
    [0, '1970-01-01T00:00:00.000Z'],
    [1_795_248_000_001, '2026-11-21T08:00:00.001Z'],
  ] as const) {
    t.equal(timestamp(atMs), text);
    t.equal(optionalTimestamp(atMs), text);
  }
  t.equal(optionalTimestamp(null), null);
});
