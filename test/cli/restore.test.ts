import { execFileSync, spawnSync } from 'node:child_process';
import {
  chmodSync,
  copyFileSync,
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  watch,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { copyDatabase } from '../../src/store/backup.ts';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { busyWriter } from '../helpers/busy.ts';
import { COMPILE_CACHE, MAIN, type Place, place, run } from '../helpers/cli.ts';
import { copying } from '../helpers/copying.ts';
import { changeFile, dumpFile } from '../helpers/files.ts';
import { swapIndexes } from '../helpers/filled.ts';
import { makeLarge } from '../helpers/large.ts';
import { serve } from '../helpers/served.ts';
import { ifMayMount, onSmallDisk } from '../helpers/small-disk.ts';
import { needsTerminal, onTerminal } from '../helpers/terminal.ts';

t.test('restore brings back the backup and keeps the replaced file', async (t) => {
  const { davit, dump, directory, dbPath } = await withCopy(t);
  const then = dump();
  await davit(['admin', 'project', 'create', '--name', 'later']);
  const now = dump();
  chmodSync(join(directory, 'copy.db'), 0o644);
  const { stdout, stderr, exitCode } = await davit(['restore', 'copy.db', '--yes']);
  t.match(
    stdout,
    /^\.\/davit\.db is restored: [\d.]+ kB, 1 project, 1 key, 0 deployments, last used 20\S+Z\n$/,
  );
  t.match(
    stderr,
    /^the replaced file is kept as \/.*davit\.db\.before-restore-20\S+Z: remove it once all is well\n$/,
  );
  t.equal(exitCode, 0);
  t.strictSame(dump(), then);
  t.equal(statSync(dbPath).mode & 0o777, 0o600);
  const [kept = ''] = keptIn(directory);
  t.strictSame(dumpFile(join(directory, kept)), now);
  t.strictSame(readdirSync(directory).sort(), ['copy.db', 'davit.db', kept, 'davit.db-lock'].sort());
});

t.test('restoring to a path without a file needs no --yes and keeps no old file', async (t) => {
  const { davit, dump, directory } = await withCopy(t);
  mkdirSync(join(directory, 'new'));
  const { stdout, exitCode } = await davit(['restore', 'copy.db', '--db', 'new/davit.db', '--json']);
  t.equal(exitCode, 0);
  t.match(JSON.parse(stdout), {
    file: 'new/davit.db',
    kept_as: null,
    schema_version: SCHEMA_VERSION,
    projects: 1,
    keys: 1,
  });
  t.strictSame(dumpFile(join(directory, 'new/davit.db')), dump());
  t.strictSame(readdirSync(join(directory, 'new')).sort(), ['davit.db', 'davit.db-lock']);
});

t.test('a WAL of the replaced file is never taken for one of the restored file', async (t) => {
  t.test('a WAL left by a killed process is merged into the file that is kept', async (t) => {
    const { davit, dump, directory, dbPath } = await withCopy(t);
    const then = dump();
    const writer = await busyWriter(t, dbPath);
    await davit(['admin', 'key', 'create', '--name', 'more', '--all-scopes', '--all-projects']);
    await writer.kill();
    t.ok(statSync(`${dbPath}-wal`).size > 0, 'there is a WAL');
    t.match(await davit(['restore', 'copy.db', '--yes']), { exitCode: 0 });
    t.strictSame(dump(), then);
    const [kept = '', ...more] = keptIn(directory);
    t.strictSame(more, []);
    const ids = new Set(dumpFile(join(directory, kept))['projects']?.map((row) => Object(row).id));
    t.strictSame(
      writer.acknowledged().filter((id) => !ids.has(id)),
      [],
    );
  });

  t.test('the WAL of an unreadable file is kept beside it', async (t) => {
    const { davit, dump, directory, dbPath } = await withCopy(t);
    const then = dump();
    // Of a change that leaves the first page as it is: with that in the WAL, what the file has in its place is not read.
    const database = new Sqlite(dbPath);
    database.exec('UPDATE instance SET probes = probes + 1');
    const wal = readFileSync(`${dbPath}-wal`);
    database.close();
    writeFileSync(`${dbPath}-wal`, wal);
    writeFileSync(dbPath, 'rubbish'.repeat(1_000));
    t.match(await davit(['restore', 'copy.db', '--yes']), { exitCode: 0 });
    t.strictSame(dump(), then);
    const [kept = '', keptWal = '', ...more] = keptIn(directory).sort();
    t.equal(keptWal, `${kept}-wal`);
    t.strictSame(more, []);
    t.strictSame(readFileSync(join(directory, keptWal)), wal);
    t.match(readFileSync(join(directory, kept), 'utf8'), /^rubbish/);
  });

  t.test('a WAL or journal left without its file is moved aside', async (t) => {
    const { davit, dump, directory, dbPath } = await withCopy(t);
    const then = dump();
    await (await busyWriter(t, dbPath)).kill();
    rmSync(dbPath);
    writeFileSync(`${dbPath}-journal`, 'journal');
    t.match(await davit(['restore', 'copy.db']), { exitCode: 0 });
    t.strictSame(dump(), then);
    t.match(keptIn(directory).sort(), [/-journal$/, /-wal$/]);
  });
});

t.test('a manual copy of a file with its WAL is restored with all that the WAL holds', async (t) => {
  const { davit, directory, dbPath } = await withCopy(t);
  const writer = await busyWriter(t, dbPath);
  await writer.kill();
  mkdirSync(join(directory, 'by-hand'));
  for (const side of ['', '-wal']) copyFileSync(dbPath + side, join(directory, `by-hand/davit.db${side}`));
  const wal = readFileSync(join(directory, 'by-hand/davit.db-wal'));
  mkdirSync(join(directory, 'new'));
  t.match(await davit(['restore', 'by-hand/davit.db', '--db', 'new/davit.db']), { exitCode: 0 });
  const ids = new Set(dumpFile(join(directory, 'new/davit.db'))['projects']?.map((row) => Object(row).id));
  t.strictSame(
    writer.acknowledged().filter((id) => !ids.has(id)),
    [],
  );
  t.strictSame(readFileSync(join(directory, 'by-hand/davit.db-wal')), wal, 'the copied WAL is unchanged');
  t.strictSame(readdirSync(join(directory, 'new')).sort(), ['davit.db', 'davit.db-lock']);
});

t.test('while a service has the file, restore names its process and changes nothing', async (t) => {
  const { refused, directory } = await withCopy(t);
  const service = await serve(t, directory);
  const isServed = new RegExp(
    `\\./davit\\.db is served by process ${service.processId} since 20.*: stop that service first`,
  );
  t.match(await refused(['restore', 'copy.db', '--yes']), { exitCode: 1, message: isServed });
  t.match(
    await refused(['restore', 'copy.db']),
    { exitCode: 1, message: isServed },
    'before asking for --yes',
  );
  t.match(await refused(['restore', 'davit.db', '--db', 'other.db']), {
    exitCode: 1,
    message: /davit\.db is served itself: give a copy of it that davit backup made/,
  });
  t.strictSame(keptIn(directory), []);
  t.notOk(existsSync(join(directory, 'other.db')));
  t.equal(await service.stop(), 0);
});

t.test('while another process has the file open, restore changes nothing', async (t) => {
  const { davit, directory, dbPath } = await withCopy(t);
  const writer = await busyWriter(t, dbPath);
  const { stderr, exitCode } = await davit(['restore', 'copy.db', '--yes']);
  t.equal(exitCode, 1);
  t.match(stderr, /^error: process \d+ has .*davit\.db open, .*: try again when it has ended\n$/);
  const count = writer.acknowledged().length;
  // That process goes on undisturbed.
  while (writer.acknowledged().length === count) await new Promise(setImmediate);
  await writer.stop();
  t.equal(dumpFile(dbPath)['projects']?.length, 1 + writer.acknowledged().length);
  t.strictSame(keptIn(directory), []);
});

t.test('a missing, damaged, newer or foreign file is not restored', async (t) => {
  const { refused, directory } = await withCopy(t);
  const inDirectory = (name: string) => join(directory, name);
  const variants: [name: string, make: (path: string) => void, message: RegExp][] = [
    ['missing.db', (path) => rmSync(path), /there is no file missing\.db/],
    [
      'directory.db',
      (path) => {
        rmSync(path);
        mkdirSync(path);
      },
      /directory\.db is not a regular file/,
    ],
    [
      'pipe.db',
      (path) => {
        rmSync(path);
        execFileSync('mkfifo', [path]);
      },
      /pipe\.db is not a regular file/,
    ],
    ['empty.db', (path) => truncateSync(path), /empty\.db is not a davit file/],
    ['text.db', (path) => writeFileSync(path, 'text'), /text\.db is not a davit file/],
    [
      'newer.db',
      (path) => changeFile(path, "PRAGMA user_version = 7; UPDATE instance SET davit_version = '9.8.7'"),
      /newer\.db needs davit 9\.8\.7 or newer: its schema is 7, and this is davit \d/,
    ],
    [
      'foreign.db',
      (path) => changeFile(path, 'PRAGMA application_id = 1'),
      /foreign\.db is not a davit file/,
    ],
    [
      'cut short.db',
      (path) => truncateSync(path, 8 * 4096),
      /cut short\.db is damaged \(.*\): 'davit doctor --db \S*cut\\ short\.db' tells more/,
    ],
    [
      'reference.db',
      (path) => changeFile(path, 'DELETE FROM projects'),
      /reference\.db is damaged \(1 of project_variables refer to projects that are not there\)/,
    ],
    [
      'table.db',
      (path) => changeFile(path, 'DROP TABLE replays'),
      /table\.db is damaged \(the table replays is missing\)/,
    ],
    [
      'trigger.db',
      (path) => changeFile(path, 'DROP TRIGGER deployment_end_is_final'),
      /trigger\.db is damaged \(the trigger deployment_end_is_final is missing\)/,
    ],
    [
      'instance.db',
      (path) => changeFile(path, 'DELETE FROM instance'),
      /instance\.db is damaged \(the row of the table instance is missing\)/,
    ],
    [
      'index.db',
      (path) => swapIndexes(path, 'webhooks_of_key', 'key_secrets_of_key'),
      /index\.db is damaged \(.*index.*\)/,
    ],
    [
      'unreadable.db',
      (path) => {
        rmSync(path);
        symlinkSync('/proc/self/mem', path); // nothing is at its beginning
      },
      /^error: E(IO|ACCES): /,
    ],
  ];
  for (const [name, make] of variants) {
    copyFileSync(inDirectory('copy.db'), inDirectory(name));
    make(inDirectory(name));
  }
  const before = readdirSync(directory).sort();
  for (const [name, , message] of variants) {
    t.match(await refused(['restore', name, '--yes']), { exitCode: 1, message }, name);
  }
  t.match(await refused(['restore', 'davit.db', '--yes']), {
    exitCode: 1,
    message: /is the file that would be replaced/,
  });
  t.match(await refused(['restore', '-']), { exitCode: 2, message: /the copy is a file, not stdin/ });
  t.match(await refused(['restore', '']), { exitCode: 2, message: /the name of the copy must not be empty/ });
  const after = readdirSync(directory).filter((name) => name !== 'davit.db-lock');
  t.strictSame(after.sort(), before);
});

/** Without these capabilities, root is bound by file modes like any user. */
const RIGHTS = '-dac_override,-dac_read_search';
const WITHOUT_ROOTS_RIGHTS =
  process.getuid?.() === 0 ? ['setpriv', '--bounding-set', RIGHTS, '--inh-caps', RIGHTS] : [];
const ifMayBeWithout =
  withoutRootsRights('/', ['true']).status === 0 ? {} : { skip: 'setpriv(1) may not take rights away here' };

t.test('a backup that the user may not read is refused with advice', ifMayBeWithout, async (t) => {
  const { directory } = await withCopy(t);
  const closed = join(directory, 'closed');
  mkdirSync(closed, 0);
  t.teardown(() => chmodSync(closed, 0o700)); // who is not root could not remove it
  chmodSync(join(directory, 'copy.db'), 0);
  for (const name of ['copy.db', 'closed/copy.db']) {
    const command = [process.execPath, MAIN, 'restore', name, '--db', 'new.db'];
    const { stdout, stderr, status } = withoutRootsRights(directory, command);
    t.strictSame([String(stdout), status], ['', 1]);
    t.match(
      String(stderr),
      new RegExp(
        `^error: ${name} cannot be read \\(EACCES\\): give this user the right, or a copy of its own\\n$`,
      ),
    );
  }
  t.notOk(existsSync(join(directory, 'new.db')));
});

t.test('restore does not announce what is paused, held or deleted', async (t) => {
  const { davit, json, directory } = await withCopy(t);
  await davit(['admin', 'project', 'create', '--name', 'paused', '--', '/bin/true']);
  await davit(['admin', 'deployment', 'create', 'paused', 'main']);
  await davit(['admin', 'project', 'pause', 'paused']);
  changeFile(
    join(directory, 'davit.db'),
    `INSERT INTO webhooks (id, key_id, url, events, status, created_at, enabled_at, deleted_at)
     SELECT 'whk_' || value, keys.id, 'https://example.com/', '[]', value, 1, 1, iif(value = 'enabled', 2, NULL)
       FROM keys, json_each('["enabled", "disabled"]');
     INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at, ladder_started_at, ladder_trigger)
     SELECT 'dlv_' || webhooks.id, events.id, type, webhooks.id, 'pending', 1, 1, 1, 'schedule'
       FROM events, webhooks`,
  );
  t.match(await json(['backup', 'other.db']), { waiting_deployments: 0, pending_deliveries: 0 });
  const { stderr, exitCode } = await davit(['restore', 'other.db', '--db', 'new.db']);
  t.strictSame([stderr, exitCode], ['', 0]);
});

t.test('a database of another program is not replaced', async (t) => {
  const { refused, directory } = await withCopy(t);
  const path = join(directory, 'songs.db');
  changeFile(path, 'CREATE TABLE songs (title TEXT)');
  const before = readFileSync(path);
  t.match(await refused(['restore', 'copy.db', '--db', 'songs.db', '--yes']), {
    exitCode: 1,
    message: /songs\.db is not a davit file: choose another one with --db/,
  });
  t.strictSame(readFileSync(path), before);
});

t.test('what is no regular file is not replaced', async (t) => {
  const { refused, directory } = await withCopy(t);
  execFileSync('mkfifo', [join(directory, 'pipe')]);
  const before = readdirSync(directory).sort();
  t.match(await refused(['restore', 'copy.db', '--db', 'pipe', '--yes']), {
    exitCode: 1,
    message: /pipe is not a regular file/,
  });
  t.strictSame(readdirSync(directory).sort(), before);
  t.ok(lstatSync(join(directory, 'pipe')).isFIFO());
});

t.test('restoring through a link replaces the target and keeps the link', async (t) => {
  const { davit, dump, directory, dbPath } = await withCopy(t);
  const then = dump();
  mkdirSync(join(directory, 'data'));
  renameSync(dbPath, join(directory, 'data/davit.db'));
  symlinkSync('data/davit.db', dbPath);
  await davit(['admin', 'project', 'create', '--name', 'later']);
  t.match(await davit(['restore', 'copy.db', '--yes']), { exitCode: 0 });
  t.ok(lstatSync(dbPath).isSymbolicLink());
  t.strictSame(dump(), then);
  t.equal(keptIn(join(directory, 'data')).length, 1);
});

t.test('restoring through a dangling link creates its target', async (t) => {
  const { davit, dump, directory, dbPath } = await withCopy(t);
  const then = dump();
  rmSync(dbPath);
  symlinkSync('real.db', dbPath);
  t.match(await davit(['restore', 'copy.db', '--yes']), { exitCode: 0, stderr: '' });
  t.ok(lstatSync(dbPath).isSymbolicLink());
  t.ok(lstatSync(join(directory, 'real.db')).isFile());
  t.strictSame(dump(), then);
});

t.test('without a terminal, replacing a file needs --yes', async (t) => {
  const { refused, directory } = await withCopy(t);
  // Not 'davit.db is kept under another name', which is known only once the copy is made.
  t.match(await refused(['restore', 'copy.db']), {
    exitCode: 2,
    message: /^error: this must be .* give --yes/,
  });
  t.strictSame(keptIn(directory), []);
});

t.test('a file that appears while restore copies is not replaced unasked', async (t) => {
  const { davit, directory } = await withCopy(t);
  await davit(['admin', 'project', 'create', '--name', 'colleague', '--db', 'other.db']);
  const appeared = join(directory, 'new.db');
  const { ended, stderr, goOn } = await copying(t, directory, ['restore', 'copy.db', '--db', 'new.db']);
  renameSync(join(directory, 'other.db'), appeared);
  goOn();
  t.strictSame(await ended, [2, null]);
  t.match(await stderr, /give --yes/);
  t.match(dumpFile(appeared)['projects'], [{ name: 'colleague' }]);
  t.strictSame(keptIn(directory), []);
});

t.test('on a terminal, restore names both files, asks, and shows its progress', needsTerminal, async (t) => {
  const { davit, dump, directory } = await withCopy(t);
  const then = dump();
  await davit(['admin', 'project', 'create', '--name', 'later']);
  const now = dump();
  const restore = (typed: string) => onTerminal({ directory }, ['restore', 'copy.db'], { typed });
  const no = restore('n\n');
  t.match(no, {
    shown:
      /davit\.db \(.* changed .*\) is kept under another name\. Replace it with copy\.db \(.*1 project, .*\)\? \[y\/N\]/,
    exitCode: 1,
  });
  t.strictSame(dump(), now);
  t.strictSame(readdirSync(directory).sort(), ['copy.db', 'davit.db', 'davit.db-lock']);
  t.match(restore('y\n'), { shown: /copying: \d+ % of .*checking the copy/s, exitCode: 0 });
  t.strictSame(dump(), then);
});

t.test('a restore that was interrupted or killed changes nothing', async (t) => {
  const { davit, dump, directory, dbPath } = place(t);
  makeLarge(dbPath, 40);
  await davit(['backup', 'copy.db']);
  await davit(['admin', 'project', 'create', '--name', 'later']);
  const { projects } = dump();
  for (const [signal, ending] of [
    ['SIGINT', [130, null]],
    ['SIGHUP', [129, null]],
    ['SIGKILL', [null, 'SIGKILL']],
  ] as const) {
    const { child, ended } = await copying(t, directory, ['restore', 'copy.db', '--yes']);
    child.kill(signal);
    t.strictSame(await ended, ending);
    t.strictSame(dump()['projects'], projects);
    t.strictSame(keptIn(directory), []);
  }
  t.match(await davit(['restore', 'copy.db', '--yes']), { exitCode: 0 });
  t.strictSame(dump()['projects']?.length, 1);
});

t.test('a restore to a full disk changes nothing', ifMayMount, async (t) => {
  const { directory, dbPath } = place(t);
  makeLarge(dbPath, 8);
  mkdirSync(join(directory, 'small'));
  const { stdout, stderr } = await onSmallDisk(directory, 'small', '2m', [
    '"$0" "$1" admin project create --name kept --db small/davit.db 2>&1 >/dev/null',
    '"$0" "$1" restore davit.db --db small/davit.db --yes; echo "exit $?"',
    'ls -A small; "$0" "$1" admin project list --db small/davit.db',
  ]);
  t.match(
    stdout,
    /^created the file .*\ncreated project kept .*\nexit 1\ndavit\.db\ndavit\.db-lock\nID .*\nprj_\w+ +kept .*\n$/,
  );
  t.match(
    stderr,
    /^error: there is no room in .*small for a copy of davit\.db: make some; nothing was changed\n$/,
  );
});

t.test('restore refuses a file with a deployment that still runs after its service was killed', async (t) => {
  const { davit, json, directory, refused } = await withCopy(t);
  const started = join(directory, 'started');
  const command = ['sh', '-c', 'touch started; sleep 600'];
  await davit(['admin', 'project', 'create', '--name', 'slow', '--dir', '.', '--', ...command]);
  const service = await serve(t, directory);
  // Watched from here on: the iterator of node:fs/promises would begin only when it is asked.
  const watcher = watch(directory);
  t.teardown(() => watcher.close());
  const hasStarted = new Promise<void>((resolve) => {
    watcher.on('change', () => existsSync(started) && resolve());
  });
  const deployment = await json<{ id: string }>(['admin', 'deployment', 'create', 'slow', 'main']);
  await hasStarted;
  await service.kill();
  t.match(await refused(['restore', 'copy.db', '--yes']), {
    exitCode: 1,
    message: new RegExp(`deployment ${deployment.id} of ./davit.db is still running as process \\d+: end it`),
  });
  const again = await serve(t, directory);
  await again.stop();
  t.match(await davit(['restore', 'copy.db', '--yes']), { exitCode: 0 });
});

t.test('restore --help says what becomes of running deployments', async (t) => {
  const { stdout } = await run(['restore', '--help']);
  t.match(
    stdout.replaceAll(/\s+/g, ' '),
    /recorded as interrupted at the next start.* identified by id, start time and boot/,
  );
});

/** A file with a project and a key, and a copy of it. */
async function withCopy(t: Test): Promise<Place> {
  const there = place(t);
  await there.davit(['admin', 'project', 'create', '--name', 'website', '--env', 'STAGE=live']);
  await there.davit(['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects']);
  const copy = join(there.directory, 'copy.db');
  writeFileSync(copy, '', { mode: 0o600 });
  const check = copyDatabase(there.dbPath, copy, { onBegin: () => undefined, onCopied: () => undefined });
  if (check.kind !== 'good') throw new Error(check.kind);
  return there;
}

function withoutRootsRights(directory: string, command: string[]) {
  const [file = '', ...rest] = [...WITHOUT_ROOTS_RIGHTS, ...command];
  return spawnSync(file, rest, { cwd: directory, env: { ...COMPILE_CACHE, PATH: process.env['PATH'] } });
}

function keptIn(directory: string): string[] {
  return readdirSync(directory).filter((name) => name.includes('.before-restore-'));
}
