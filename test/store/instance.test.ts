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
