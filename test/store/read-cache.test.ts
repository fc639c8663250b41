import { stat } from 'node:fs/promises';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { openForWriting } from '../../src/store/database.ts';
import { createMoments, createReadCache } from '../../src/store/read-cache.ts';
import { openStore } from '../../src/store/store.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a moment lasts until a commit of any connection', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const database = openForWriting(path, realEffects);
  const other = openStore(path, realEffects);
  t.teardown(async () => {
    database.close();
    await other.close();
  });
  const moment = createMoments(database);
  const first = moment();
  t.equal(moment(), first);
  await other.writer.write('instance.probe', undefined);
  const second = moment();
  t.not(second, first, 'after a commit of another connection');
  database.exec('UPDATE instance SET probes = probes + 1');
  t.equal(moment(), second, 'it stays the same until the end of the turn');
  await nextTurn();
  t.not(moment(), second, 'after a commit of its own');
});

t.test('a moment that was taken at the end of a turn is over when the next one begins', async (t) => {
  const database = openForWriting(`${temporaryDirectory(t)}/davit.db`, realEffects);
  t.teardown(() => database.close());
  const moment = createMoments(database);
  await nextTurn();
  const first = moment();
  database.exec('UPDATE instance SET probes = probes + 1');
  await stat('/'); // the next turn's requests come in where this does
  t.not(moment(), first);
});

t.test('what was read is remembered for its moment only', (t) => {
  let now = 1;
  const remembered = createReadCache<number>(() => now);
  let reads = 0;
  const read = () => {
    reads += 1;
    return reads;
  };
  t.strictSame([remembered('a', read), remembered('a', read), remembered('b', read)], [1, 1, 2]);
  now = 2;
  t.strictSame([remembered('a', read), remembered('a', read)], [3, 3]);
  t.throws(() => remembered('c', failing), { message: 'nothing' });
  t.equal(remembered('c', read), 4);
  for (let number = 0; number < 1_000; number++) remembered(String(number), read);
  reads = 0;
  t.equal(remembered('a', read), 1, 'only so many are remembered');
  t.end();
});

function failing(): number {
  throw new Error('nothing');
}
