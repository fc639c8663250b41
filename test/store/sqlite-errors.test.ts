import fs from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { openingProblem } from '../../src/store/sqlite-errors.ts';
import { mountinfoLine } from '../helpers/mounts.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('where a network file system lacks what SQLite needs, the error says so', async (t) => {
  const directory = temporaryDirectory(t);
  const path = join(directory, 'davit.db');
  const real = fs.readFileSync;
  t.teardown(() => replaceRead(real));
  for (const [type, code] of [
    ['cifs', 'SQLITE_BUSY'],
    ['9p', 'SQLITE_IOERR_SHMMAP'],
  ] as const) {
    replaceRead(() => mountinfoLine(directory, type));
    t.match(openingProblem(path, new Sqlite.SqliteError('it failed', code)), {
      code: 'conflict',
      message: new RegExp(
        `^cannot use ${path} \\(it failed\\): .* \\(${type}\\), .*: keep it on a local disk$`,
      ),
    });
  }
  replaceRead(real);
  const busy = new Sqlite.SqliteError('database is locked', 'SQLITE_BUSY');
  t.equal(openingProblem(path, busy), busy, 'on a local disk another process has locked it');
});

function replaceRead(readFileSync: (...words: never[]) => unknown): void {
  Object.assign(fs, { readFileSync });
  syncBuiltinESMExports();
}
