import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { openForWriting } from '../../src/store/database.ts';
import { createMoments, createReadCache } from '../../src/store/read-cache.ts';
import { openStore } from '../../src/store/store.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a moment lasts until any commit, by whomever', async (t) => {
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
  t.not(second, first, 'of another connection');
  database.exec('UPDATE instance SET probes = probes + 1');
  t.equal(moment(), second, 'in the same turn it is the same');
  await nextTurn();
  t.not(moment(), second, 'of its own');
});

t.test('what was read at a moment is remembered at that moment', (t) => {
  const remembered = createReadCache<number>();
  let reads = 0;
  const read = () => {
    reads += 1;
    return reads;
  };
  t.strictSame([remembered(1, 'a', read), remembered(1, 'a', read), remembered(1, 'b', read)], [1, 1, 2]);
  t.strictSame([remembered(2, 'a', read), remembered(2, 'a', read)], [3, 3]);
  t.throws(() => remembered(2, 'c', failing), { message: 'nothing' });
  t.equal(remembered(2, 'c', read), 4);
  for (let number = 0; number < 1_000; number++) remembered(2, String(number), read);
  reads = 0;
  t.equal(remembered(2, 'a', read), 1, 'only so many');
  t.end();
});

function failing(): number {
  throw new Error('nothing');
}
