import { linkSync, readFileSync } from 'node:fs';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { refuseOtherNames } from '../../src/store/other-names.ts';
import { dumpFile } from '../helpers/files.ts';
import { filledFile } from '../helpers/filled.ts';

t.test('a file with two hard links is refused while it is open, and free afterwards', async (t) => {
  const path = filledFile(t, 'PRAGMA journal_mode = WAL');
  const before = dumpFile(path);
  const another = `${path}.link`;
  const open = new Sqlite(path);
  open.exec('BEGIN; SELECT * FROM instance');
  refuseOtherNames(path);
  linkSync(path, another);
  t.throws(() => refuseOtherNames(another), {
    code: 'conflict',
    message:
      /\.link has another name too, a hard link, and another process has the file open: stop that first/,
  });
  const release = lockForServing(path, process.pid, realEffects);
  t.doesNotThrow(() => refuseOtherNames(path), 'it is served by this name');
  release();
  open.close();
  for (const name of [another, path]) {
    refuseOtherNames(name);
    const free = new Sqlite(name, { timeout: 0 });
    free.exec('BEGIN EXCLUSIVE; ROLLBACK');
    free.close();
  }
  t.strictSame(dumpFile(path), before);
});

t.test("another program's file is refused as it is, also with two hard links", async (t) => {
  const path = filledFile(t, 'PRAGMA application_id = 1; PRAGMA journal_mode = WAL');
  linkSync(path, `${path}.link`);
  const before = readFileSync(path);
  t.throws(() => refuseOtherNames(path), { code: 'conflict', message: /is not a davit file/ });
  t.ok(before.equals(readFileSync(path)));
});
