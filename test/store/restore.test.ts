import { spawn } from 'node:child_process';
import { once } from 'node:events';
import fs, {
  chownSync,
  closeSync,
  copyFileSync,
  existsSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { basename, join } from 'node:path';
import { text } from 'node:stream/consumers';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { realEffects } from '../../src/effects.ts';
import { AppError, codeOf } from '../../src/errors.ts';
import { connect, openForWriting } from '../../src/store/database.ts';
import { adoptedBytes, adoptFile, replaceDatabase, runningIn } from '../../src/store/restore.ts';
import { COMPILE_CACHE, MAIN } from '../helpers/cli.ts';
import { diskCallsOf } from '../helpers/disk-calls.ts';
import { changeFile } from '../helpers/files.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a file that anybody has open is not replaced, even if nobody reads or writes just now', async (t) => {
  const { directory, path, replacement } = files(t);
  const other = openForWriting(path, realEffects);
  const before = readFileSync(path);
  t.throws(() => replaceDatabase(path, replacement, `${path}.before`), new AppError('conflict', ''));
  other.close();
  t.strictSame(readFileSync(path), before);
  t.strictSame(readdirSync(directory).sort(), ['davit.db', 'new']);
});

t.test('the old file is locked while the new one is put in its place', async (t) => {
  const { path, replacement } = files(t);
  writeFileSync(`${path}-lock`, '');
  const { renameSync: rename } = fs;
  const met: unknown[] = [];
  fs.renameSync = (from, to) => {
    const other = new Sqlite(path, { timeout: 0 });
    try {
      other.prepare('SELECT * FROM projects').all();
    } catch (error) {
      met.push(codeOf(error));
    } finally {
      other.close();
    }
    rename(from, to);
  };
  syncBuiltinESMExports();
  try {
    t.ok(replaceDatabase(path, replacement, `${path}.before`));
  } finally {
    fs.renameSync = rename;
    syncBuiltinESMExports();
  }
  t.strictSame(met, ['SQLITE_BUSY']);
});

t.test('an empty file is replaced, but no other file that is not davit’s', async (t) => {
  for (const sql of [
    'CREATE TABLE songs (title TEXT)',
    'PRAGMA user_version = 1',
    'PRAGMA application_id = 1; CREATE TABLE songs (title TEXT)',
  ]) {
    const { directory, path, replacement } = files(t);
    rmSync(path);
    changeFile(path, sql);
    const before = readFileSync(path);
    t.throws(() => replaceDatabase(path, replacement, `${path}.before`), new AppError('conflict', ''), sql);
    t.strictSame(readFileSync(path), before);
    t.strictSame(readdirSync(directory).sort(), ['davit.db', 'new']);
  }
  const { path, replacement } = files(t);
  writeFileSync(path, '');
  writeFileSync(`${path}-lock`, '');
  t.ok(replaceDatabase(path, replacement, `${path}.before`));
  t.equal(statSync(`${path}.before`).size, 0);
  openForWriting(path, realEffects).close();
});

t.test('a power cut leaves the old file or the new one, and nothing of the old beside the new', async (t) => {
  const { directory, path, replacement } = files(t);
  const folder = basename(directory);
  writeFileSync(`${path}-lock`, ''); // the command that restores holds it
  const replaced = () =>
    diskCallsOf(() =>
      t.ok(replaceDatabase(path, replacement, `${path}.before`), 'there is something to keep'),
    );
  t.strictSame(replaced(), [
    'sync new',
    'link davit.db davit.db.before',
    'remove davit.db-shm',
    `sync ${folder}`,
    'rename new davit.db',
    `sync ${folder}`,
  ]);
  openForWriting(`${path}.before`, realEffects).close(); // it is not locked any more
  rmSync(`${path}.before`);

  copyFileSync(path, replacement);
  const restored = readFileSync(replacement);
  rmSync(path);
  for (const side of ['-wal', '-journal', '-shm']) writeFileSync(path + side, 'of a file that is gone');
  t.strictSame(replaced(), [
    'sync new',
    'rename davit.db-wal davit.db.before-wal',
    'rename davit.db-journal davit.db.before-journal',
    'remove davit.db-shm',
    `sync ${folder}`,
    'link new davit.db',
    'remove new',
    `sync ${folder}`,
  ]);
  for (const side of ['-wal', '-journal']) {
    t.equal(readFileSync(`${path}.before${side}`, 'utf8'), 'of a file that is gone');
  }
  t.strictSame(readFileSync(path), restored);
});

t.test('on a file system without hard links a copy of the old file is kept', async (t) => {
  const { directory, path, replacement } = files(t);
  writeFileSync(`${path}-lock`, '');
  const old = readFileSync(path);
  const { ino } = statSync(path);
  const descriptor = openSync(path, 'r'); // while it is open, no file of another test gets its inode number
  t.teardown(() => closeSync(descriptor));
  const isLocked = () => readFileSync('/proc/locks', 'utf8').includes(`:${ino} `);
  const { renameSync: rename } = fs;
  let wasLocked = false;
  fs.renameSync = (from, to) => {
    wasLocked = isLocked();
    rename(from, to);
  };
  try {
    const calls = diskCallsOf(() => replaceDatabase(path, replacement, `${path}.before`), {
      linkSync: 'EPERM',
    });
    t.strictSame(calls.slice(0, 3), ['sync new', 'link davit.db davit.db.before', 'sync davit.db.before']);
  } finally {
    fs.renameSync = rename;
    syncBuiltinESMExports();
  }
  t.ok(wasLocked, 'the old file was locked meanwhile');
  t.notOk(isLocked());
  const afterHeader = (bytes: Buffer) => bytes.subarray(100); // which counts who writes
  t.strictSame(afterHeader(readFileSync(`${path}.before`)), afterHeader(old));
  t.equal(statSync(`${path}.before`).mode & 0o777, 0o600);
  rmSync(path);
  copyFileSync(`${path}.before`, replacement);
  diskCallsOf(() => replaceDatabase(path, replacement, `${path}.before`), { linkSync: 'EPERM' });
  t.strictSame(readdirSync(directory).sort(), ['davit.db', 'davit.db-lock', 'davit.db.before']);
});

t.test('a file is not replaced if the old one cannot be kept', async (t) => {
  const { directory, path, replacement } = files(t);
  writeFileSync(`${path}-lock`, '');
  const before = readFileSync(path);
  const failing = { linkSync: 'ENOSPC' };
  t.throws(() => diskCallsOf(() => replaceDatabase(path, replacement, `${path}.before`), failing), {
    code: 'ENOSPC',
  });
  t.strictSame(readdirSync(directory).sort(), ['davit.db', 'davit.db-lock', 'new']);
  const afterHeader = (bytes: Buffer) => bytes.subarray(100); // which counts who writes
  t.strictSame(afterHeader(readFileSync(path)), afterHeader(before));
});

t.test('a restore that fails keeps no second copy of the file that is still in place', async (t) => {
  for (const failing of [{ renameSync: 'EIO' }, { renameSync: 'EIO', linkSync: 'EPERM' }]) {
    const { directory, path, replacement } = files(t);
    writeFileSync(`${path}-lock`, '');
    t.throws(() => diskCallsOf(() => replaceDatabase(path, replacement, `${path}.before`), failing), {
      code: 'EIO',
    });
    t.strictSame(readdirSync(directory).sort(), ['davit.db', 'davit.db-lock', 'new']);
    openForWriting(path, realEffects).close();
  }

  const { directory, path, replacement } = files(t);
  const writer = openForWriting(path, realEffects);
  writer.exec('CREATE TABLE more (name TEXT)');
  const wal = readFileSync(`${path}-wal`);
  writer.close();
  writeFileSync(path, 'rubbish'.repeat(1_000));
  writeFileSync(`${path}-wal`, wal);
  writeFileSync(`${path}-lock`, '');
  const { renameSync: rename } = fs;
  fs.renameSync = (from, to) => {
    if (from === replacement) throw new Error('not renamed');
    rename(from, to);
  };
  syncBuiltinESMExports();
  try {
    t.throws(() => replaceDatabase(path, replacement, `${path}.before`), { message: 'not renamed' });
  } finally {
    fs.renameSync = rename;
    syncBuiltinESMExports();
  }
  t.strictSame(readdirSync(directory).sort(), ['davit.db', 'davit.db-lock', 'davit.db-wal', 'new']);
  t.strictSame(readFileSync(`${path}-wal`), wal);
});

t.test('root gives the new file to the owner of the old one or the directory', ifMayBeNobody(), async (t) => {
  const { directory, path, replacement } = files(t);
  writeFileSync(`${path}-lock`, '');
  chownSync(path, 65_534, 65_533);
  t.ok(replaceDatabase(path, replacement, `${path}.before`));
  for (const name of [path, `${path}-lock`]) t.match(statSync(name), { uid: 65_534, gid: 65_533 });

  chownSync(directory, 65_532, 65_531);
  copyFileSync(path, replacement);
  rmSync(path);
  t.notOk(replaceDatabase(path, replacement, `${path}.before-that`));
  for (const name of [path, `${path}-lock`]) t.match(statSync(name), { uid: 65_532, gid: 65_531 });
});

t.test(
  'a process that waits for the old file while it is replaced writes to neither and fails with the cause',
  async (t) => {
    const { directory, path, replacement } = files(t);
    // What replaceDatabase holds while it renames.
    const holder = connect(path);
    holder.pragma('journal_mode = DELETE');
    holder.exec('BEGIN EXCLUSIVE');
    const late = spawn(
      process.execPath,
      [MAIN, 'admin', 'project', 'create', '--name', 'late', '--db', path],
      {
        env: COMPILE_CACHE,
        stdio: ['ignore', 'ignore', 'pipe'],
      },
    );
    const stderr = text(late.stderr);
    const ended = once(late, 'exit');
    while (!hasOpen(late.pid, path)) await Promise.race([new Promise(setImmediate), ended]);
    renameSync(replacement, path);
    holder.close();
    t.strictSame(await ended, [1, null]);
    t.match(await stderr, /^error: .*davit\.db was replaced while it was opened: try again\n$/);
    t.strictSame(readdirSync(directory).sort(), ['davit.db']);
    const database = openForWriting(path, realEffects);
    t.equal(database.prepare('SELECT count(*) FROM projects').pluck().get(), 0);
    t.equal(database.pragma('integrity_check', { simple: true }), 'ok');
    database.close();
  },
);

t.test('adoptFile copies a file and its WAL byte for byte, readable by its owner alone', async (t) => {
  const directory = temporaryDirectory(t);
  const [from, to] = [join(directory, 'copy'), join(directory, 'partial')];
  writeFileSync(from, Buffer.alloc(2_500_000, 'davit'), { mode: 0o644 });
  writeFileSync(`${from}-wal`, 'what is not in the file yet', { mode: 0o644 });
  writeFileSync(to, '', { mode: 0o600 });
  const openBefore = readdirSync('/proc/self/fd').length;
  t.equal(adoptedBytes(from), 2_500_000);
  adoptFile(from, to);
  for (const side of ['', '-wal']) {
    t.ok(readFileSync(to + side).equals(readFileSync(from + side)));
    t.equal(statSync(to + side).mode & 0o777, 0o600);
  }
  t.strictSame(readdirSync(directory).sort(), ['copy', 'copy-wal', 'partial', 'partial-wal']);
  t.equal(readdirSync('/proc/self/fd').length, openBefore, 'all is closed');
});

t.test('runningIn gives the deployments that davit itself runs, of an unreadable file none', async (t) => {
  const { directory, path } = files(t);
  const database = connect(path);
  database.exec(`
    CREATE TEMP TABLE one AS
      SELECT status.value || reported.value AS name, status.value AS status, reported.value AS reported
        FROM json_each('["queued", "running", "canceling", "succeeded"]') status, json_each('[0, 1]') reported;
    INSERT INTO projects (id, name, status, created_at, policy)
    SELECT 'prj_' || name, name, 'active', 1, 'queue' FROM one;
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, finished_at)
    SELECT 'dpl_' || name, 'prj_' || name, 'main', status, reported, 'api', 1,
           iif(status = 'queued', NULL, 1), iif(status = 'succeeded', 1, NULL)
      FROM one`);
  database.close();
  t.strictSame(runningIn(path).sort(), ['dpl_canceling0', 'dpl_running0']);
  writeFileSync(path, 'rubbish'.repeat(1_000));
  t.strictSame(runningIn(path), []);
  t.strictSame(runningIn(join(directory, 'missing')), []);
  t.strictSame(readdirSync(directory).sort(), ['davit.db', 'new']);
});

/** A davit file, and another to put in its place. */
function files(t: Test) {
  const directory = temporaryDirectory(t);
  const [path, replacement] = [join(directory, 'davit.db'), join(directory, 'new')];
  openForWriting(path, realEffects).close();
  copyFileSync(path, replacement);
  return { directory, path, replacement };
}

function hasOpen(processId: number | undefined, path: string): boolean {
  const descriptors = `/proc/${processId}/fd`;
  if (!existsSync(descriptors)) return false;
  return readdirSync(descriptors).some((name) => linkOf(join(descriptors, name)) === path);
}

/** Undefined for a descriptor that was closed meanwhile. */
function linkOf(path: string): string | undefined {
  try {
    return readlinkSync(path);
  } catch {
    return undefined;
  }
}
