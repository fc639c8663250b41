import { spawnSync } from 'node:child_process';
import {
  chmodSync,
  closeSync,
  mkdirSync,
  openSync,
  readdirSync,
  rmdirSync,
  statfsSync,
  statSync,
  truncateSync,
  utimesSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { DAY_MS } from '../../src/durations.ts';
import { realEffects } from '../../src/effects.ts';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { startPartial } from '../../src/store/partial-file.ts';
import { lockPath } from '../../src/store/place.ts';
import { openStore } from '../../src/store/store.ts';
import { busyWriter } from '../helpers/busy.ts';
import { COMPILE_CACHE, MAIN, place } from '../helpers/cli.ts';
import { findingOf, type Report, reportOf, withProject } from '../helpers/doctor.ts';
import { changeFile } from '../helpers/files.ts';
import { swapIndexes } from '../helpers/filled.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { serve } from '../helpers/served.ts';
import { ifMayMount, onSmallDisk } from '../helpers/small-disk.ts';
import { PROJECT } from '../helpers/store.ts';

t.test('a healthy file gives exit code 0 and the size of every table', async (t) => {
  const { davit, dump } = await withProject(t);
  const before = dump();
  const { stdout, stderr, exitCode } = await davit(['doctor']);
  t.strictSame([stderr, exitCode], ['', 0]);
  for (const line of [
    /^file +\.\/davit\.db, [\d.]+ kB$/m,
    /^service +none$/m,
    /^projects +1 +[\d.]+ kB$/m,
    /^integrity +ok +every page and every index is whole$/m,
    /^permissions +ok /m,
    /^wal +ok /m,
    /^service +note +no service is running$/m,
  ]) {
    t.match(stdout, line);
  }
  t.strictSame(dump(), before);
});

t.test('what is to be done about several findings is said once', async (t) => {
  const { davit, dbPath } = await withProject(t);
  await davit(['admin', 'key', 'create', '--name', 'other', '--all-scopes', '--all-projects']);
  changeFile(dbPath, `UPDATE keys SET created_at = 1, expires_at = ${realEffects.now() + DAY_MS}`);
  const { stdout } = await davit(['doctor']);
  t.equal(stdout.match(/ expires at /g)?.length, 2);
  t.equal(stdout.match(/^keys +replace it before then: davit admin key create$/gm)?.length, 1);
});

t.test('--json prints the whole report', async (t) => {
  const { json, directory } = await withProject(t);
  const report = await json<Report>(['doctor']);
  const { bavail, bsize } = statfsSync(directory);
  t.ok(Math.abs(Math.log2(report.disk_free_bytes / (bavail * bsize))) < 1, 'about what is free now');
  t.match(report, {
    file: './davit.db',
    ok: true,
    sqlite_version: /^3\.\d+\.\d+$/,
    schema_version: SCHEMA_VERSION,
    service: null,
    file_bytes: Number,
    wal_bytes: 0,
    unused_bytes: Number,
    disk_free_bytes: Number,
  });
  const names = [
    ...['permissions', 'disk', 'wal', 'writes', 'integrity', 'references', 'clock', 'service'],
    ...['deployments', 'webhooks', 'projects', 'keys'],
  ];
  t.strictSame(
    report.findings.map(({ check }) => check),
    names,
  );
  t.match(
    report.tables.find(({ name }) => name === 'projects'),
    { rows: 1 },
  );
  t.ok(report.tables.every(({ bytes }) => bytes >= 4096));
});

t.test('doctor works while the service runs, and names its process', async (t) => {
  const { json, directory } = await withProject(t);
  const service = await serve(t, directory);
  const report = await json<Report>(['doctor']);
  t.match(report, { ok: true, service: { process_id: service.processId } });
  t.match(findingOf(report, 'service'), {
    level: 'ok',
    message: new RegExp(`process ${service.processId} since`),
  });
  t.equal(await service.stop(), 0);
});

t.test('a service whose lock file names no process is reported as running', async (t) => {
  const { davit, dbPath } = await withProject(t);
  const lock = new Sqlite(lockPath(dbPath));
  t.teardown(() => lock.close());
  lock.exec('BEGIN IMMEDIATE');
  const { stdout } = await davit(['doctor']);
  t.match(stdout, /^service +runs$/m);
  t.match(stdout, /^service +ok +running$/m);
});

t.test('a WAL left by a killed process is a note, and so are other leftovers', async (t) => {
  const there = await withProject(t);
  await (await busyWriter(t, there.dbPath)).kill();
  writeFileSync(`${there.dbPath}.before-restore-2026-11-20T10-00-00.000Z`, 'old', { mode: 0o600 });
  const partial = '.davit-partial-7-7-00000000-0000-0000-0000-000000000000-7'; // of an earlier boot
  writeFileSync(join(there.directory, partial), 'half', { mode: 0o600 });
  writeFileSync(join(there.directory, 'other.db.before-restore'), 'not ours');
  const report = await reportOf(t, there, 0);
  t.match(findingOf(report, 'wal'), {
    level: 'note',
    message: /the service did not stop cleanly; nothing is lost/,
  });
  t.match(
    findingOf(report, 'leftovers'),
    { level: 'note', message: /^3 B of earlier copies are kept: davit\.db\.before-\S+$/ },
    'whether the partial file is being written, on another machine perhaps, is not known yet',
  );
  const twoDaysAgo = new Date(Date.now() - 2 * DAY_MS);
  utimesSync(join(there.directory, partial), twoDaysAgo, twoDaysAgo);
  t.match(findingOf(await reportOf(t, there, 0), 'leftovers'), {
    message: /^7 B of earlier copies are kept: davit\.db\.before-\S+, \.davit-partial-7-\S+$/,
  });
});

t.test('a copy that is being made is not one that was left', async (t) => {
  const there = await withProject(t);
  const partial = startPartial(there.directory, realEffects.now());
  t.teardown(partial.discard);
  writeFileSync(`${partial.path}-journal`, '', { mode: 0o600 });
  t.equal(findingOf(await reportOf(t, there, 0), 'leftovers'), undefined);
});

for (const damaged of ['webhooks', 'projects']) {
  t.test(`unreadable ${damaged} do not prevent the other checks`, async (t) => {
    const there = await withProject(t);
    damage(there, damaged);
    const report = await reportOf(t, there, 1);
    t.match(findingOf(report, 'integrity'), { level: 'problem', advice: /restore the last backup/ });
    t.equal(findingOf(report, damaged), undefined, 'no claim about what cannot be read');
    const others = ['webhooks', 'projects', 'keys'].filter((check) => check !== damaged);
    for (const check of others) t.match(findingOf(report, check), { level: 'ok' });
  });
}

t.test('a damaged file is a problem, and what can be read of it is still checked', async (t) => {
  const there = await withProject(t);
  swapIndexes(there.dbPath, 'webhooks_of_key', 'key_secrets_of_key');
  const report = await reportOf(t, there, 1);
  t.match(findingOf(report, 'integrity'), {
    level: 'problem',
    message: /index/,
    advice: /restore the last backup/,
  });
  t.match(findingOf(report, 'projects'), { level: 'ok' });

  changeFile(
    there.dbPath,
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = NULL WHERE name = 'projects'",
  );
  const hopeless = await reportOf(t, there, 1);
  t.strictSame([hopeless.ok, hopeless.tables], [false, []]);
  t.match(findingOf(hopeless, 'integrity'), { level: 'problem', message: /malformed database schema/ });
});

t.test('damage that several checks meet is one problem', async (t) => {
  const there = await withProject(t);
  const database = new Sqlite(there.dbPath);
  const page = database.prepare("SELECT rootpage FROM sqlite_schema WHERE name = 'projects'").pluck().get();
  database.close();
  const file = openSync(there.dbPath, 'r+');
  writeSync(file, Buffer.alloc(100, 0xff), 0, 100, (Number(page) - 1) * 4_096);
  closeSync(file);
  const { findings } = await reportOf(t, there, 1);
  const messages = findings.filter(({ check }) => check === 'integrity').map(({ message }) => message);
  t.ok(messages.includes('database disk image is malformed'));
  t.strictSame(messages, [...new Set(messages)]);
});

t.test('a nearly full disk is a problem', ifMayMount, async (t) => {
  const { directory } = place(t);
  mkdirSync(join(directory, 'small'));
  const { stdout } = await onSmallDisk(directory, 'small', '20m', [
    '"$0" "$1" admin project create --name x --db small/davit.db >/dev/null 2>&1',
    '"$0" "$1" doctor --db small/davit.db; echo "exit $?"',
  ]);
  t.match(stdout, /^disk +problem +[\d.]+ MB are free on the disk of the file, which has [\d.]+ kB$/m);
  t.match(stdout, /^disk +make room: when it is full davit answers 503/m);
  t.match(stdout, /exit 1\n$/);
});

t.test('a -wal that was cut short while davit has it open is a problem', async (t) => {
  const { davit, directory } = place(t);
  const path = join(directory, 'davit.db');
  await davit(['admin', 'project', 'create', '--name', 'kept']);
  const store = openStore(path, realEffects);
  t.teardown(store.close);
  await store.writer.write('projects.create', PROJECT);
  truncateSync(`${path}-wal`, 0);
  const { exitCode, stdout } = await davit(['doctor']);
  t.equal(exitCode, 1);
  t.match(stdout, /^integrity +problem +the file or its -wal was cut short while a program had it open/m);
  t.match(
    stdout,
    /^integrity +end davit and whatever else has the file open .+, then start davit, which goes on with what is/m,
  );
});

t.test(
  'a -wal that was cut short is a problem also where all of it had been copied, and davit writes no more',
  async (t) => {
    const { directory, davit } = await withProject(t);
    const path = join(directory, 'davit.db');
    const store = openStore(path, realEffects);
    t.teardown(store.close);
    await store.writer.write('projects.create', PROJECT);
    const other = new Sqlite(path);
    other.pragma('wal_checkpoint(PASSIVE)');
    other.close();
    truncateSync(`${path}-wal`, 0);
    await t.rejects(store.writer.write('projects.create', PROJECT), {
      message: /the -wal was cut short, and what only it had is lost: nothing/,
    });
    const { exitCode, stdout } = await davit(['doctor']);
    t.equal(exitCode, 1);
    t.match(
      stdout,
      /^wal +problem +the file or its -wal was cut short while a program had it open: what only it had is lost$/m,
    );
    t.match(stdout, /^wal +end davit and whatever else has the file open/m);
  },
);

t.test('a disk that refuses writes despite free space is a problem', async (t) => {
  const { davit, directory } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'x']);
  // Of 4 KiB at most: SQLite cannot make its -shm.
  const words = ['-c', 'ulimit -f 8; exec "$0" "$1" doctor', process.execPath, MAIN];
  const { status, stdout, stderr } = spawnSync('sh', words, {
    cwd: directory,
    env: COMPILE_CACHE,
    encoding: 'utf8',
  });
  t.equal(status, 1);
  t.match(stdout, /^disk +problem +the file cannot be used \(disk I\/O error, SQLITE_IOERR_\w+\)$/m);
  t.match(stdout, /^disk +see what the kernel says of the disk \(dmesg\), and whether a quota is used up$/m);
  t.notMatch(stderr, /bug/);
});

t.test('a disk on which no further file can be created, or no copy', ifMayMount, async (t) => {
  const { directory } = place(t);
  mkdirSync(join(directory, 'small'));
  const { stdout } = await onSmallDisk(directory, 'small', '400m,nr_inodes=20', [
    'mkfifo ready',
    '"$0" "$1" serve --listen 127.0.0.1:0 --log-level silent --db small/davit.db >ready & service=$!',
    'head -n 1 ready >/dev/null',
    'touch $(seq -f small/%g 20) 2>/dev/null; "$0" "$1" doctor --db small/davit.db',
    'rm small/[0-9]*; kill $service; wait $service',
    'truncate --size 500M small/davit.db; "$0" "$1" doctor --db small/davit.db',
  ]);
  t.match(stdout, /^disk +problem +no further file can be created on the disk of the file$/m);
  t.match(stdout, /^disk +note +4[\d.]+ MB are free on the disk of the file, which has 5[\d.]+ MB$/m);
  t.match(stdout, /^disk +a copy of it needs another disk$/m);
});

t.test('a full temporary directory of the service is a problem of its commands', ifMayMount, async (t) => {
  const { directory } = place(t);
  mkdirSync(join(directory, 'small'));
  for (const [size, fill, code] of [
    ['1m', 'cat /dev/zero >small/fill', 'ENOSPC'],
    ['1m,nr_inodes=9', 'touch $(seq -f small/%g 9)', 'ENOSPC'],
    ['1m', 'mount -o remount,bind,ro small', 'EROFS'],
  ] as const) {
    const { stdout } = await onSmallDisk(directory, 'small', size, [
      'create="admin project create --name"; rm -f davit.db*; mkfifo ready',
      '"$0" "$1" $create reported >/dev/null 2>&1',
      'TMPDIR=$PWD/small "$0" "$1" serve --listen 127.0.0.1:0 --log-level silent >ready & service=$!',
      'head -n 1 ready >/dev/null; rm ready',
      `${fill} 2>/dev/null`,
      'doctor() { "$0" "$1" doctor 2>/dev/null | grep "^projects  *[a-z]"; }',
      'doctor "$1"; "$0" "$1" admin project check reported | grep small',
      // As root of its namespace it would have /root, where only the real one can work.
      'for name in one other; do "$0" "$1" $create $name --env HOME="$PWD" -- true >/dev/null 2>&1; done',
      'doctor "$1"; "$0" "$1" admin project check one 2>/dev/null | grep ^directory',
      'kill $service; wait $service; ls -A small | grep davit',
    ]);
    const [message, advice] = [
      `no files for commands can be made in ${directory}/small \\(${code}\\)`,
      code === 'ENOSPC' ? 'make room there, and for further files' : 'set TMPDIR to a directory',
    ];
    t.match(
      stdout,
      new RegExp(
        `^projects +ok +1 of them.*\nprojects +problem +${message}\nprojects +${advice}.*\n` +
          `directory +problem +${message}\ndirectory +ok .*\ndirectory +${advice}.*\n$`,
      ),
      fill,
    );
  }
});

t.test('a full disk is named as what keeps the database closed', ifMayMount, async (t) => {
  const { directory } = place(t);
  for (const [size, fill, message, advice] of [
    [
      '20m,nr_inodes=9',
      'touch $(seq -f small/%g 9)',
      /no further file can be created/,
      /remove files that nobody needs/,
    ],
    ['1m', 'cat /dev/zero >small/fill', /0 B are free on the disk of the file/, /make room/],
  ] as const) {
    mkdirSync(join(directory, 'small'));
    const { stdout, stderr } = await onSmallDisk(directory, 'small', size, [
      '"$0" "$1" admin project create --name x --db small/davit.db >/dev/null 2>&1',
      `${fill} 2>/dev/null; "$0" "$1" doctor --db small/davit.db; echo "exit $?"`,
    ]);
    t.match(stdout, new RegExp(`^disk +problem +${message.source}`, 'm'));
    t.match(stdout, new RegExp(`^disk +${advice.source}`, 'm'));
    t.match(stdout, /exit 1\n$/);
    t.equal(stderr, 'one thing needs attention\n');
    rmdirSync(join(directory, 'small'));
  }
});

t.test('a read-only file system is a problem for doctor and refused by serve', ifMayMount, async (t) => {
  const { directory } = place(t);
  for (const name of ['small', 'view']) mkdirSync(join(directory, name));
  const { stdout, stderr } = await onSmallDisk(directory, 'small', '20m', [
    'mkfifo ready',
    '"$0" "$1" serve --listen 127.0.0.1:0 --log-level silent --db small/davit.db >ready & service=$!',
    'head -n 1 ready >/dev/null',
    'mount --bind small view && mount -o remount,bind,ro view',
    '"$0" "$1" doctor --db view/davit.db 2>/dev/null; echo "exit $?"',
    '"$0" "$1" serve --listen 127.0.0.1:0 --db view/davit.db',
    'kill $service; wait $service',
  ]);
  t.match(stdout, /^disk +problem +the file system is read-only: it was mounted so/m);
  t.match(stdout, /^disk +see what the kernel says of it \(dmesg\)/m);
  t.match(stdout, /^permissions +ok/m);
  t.match(
    stdout,
    /^service +ok +running as process \d+ since 20\S+$/m,
    'though its lock file cannot be locked here',
  );
  t.match(stdout, /exit 1\n$/);
  t.match(stderr, /^error: cannot open .+davit\.db-lock \(EROFS\): the file system is read-only\n$/);
});

t.test('doctor refuses a missing file and one that is not a davit file', async (t) => {
  const { refused, directory } = place(t);
  t.match(await refused(['doctor']), { exitCode: 1, message: /there is no file/ });
  writeFileSync(join(directory, 'notes.txt'), 'these are my notes, not a database\n'.repeat(100));
  t.match(await refused(['doctor', '--db', 'notes.txt']), {
    exitCode: 1,
    message: /notes\.txt is not a davit file/,
  });
  t.strictSame(readdirSync(directory), ['notes.txt']);
});

const ifMayBeSomebodyElse = ifMayBeNobody(process.execPath, MAIN, `${tmpdir()}/.`);

t.test('a database that the user may only read is refused', ifMayBeSomebodyElse, async (t) => {
  const there = await withProject(t);
  chmodSync(there.directory, 0o755);
  chmodSync(there.dbPath, 0o644);
  const rights = ['--reuid=65534', '--regid=65534', '--clear-groups'];
  // Which Node passes on, and cannot be written as that user: it would say so.
  const somebody = [...rights, 'env', '--unset=NODE_V8_COVERAGE', process.execPath, MAIN];
  for (const words of [['doctor'], ['backup', '/tmp/never.db'], ['admin', 'queue']]) {
    const { stdout, stderr, status } = spawnSync('setpriv', [...somebody, ...words], {
      cwd: there.directory,
      env: {},
      encoding: 'utf8',
    });
    t.strictSame([stdout, status], ['', 1]);
    t.match(stderr, /^error: cannot write to .*davit\.db: check that this user may write to it[^\n]*\n$/);
  }
  t.strictSame(readdirSync(there.directory), ['davit.db']);
});

t.test('an exclusive lock of another program is told by every command', async (t) => {
  const there = await withProject(t);
  const other = new Sqlite(there.dbPath);
  t.teardown(() => other.close());
  other.pragma('locking_mode = EXCLUSIVE');
  other.exec('BEGIN EXCLUSIVE; CREATE TABLE noted (at); DROP TABLE noted; COMMIT');
  const [refusal, report] = await Promise.all([
    there.davit(['admin', 'key', 'list'], { env: {} }), // each waits for 5 s
    reportOf(t, there, 1),
  ]);
  t.match(refusal, {
    stdout: '',
    stderr: 'error: another process keeps the database locked: try again when it has ended\n',
    exitCode: 1,
  });
  t.match(findingOf(report, 'writes'), {
    level: 'problem',
    message: 'another process keeps the file locked, for reading too: davit can do nothing with it',
    advice: /^wait if that is a restore, .*, else end it: 'fuser -v \/\S+davit\.db' shows/,
  });
  t.ok(findingOf(report, 'permissions'), 'what needs no lock is checked all the same');
});

t.test('other commands say in one line that the file is damaged', async (t) => {
  const there = await withProject(t);
  const { size } = statSync(there.dbPath);
  truncateSync(there.dbPath, Math.floor(size / 2));
  for (const words of [
    ['admin', 'key', 'list'],
    ['admin', 'project', 'create', '--name', 'other'],
    ['serve'],
  ]) {
    const { stdout, stderr, exitCode } = await there.davit(words);
    t.match(stderr, /^error: the database cannot be used \([^\n]*malformed\): 'davit doctor' tells more\n$/);
    t.strictSame([stdout, exitCode], ['', 1]);
  }
});

t.test('a write to a damaged table fails as damaged, without advice to retry', async (t) => {
  const there = await withProject(t);
  damage(there, 'projects');
  const { stderr, exitCode } = await there.davit(['admin', 'project', 'create', '--name', 'other']);
  t.match(
    stderr,
    /^error: the file is damaged \(SQLITE_CORRUPT\w*\): nothing was written; 'davit doctor' tells more\n$/,
  );
  t.equal(exitCode, 1);
});

/** Nothing of this table can be read any more. */
function damage({ dbPath }: { dbPath: string }, table: string): void {
  const database = new Sqlite(dbPath);
  database.pragma('wal_checkpoint(TRUNCATE)');
  const rootPage = database.prepare('SELECT rootpage FROM sqlite_schema WHERE name = ?').pluck();
  const page = Number(rootPage.get(table));
  const pageBytes = Number(database.pragma('page_size', { simple: true }));
  database.close();
  const file = openSync(dbPath, 'r+');
  writeSync(file, Buffer.alloc(pageBytes, 0xff), 0, pageBytes, (page - 1) * pageBytes);
  closeSync(file);
}
