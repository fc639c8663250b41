import { spawnSync } from 'node:child_process';
import {
  chmodSync,
  closeSync,
  mkdirSync,
  openSync,
  readdirSync,
  statSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { realEffects } from '../../src/effects.ts';
import { lockForServing, lockPath } from '../../src/store/lock.ts';
import { WAL_LARGE_BYTES } from '../../src/store/wal.ts';
import { busyWriter } from '../helpers/busy.ts';
import { MAIN, type Place, place } from '../helpers/cli.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { serve } from '../helpers/served.ts';
import { ifMayMount, onSmallDisk } from '../helpers/small-disk.ts';

interface Finding {
  check: string;
  level: 'ok' | 'note' | 'problem';
  message: string;
  advice: string | null;
}

interface Report {
  ok: boolean;
  service: { process_id: number } | null;
  findings: Finding[];
  tables: { name: string; rows: number; bytes: number }[];
}

const HOUR_MS = 3_600_000;
const nowMs = realEffects.now();

t.test('a healthy file is fine: exit code 0, and the size of every table', async (t) => {
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
    /^service +note +no service has the file$/m,
  ]) {
    t.match(stdout, line);
  }
  t.strictSame(dump(), before);
});

t.test('--json says the same to a program', async (t) => {
  const { json } = await withProject(t);
  const report = await json<Report>(['doctor']);
  t.match(report, {
    file: './davit.db',
    ok: true,
    sqlite_version: /^3\.\d+\.\d+$/,
    schema_version: 1,
    service: null,
    file_bytes: Number,
    wal_bytes: 0,
    unused_bytes: Number,
    disk_free_bytes: Number,
  });
  const names = [
    ...['permissions', 'disk', 'wal', 'integrity', 'references', 'clock', 'service', 'deployments'],
    ...['webhooks', 'projects', 'keys'],
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

t.test('while the service runs it looks all the same', async (t) => {
  const { json, directory } = await withProject(t);
  const service = await serve(t, directory);
  const report = await json<Report>(['doctor']);
  t.match(report, { ok: true, service: { process_id: service.processId } });
  t.match(findingOf(report, 'service'), {
    level: 'ok',
    message: new RegExp(`process ${service.processId} has`),
  });
  t.match(findingOf(report, 'wal'), { level: 'ok' }, 'what is in it is no sign of a bad end');
  t.equal(await service.stop(), 0);
});

t.test('of a service whose lock does not tell who it is it is said that it runs', async (t) => {
  const { davit, dbPath } = await withProject(t);
  const lock = new Sqlite(lockPath(dbPath));
  t.teardown(() => lock.close());
  lock.exec('BEGIN IMMEDIATE');
  const { stdout } = await davit(['doctor']);
  t.match(stdout, /^service +runs$/m);
  t.match(stdout, /^service +ok +one has the file$/m);
});

t.test('each thing that needs attention is said, with what to do about it', async (t) => {
  const hourAgo = nowMs - HOUR_MS;
  const deployment = (status: string, at: string) => `
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, process_id, process_started_at, boot_id)
    SELECT 'dpl_1', id, 'main', '${status}', 0, 'api', ${hourAgo}, ${at}, 1, 1, 'b' FROM projects`;
  const webhook = (columns: string, values: string) => `
    INSERT INTO webhooks (id, key_id, url, events, created_at, enabled_at, ${columns})
    SELECT 'whk_1', id, 'https://example.com/', '[]', 1, 1, ${values} FROM keys;`;
  const delivery = `
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    VALUES ('evt_1', 'deployment.created', 'dpl_1', 'prj_1', 1, '{}');
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at, ladder_started_at, ladder_trigger)
    VALUES ('dlv_1', 'evt_1', 'deployment.created', 'whk_1', 'pending', ${hourAgo}, 1, 1, 'schedule')`;
  const cases: [what: string, sql: string, check: string, message: RegExp, advice: RegExp][] = [
    [
      'a deployment that nobody looks after',
      deployment('running', '1'),
      'deployments',
      /^dpl_1 is recorded as running, and no service looks after it$/,
      /^davit serve: it ends what is left/,
    ],
    [
      'one that waits for a service',
      deployment('queued', 'NULL'),
      'deployments',
      /^1 wait, and no service carries them out$/,
      /^davit serve$/,
    ],
    [
      'a webhook that fails',
      webhook('status, failing_since, consecutive_failures', `'enabled', ${hourAgo - HOUR_MS}, 7`),
      'webhooks',
      /^whk_1 fails since 20\S+Z, 7 times$/,
      /davit admin webhook ping whk_1/,
    ],
    [
      'a webhook that is disabled while deliveries are held',
      webhook('status, status_reason', "'disabled', 'the receiver answered 410 Gone'") + delivery,
      'webhooks',
      /^whk_1 is disabled \(the receiver answered 410 Gone\), with 1 delivery held for it$/,
      /davit admin webhook enable whk_1/,
    ],
    [
      'one that nothing enables again, as its key is revoked',
      `UPDATE keys SET revoked_at = 1;${webhook('status', "'disabled'")}${delivery}`,
      'webhooks',
      /^whk_1 is disabled, with 1 delivery held for it$/,
      /^davit admin webhook delete whk_1: its key is revoked, so it stays disabled$/,
    ],
    [
      'deliveries that are long overdue',
      webhook('status', "'enabled'") + delivery,
      'webhooks',
      /^whk_1 is behind: 1 deliveries are due, the first since 20\S+Z$/,
      /^davit serve$/,
    ],
    [
      'a clock that was ahead',
      `UPDATE projects SET created_at = ${nowMs + 26 * HOUR_MS}`,
      'clock',
      /^the file knows of 20\S+Z, which is 1d1h\w+ from now$/,
      /timedatectl/,
    ],
    [
      'a key that ends soon',
      `UPDATE keys SET expires_at = ${nowMs + 48 * HOUR_MS}`,
      'keys',
      /^key ci \(key_\w+\) ends at 20\S+Z$/,
      /davit admin key create/,
    ],
    [
      'a command that is not there',
      `UPDATE projects SET command = '["/nowhere/release.sh"]'`,
      'projects',
      /^project website \(prj_\w+\): .*\/nowhere\/release\.sh/,
      /./,
    ],
    [
      'a count that is wrong',
      'UPDATE projects SET queued_count = 3',
      'references',
      /^prj_\w+ counts 3 waiting deployments, and 0 wait$/,
      /restore the last backup/,
    ],
    [
      'a row that refers to nothing',
      "INSERT INTO key_projects VALUES ('key_2', 'prj_2')",
      'references',
      /^1 of key_projects refer to (?:keys|projects) that are not there$/,
      /restore the last backup/,
    ],
    [
      'an index that is not there',
      'DROP INDEX one_terminal_event_per_deployment',
      'integrity',
      /^the index one_terminal_event_per_deployment is missing$/,
      /restore the last backup/,
    ],
    [
      'a row that every file has',
      'DELETE FROM instance',
      'integrity',
      /^what belongs to the file as a whole is missing$/,
      /restore the last backup/,
    ],
  ];
  for (const [what, sql, check, message, advice] of cases) {
    const there = await withProject(t);
    change(there.dbPath, sql);
    const found = findingOf(await reportOf(t, there, 1), check);
    t.match(found, { level: 'problem', message, advice }, what);
  }
});

t.test('a webhook that has just begun to fail is a note', async (t) => {
  const there = await withProject(t);
  const insert = (id: string, failing_since: number | 'NULL') => `
    INSERT INTO webhooks (id, key_id, url, events, created_at, enabled_at, status, failing_since, consecutive_failures)
    SELECT '${id}', id, 'https://example.com/', '[]', 1, 1, 'enabled', ${failing_since}, 88 FROM keys;`;
  change(there.dbPath, insert('whk_1', nowMs - 600_000) + insert('whk_2', 'NULL'));
  t.match(findingOf(await reportOf(t, there, 0), 'webhooks'), {
    level: 'note',
    message: '2 of them, 1 failing now, for less than 1h',
    advice: 'davit admin webhook list',
  });
});

t.test('with a service, what is stuck in it is said', async (t) => {
  const there = await withProject(t);
  change(
    there.dbPath,
    `UPDATE projects SET status = 'paused';
     INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at)
     SELECT 'dpl_1', id, 'main', 'queued', 0, 'api', ${nowMs - HOUR_MS} FROM projects`,
  );
  const service = await serve(t, there.directory);
  t.match(findingOf(await reportOf(t, there, 0), 'deployments'), {
    level: 'note',
    message: '1 wait in projects that are paused',
  });
  // As if the end of its command had been missed.
  change(
    there.dbPath,
    `UPDATE deployments
        SET status = 'running', started_at = ${nowMs - HOUR_MS}, process_id = 1, process_started_at = 1, boot_id = 'b'`,
  );
  t.match(findingOf(await reportOf(t, there, 1), 'deployments'), {
    level: 'problem',
    message: /^dpl_1 is recorded as running, and its process is gone$/,
    advice: 'restart davit serve',
  });
  await service.kill();
});

t.test('who may read or replace the file', async (t) => {
  const there = await withProject(t);
  for (const mode of ['644', '640', '602', '2610']) {
    chmodSync(there.dbPath, Number.parseInt(mode, 8));
    t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
      level: 'problem',
      message: `others may read davit.db (mode ${mode})`,
      advice: /^chmod 600 \/.*\/davit\.db$/,
    });
  }
  chmodSync(there.dbPath, 0o600);
  for (const mode of ['777', '770', '702']) {
    chmodSync(there.directory, Number.parseInt(mode, 8));
    t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
      level: 'problem',
      message: new RegExp(`^others may replace the file: they may write in /.* \\(mode ${mode}\\)$`),
      advice: /^chmod go-w \//,
    });
  }
  chmodSync(there.directory, 0o1777);
  await reportOf(t, there, 0);

  await (await busyWriter(t, there.dbPath)).kill();
  for (const side of ['-wal', '-shm']) chmodSync(there.dbPath + side, 0o644);
  const { findings } = await reportOf(t, there, 1);
  t.strictSame(
    findings.filter(({ check }) => check === 'permissions').map(({ message }) => message),
    ['others may read davit.db-wal (mode 644)', 'others may read davit.db-shm (mode 644)'],
  );
});

t.test('a WAL that a killed process left is worth a note, and what restores left too', async (t) => {
  const there = await withProject(t);
  await (await busyWriter(t, there.dbPath)).kill();
  writeFileSync(`${there.dbPath}.before-restore-2026-11-20T10-00-00.000Z`, 'old');
  writeFileSync(join(there.directory, '.davit-partial-1'), 'half');
  writeFileSync(join(there.directory, 'other.db.before-restore'), 'not ours');
  const report = await reportOf(t, there, 0);
  t.match(findingOf(report, 'wal'), {
    level: 'note',
    message: /the service did not stop cleanly; nothing is lost/,
  });
  t.match(findingOf(report, 'leftovers'), {
    level: 'note',
    message: /^7 B are kept from before: (?:davit\.db\.before-\S+|, |\.davit-partial-1)+$/,
  });
});

t.test('a WAL that has grown large is said, and what takes it in', async (t) => {
  const there = await withProject(t);
  const grow = (bytes: number) => {
    writeFileSync(`${there.dbPath}-wal`, '', { mode: 0o600 });
    truncateSync(`${there.dbPath}-wal`, bytes);
  };
  grow(WAL_LARGE_BYTES);
  t.match(findingOf(await reportOf(t, there, 0), 'wal'), { level: 'note' });
  grow(WAL_LARGE_BYTES + 1);
  t.match(findingOf(await reportOf(t, there, 1), 'wal'), {
    level: 'problem',
    message: /^the WAL has [\d.]+ MB$/,
    advice: /^start davit serve and stop it again/,
  });
  const release = lockForServing(there.dbPath, process.pid, realEffects);
  grow(WAL_LARGE_BYTES + 1);
  t.match(findingOf(await reportOf(t, there, 1), 'wal'), { advice: /^a program that reads for long/ });
  release();
});

t.test('what is damaged keeps nobody from looking at the rest', async (t) => {
  const there = await withProject(t);
  const database = new Sqlite(there.dbPath);
  database.pragma('wal_checkpoint(TRUNCATE)');
  const page = database.prepare("SELECT rootpage FROM sqlite_schema WHERE name = 'webhooks'").pluck().get();
  const pageBytes = Number(database.pragma('page_size', { simple: true }));
  database.close();
  const file = openSync(there.dbPath, 'r+');
  writeSync(file, Buffer.alloc(pageBytes, 0xff), 0, pageBytes, (Number(page) - 1) * pageBytes);
  closeSync(file);
  const report = await reportOf(t, there, 1);
  t.match(findingOf(report, 'integrity'), { level: 'problem', advice: /restore the last backup/ });
  t.equal(findingOf(report, 'webhooks'), undefined, 'nobody knows');
  for (const check of ['projects', 'keys']) t.match(findingOf(report, check), { level: 'ok' });
});

t.test('a damaged file is a finding, as far as it can be read', async (t) => {
  const there = await withProject(t);
  const database = new Sqlite(there.dbPath);
  database.unsafeMode();
  database.pragma('writable_schema = ON');
  const pageOf = database.prepare('SELECT rootpage FROM sqlite_schema WHERE name = ?').pluck();
  const pages = [pageOf.get('webhooks_of_key'), pageOf.get('key_secrets_of_key')];
  const move = database.prepare('UPDATE sqlite_schema SET rootpage = ? WHERE name = ?');
  move.run(pages[1], 'webhooks_of_key');
  move.run(pages[0], 'key_secrets_of_key');
  database.close();
  const report = await reportOf(t, there, 1);
  t.match(findingOf(report, 'integrity'), {
    level: 'problem',
    message: /index/,
    advice: /restore the last backup/,
  });
  t.match(findingOf(report, 'projects'), { level: 'ok' });

  change(
    there.dbPath,
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = NULL WHERE name = 'projects'",
  );
  const hopeless = await reportOf(t, there, 1);
  t.match(hopeless, { ok: false, tables: [] });
  t.match(findingOf(hopeless, 'integrity'), { level: 'problem', message: /malformed database schema/ });
});

t.test('a disk that is nearly full', ifMayMount, async (t) => {
  const { directory } = place(t);
  mkdirSync(join(directory, 'small'));
  const { stdout } = await onSmallDisk(directory, 'small', '20m', [
    '"$0" "$1" admin project create --name x --db small/davit.db >/dev/null 2>&1',
    '"$0" "$1" doctor --db small/davit.db; echo "exit $?"',
  ]);
  t.match(stdout, /^disk +problem +[\d.]+ MB are free where the file is, which has [\d.]+ kB$/m);
  t.match(stdout, /^disk +make room: when it is full davit answers 503/m);
  t.match(stdout, /exit 1\n$/);
});

t.test('a disk that takes no writes', ifMayMount, async (t) => {
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
  t.match(stdout, /exit 1\n$/);
  t.match(stderr, /^error: cannot open .+davit\.db-lock \(EROFS\): the file system is read-only\n$/);
});

t.test('what is no davit file is refused', async (t) => {
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

t.test('a file that this user may only read is no bug, and it says so', ifMayBeSomebodyElse, async (t) => {
  const there = await withProject(t);
  chmodSync(there.directory, 0o755);
  chmodSync(there.dbPath, 0o644);
  const somebody = ['--reuid=65534', '--regid=65534', '--clear-groups', process.execPath, MAIN];
  for (const words of [['doctor'], ['backup', '/tmp/never.db'], ['admin', 'queue']]) {
    const { stdout, stderr, status } = spawnSync('setpriv', [...somebody, ...words], {
      cwd: there.directory,
      env: {},
      encoding: 'utf8',
    });
    t.strictSame([stdout, status], ['', 1]);
    t.match(stderr, /^error: cannot write to \S*davit\.db: check that this user may write to it[^\n]*\n$/);
  }
  t.strictSame(readdirSync(there.directory), ['davit.db']);
});

t.test('a file beside it that is not the owner’s', ifMayBeSomebodyElse, async (t) => {
  const there = await withProject(t);
  writeFileSync(`${there.dbPath}-lock`, '', { mode: 0o600 });
  spawnSync('chown', ['65534', `${there.dbPath}-lock`]);
  t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
    message: 'davit.db-lock belongs to another user than davit.db: the service may not be able to write',
    advice: /^chown --reference=/,
  });
});

t.test('while another program keeps all to itself, that is what is said', async (t) => {
  const there = await withProject(t);
  const other = new Sqlite(there.dbPath);
  t.teardown(() => other.close());
  other.pragma('locking_mode = EXCLUSIVE');
  other.exec('BEGIN EXCLUSIVE; CREATE TABLE noted (at); DROP TABLE noted; COMMIT');
  for (const words of [['doctor'], ['admin', 'key', 'list']]) {
    t.match(await there.davit(words), {
      stdout: '',
      stderr: 'error: another process keeps the database locked: try again when it has ended\n',
      exitCode: 1,
    });
  }
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

async function withProject(t: Test): Promise<Place> {
  const there = place(t);
  await there.davit(['admin', 'project', 'create', '--name', 'website', '--', '/bin/true']);
  await there.davit(['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects']);
  return there;
}

function change(dbPath: string, sql: string): void {
  const database = new Sqlite(dbPath);
  database.unsafeMode();
  database.pragma('foreign_keys = OFF');
  database.exec(sql);
  database.close();
}

/** Throws if it does not exit with this code, or says something else than that on stderr. */
async function reportOf(t: Test, { davit }: Place, expectedExitCode: number): Promise<Report> {
  const { stdout, stderr, exitCode } = await davit(['doctor', '--json']);
  t.equal(exitCode, expectedExitCode);
  t.match(stderr, expectedExitCode === 0 ? /^$/ : /^(one thing needs|\d+ things need) attention\n$/);
  return JSON.parse(stdout);
}

function findingOf({ findings }: Report, check: string): Finding | undefined {
  const found = findings.filter((finding) => finding.check === check);
  return found.find(({ level }) => level === 'problem') ?? found[0];
}
