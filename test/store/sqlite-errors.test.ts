import fs from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { messageOf } from '../../src/errors.ts';
import { isDamaged, isLocked, openingProblem } from '../../src/store/sqlite-errors.ts';
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

t.test('what is wrong with a file is said in words', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const unwritable = `cannot write to ${path}: check that this user may write to it and its directory`;
  for (const [code, message] of [
    ['SQLITE_CANTOPEN', `cannot open ${path}: check that it exists and that this user may write there`],
    ['SQLITE_NOTADB', `${path} is not a davit file: choose another one with --db`],
    ['SQLITE_READONLY', unwritable],
    ['SQLITE_READONLY_DIRECTORY', unwritable],
    ['SQLITE_READONLY_DBMOVED', `${path} was replaced while it was opened: try again`],
  ] as const)
    t.equal(messageOf(openingProblem(path, failed(code))), message);
  const unloadable = Object.assign(new Error('no GLIBC_2.34'), { code: 'ERR_DLOPEN_FAILED' });
  t.match(openingProblem(path, unloadable), {
    code: 'conflict',
    message: /^SQLite cannot be loaded \(no GLIBC_2\.34\): davit needs glibc 2\.34 /,
  });
  for (const error of [failed('SQLITE_ERROR'), new TypeError('a bug')])
    t.equal(openingProblem(path, error), error, 'others are bugs');
});

t.test('a lack of room beside a file is told from other reasons why it cannot be used', async (t) => {
  const [directory, elsewhere] = [temporaryDirectory(t), temporaryDirectory(t)];
  const [path, link] = [join(directory, 'davit.db'), join(elsewhere, 'davit.db')];
  fs.writeFileSync(path, '');
  fs.symlinkSync(path, link);
  const real = fs.statfsSync;
  t.teardown(() => replace({ statfsSync: real }));
  const inodes = /: its disk has no room for further files \(inodes\)/;
  const full = /: its disk is full: make room$/;
  const other = /^cannot open /;
  for (const [files, ffree, blocks, message] of [
    [100, 2, 8, other],
    [100, 1, 8, inodes],
    [100, 2, 7, full],
    [0, 0, 8, other], // as btrfs, which has no number of inodes
  ] as const) {
    const statfsSync = (asked: string) => {
      t.equal(asked, directory);
      return { files, ffree, bavail: blocks, bfree: blocks, bsize: 4_096 };
    };
    replace({ statfsSync });
    t.match(messageOf(openingProblem(link, failed('SQLITE_CANTOPEN'))), message);
    if (message === other) continue;
    for (const code of ['SQLITE_FULL', 'SQLITE_IOERR_WRITE'])
      t.match(messageOf(openingProblem(link, failed(code))), message, code);
    t.match(messageOf(openingProblem(link, failed('SQLITE_NOTADB'))), /is not a davit file/);
  }
  replace({ statfsSync: real });
  t.match(messageOf(openingProblem(join(directory, 'no/davit.db'), failed('SQLITE_CANTOPEN'))), other);
});

t.test('damage and locks have several codes', async (t) => {
  for (const code of ['SQLITE_NOTADB', 'SQLITE_CORRUPT', 'SQLITE_CORRUPT_INDEX', 'SQLITE_FULL'])
    t.equal(isDamaged(failed(code)), code !== 'SQLITE_FULL', code);
  for (const code of ['SQLITE_BUSY', 'SQLITE_BUSY_RECOVERY', 'SQLITE_FULL'])
    t.equal(isLocked(failed(code)), code !== 'SQLITE_FULL', code);
});

function failed(code: string): Error {
  return new Sqlite.SqliteError('it failed', code);
}

function replaceRead(readFileSync: (...words: never[]) => unknown): void {
  replace({ readFileSync });
}

function replace(functions: object): void {
  Object.assign(fs, functions);
  syncBuiltinESMExports();
}
