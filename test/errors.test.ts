import { mkdirSync } from 'node:fs';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { codeOf, isStorageProblem, messageOf } from '../src/errors.ts';
import { unnamedErrors } from './helpers/unnamed-errors.ts';

t.test('an error is told by its code and its message', async (t) => {
  const missing = thrownBy(() => mkdirSync('/nowhere/below'));
  t.equal(codeOf(missing), 'ENOENT');
  t.equal(messageOf(missing), "ENOENT: no such file or directory, mkdir '/nowhere/below'");
  t.equal(codeOf(new Error('no code')), 'Error: no code');
  t.equal(codeOf('a text'), 'a text');
  t.equal(messageOf('a text'), 'a text');
});

t.test('an error that Node cannot name is named as errno(3) does', async (t) => {
  for (const [errno, name, text] of [
    [-122, 'EDQUOT', 'disk quota exceeded'],
    [-117, 'EUCLEAN', 'structure needs cleaning'],
    [-116, 'ESTALE', 'stale file handle'],
  ] as const) {
    const { made, written } = unnamedErrors(errno);
    t.strictSame([codeOf(made), codeOf(written)], [name, name]);
    t.equal(messageOf(made), `${name}: ${text}, mkdtemp '/tmp/x'`);
    t.equal(messageOf(written), `${name}: ${text}, write`);
  }
  const { made, written } = unnamedErrors(-999);
  t.strictSame([codeOf(made), messageOf(made)], [made.code, made.message]);
  t.strictSame([codeOf(written), messageOf(written)], ['UNKNOWN', written.message]);
});

t.test('what SQLite cannot do for a lock, the disk or the file is no bug', async (t) => {
  const isOne = (code: string) => isStorageProblem(new Sqlite.SqliteError('x', code));
  for (const code of ['SQLITE_BUSY_SNAPSHOT', 'SQLITE_IOERR_FSYNC', 'SQLITE_PROTOCOL', 'SQLITE_FULL'])
    t.ok(isOne(code), code);
  for (const code of ['SQLITE_ERROR', 'SQLITE_CONSTRAINT_UNIQUE', 'SQLITE_MISUSE'])
    t.notOk(isOne(code), code);
});

function thrownBy(action: () => void): unknown {
  try {
    action();
  } catch (error) {
    return error;
  }
  throw new Error('it throws nothing');
}
