import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { openReads, openStore } from '../../src/store/store.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('every probe is a commit, so that a disk which takes none is found out', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const store = openStore(path, realEffects);
  const other = openReads(path);
  t.teardown(async () => {
    other.close();
    await store.close();
  });
  const versions = new Set([other.reads.instance.dataVersion()]);
  for (let times = 0; times < 3; times++) {
    await store.writer.write('instance.probe', undefined);
    versions.add(other.reads.instance.dataVersion());
  }
  t.equal(versions.size, 4);
});

t.test('what is remembered of reads is forgotten at any commit, its own and those of others', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const [one, two] = [openStore(path, realEffects), openStore(path, realEffects)];
  t.teardown(async () => {
    await one.close();
    await two.close();
  });
  const remembered = one.reads.instance.readCache<number>();
  let reads = 0;
  const read = () => {
    reads += 1;
    return reads;
  };
  t.strictSame([remembered('a', read), remembered('a', read), remembered('b', read)], [1, 1, 2]);
  await one.writer.write('instance.probe', undefined);
  t.strictSame([remembered('a', read), remembered('a', read)], [3, 3]);
  await two.writer.write('instance.probe', undefined);
  t.strictSame([remembered('a', read), remembered('a', read)], [4, 4]);
  t.throws(() => remembered('c', () => failing()), { message: 'nothing' });
  t.equal(remembered('c', read), 5);
});

function failing(): number {
  throw new Error('nothing');
}
