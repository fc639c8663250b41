import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { copyDatabase } from '../../src/store/backup.ts';
import { filledFile } from '../helpers/filled.ts';
import { makeLarge } from '../helpers/large.ts';
import { ifMayMount, onSmallDisk } from '../helpers/small-disk.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const BACKUP = join(import.meta.dirname, '../../src/store/backup.ts');

t.test('in a copy each attempt keeps its rowid, which an open replay compares', async (t) => {
  const path = filledFile(t, 'UPDATE attempts SET rowid = 7; UPDATE replays SET last_attempt = 7');
  const copy = join(temporaryDirectory(t), 'copy.db');
  t.match(copyDatabase(path, copy, { onBegin() {}, onCopied() {} }), { kind: 'good' });
  const database = new Sqlite(copy);
  t.teardown(() => database.close());
  t.equal(database.prepare('SELECT rowid FROM attempts').pluck().get(), 7);
});

t.test('a disk that is full by the end of a copy is no fault of the file', ifMayMount, async (t) => {
  const directory = temporaryDirectory(t);
  makeLarge(join(directory, 'davit.db'), 8);
  mkdirSync(join(directory, 'small'));
  const copy = `
    import { copyDatabase } from '${BACKUP}';
    try {
      copyDatabase('small/davit.db', 'small/copy.db', { onBegin() {}, onCopied() {} });
    } catch ({ code, cause }) {
      console.log(code, cause.code);
    }`;
  const { stdout, stderr } = await onSmallDisk(directory, 'small', '12m', [
    'cp davit.db small/davit.db; touch small/copy.db',
    `"$0" --input-type=module -e "${copy}"`,
  ]);
  t.strictSame([stdout, stderr], ['SQLITE_FULL SQLITE_FULL\n', '']);
});
