import { spawnSync } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { realEffects } from '../../src/effects.ts';
import { APPLICATION_ID, SCHEMA_VERSION } from '../../src/store/database.ts';
import { busyWriter } from '../helpers/busy.ts';
import { COMPILE_CACHE, MAIN, place, run } from '../helpers/cli.ts';
import { childrenOf, stateOf, until } from '../helpers/commands.ts';
import { type Copying, copying } from '../helpers/copying.ts';
import { changeFile } from '../helpers/files.ts';
import { makeLarge } from '../helpers/large.ts';
import { ifMayMount, onSmallDisk } from '../helpers/small-disk.ts';
import { dumpOf } from '../helpers/store.ts';
import { needsTerminal, onTerminal } from '../helpers/terminal.ts';

t.test('a backup is a single file of mode 0600 with every row of the original', async (t) => {
  const { davit, dump, directory } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website', '--env', 'TOKEN=secret']);
  await davit(['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects']);
  const { stdout, stderr, exitCode } = await davit(['backup', 'copy.db']);
  t.match(stdout, /^copy\.db: [\d.]+ kB, 1 project, 1 key, 0 deployments, checked, as of 20\S+Z\n$/);
  t.strictSame([stderr, exitCode], ['', 0]);
  t.equal(statSync(join(directory, 'copy.db')).mode & 0o777, 0o600);
  t.strictSame(readdirSync(directory).sort(), ['copy.db', 'davit.db']);

  const copy = openCopy(t, join(directory, 'copy.db'));
  t.equal(copy.pragma('journal_mode', { simple: true }), 'delete', 'the copy needs no side files');
  t.equal(copy.pragma('application_id', { simple: true }), APPLICATION_ID);
  t.equal(copy.pragma('user_version', { simple: true }), SCHEMA_VERSION);
  t.equal(copy.pragma('auto_vacuum', { simple: true }), 2, 'it can shrink as the original can');
  t.strictSame(dumpOf(copy), dump());
});

t.test('a backup under constant writes holds all that was acknowledged before it began', async (t) => {
  const { davit, directory, dbPath } = place(t);
  const writer = await busyWriter(t, dbPath);
  for (const name of ['one.db', 'two.db', 'three.db']) {
    const before = writer.acknowledged();
    const { exitCode, stderr } = await davit(['backup', name]);
    t.strictSame([exitCode, stderr], [0, '']);
    t.ok(writer.acknowledged().length > before.length + 1, 'the writer went on meanwhile');
    const copy = openCopy(t, join(directory, name));
    t.equal(copy.pragma('integrity_check', { simple: true }), 'ok');
    const ids = new Set(copy.prepare('SELECT id FROM projects').pluck().all());
    t.strictSame(
      before.filter((id) => !ids.has(id)),
      [],
    );
  }
  await writer.stop();
});

t.test('--json describes the contents of the backup', async (t) => {
  const { json, davit } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  t.match(await json(['backup', 'copy.db']), {
    file: 'copy.db',
    at: /Z$/,
    schema_version: SCHEMA_VERSION,
    bytes: Number,
    created_at: /Z$/,
    last_event_at: /Z$/,
    projects: 1,
    keys: 0,
    deployments: 0,
    running_deployments: 0,
    waiting_deployments: 0,
    pending_deliveries: 0,
  });
});

t.test('a name that no file can have is refused before anything is copied', async (t) => {
  const { davit, refused, directory } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  const before = readdirSync(directory).sort();
  t.match(await refused(['backup', 'x'.repeat(256)]), {
    exitCode: 1,
    message: /x is too long for a name: choose another one$/,
  });
  t.strictSame(readdirSync(directory).sort(), before);
});

t.test(
  'a backup into a directory without a name is refused, and makes no file called as the directory',
  async (t) => {
    const { davit, refused, directory } = place(t);
    await davit(['admin', 'project', 'create', '--name', 'website']);
    mkdirSync(join(directory, 'folder'));
    const before = readdirSync(directory).sort();
    for (const name of ['new/', 'new/.', 'folder/']) {
      t.match(await refused(['backup', name]), {
        exitCode: 2,
        message: new RegExp(`the copy is one file: add its name to '${name}'`),
      });
    }
    t.strictSame(readdirSync(directory).sort(), before);
  },
);

t.test('- is no name of a copy, and makes no file: who gives it expects the copy on stdout', async (t) => {
  const { davit, refused, directory } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  const before = readdirSync(directory).sort();
  t.match(await refused(['backup', '-']), { exitCode: 2, message: /the copy is a file, not stdout/ });
  t.strictSame(readdirSync(directory).sort(), before);
  await davit(['backup', './-']);
});

t.test('a backup never overwrites an existing file, directory or link', async (t) => {
  const { davit, refused, directory } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  writeFileSync(join(directory, 'notes.txt'), 'notes');
  mkdirSync(join(directory, 'folder'));
  symlinkSync('nowhere', join(directory, 'link'));
  const before = readdirSync(directory).sort();
  for (const name of ['notes.txt', 'folder', 'davit.db']) {
    t.match(await refused(['backup', name]), {
      exitCode: 1,
      message: new RegExp(`${name} is there already: choose another name`),
    });
  }
  t.match(await refused(['backup', 'link']), { exitCode: 1, message: /link is there already/ });
  t.match(await refused(['backup', '']), { exitCode: 2, message: /the name of the copy must not be empty/ });
  t.equal(readFileSync(join(directory, 'notes.txt'), 'utf8'), 'notes');
  t.strictSame(readdirSync(directory).sort(), before);
});

t.test('a backup never gets a name that stands for a part of a database', async (t) => {
  const { davit, refused, directory } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  symlinkSync('.', join(directory, 'here'));
  const before = readdirSync(directory).sort();
  for (const side of ['-wal', '-shm', '-journal', '-lock']) {
    for (const name of [`davit.db${side}`, `here/davit.db${side}`]) {
      t.match(await refused(['backup', name]), {
        exitCode: 1,
        message:
          /^error: \S+ would be taken for a part of (?:here\/)?davit\.db, and be lost: choose another name$/,
      });
    }
  }
  t.strictSame(readdirSync(directory).sort(), before);
  writeFileSync(join(directory, 'earlier.db-wal'), '');
  t.match(await refused(['backup', 'earlier.db']), {
    exitCode: 1,
    message:
      'error: earlier.db-wal is there already, and would be taken for a part of earlier.db: choose another name',
  });
  t.match(await davit(['backup', 'copy-lock']), { exitCode: 0 });
});

t.test('a backup without a valid source or target directory is refused and leaves no file', async (t) => {
  const { davit, refused, directory } = place(t);
  t.match(await refused(['backup', 'copy.db']), { exitCode: 1, message: /there is no file \.\/davit\.db/ });
  writeFileSync(join(directory, 'notes.txt'), 'these are my notes, not a database\n'.repeat(100));
  writeFileSync(join(directory, 'empty'), '');
  changeFile(join(directory, 'foreign.db'), 'CREATE TABLE songs (title TEXT)');
  for (const name of ['notes.txt', 'empty', 'foreign.db']) {
    t.match(await refused(['backup', 'copy.db', '--db', name]), {
      exitCode: 1,
      message: new RegExp(`^error: ${name} is not a davit file\\b`),
    });
  }
  await davit(['admin', 'project', 'create', '--name', 'website']);
  t.match(await refused(['backup', 'nowhere/copy.db']), {
    exitCode: 1,
    message: /cannot write in .*nowhere, which is not there: choose another directory, or create that one$/m,
  });
  t.match(await refused(['backup', 'notes.txt/copy.db']), {
    exitCode: 1,
    message: /cannot write in .*notes\.txt, which is no directory: choose one$/m,
  });
  t.strictSame(readdirSync(directory).sort(), ['davit.db', 'empty', 'foreign.db', 'notes.txt']);
});

t.test('a damaged database is not backed up, and the error says that it is damaged', async (t) => {
  const { refused, directory, dbPath } = place(t);
  makeLarge(dbPath, 2);
  changeFile(
    dbPath,
    "INSERT INTO project_variables (project_id, name, value) VALUES ('prj_2', 'STAGE', 'live')",
  );
  const { message, exitCode } = await refused(['backup', 'copy.db']);
  t.equal(exitCode, 1);
  t.match(message, /davit\.db is damaged \(.+\): 'davit doctor --db \S*davit\.db' tells more/);
  t.strictSame(readdirSync(directory), ['davit.db']);
});

t.test('a signal during a backup ends it at once and removes the partial copy', async (t) => {
  const { directory, dbPath } = place(t);
  makeLarge(dbPath, 40);
  for (const [signal, exitCode] of [
    ['SIGINT', 130],
    ['SIGTERM', 143],
    ['SIGHUP', 129], // its terminal was closed
  ] as const) {
    const backup = await backupUnderWay(t, directory);
    const [helperId = 0] = childrenOf(backup.child.pid);
    process.kill(helperId, 'SIGSTOP'); // by itself it would end only once it sees that davit has
    t.teardown(() => stateOf(helperId) === 'T' && process.kill(helperId, 'SIGKILL'));
    backup.child.kill(signal);
    t.strictSame(await backup.ended, [exitCode, null]);
    t.not(stateOf(helperId), 'T', 'its helper process was killed');
    t.match(await backup.stderr, /^stopped: nothing was changed\n$/);
    t.strictSame(readdirSync(directory).filter(isNoSideFile), ['davit.db']);
  }
});

t.test('a killed backup leaves no copy, and the next one removes the partial file', async (t) => {
  const { davit, directory, dbPath } = place(t);
  makeLarge(dbPath, 40);
  const backup = await backupUnderWay(t, directory);
  // Its helper too, as a power cut would: while that is killed, davit cannot tell.
  const helperIds = childrenOf(backup.child.pid);
  backup.child.kill('SIGSTOP');
  for (const processId of helperIds) process.kill(processId, 'SIGKILL');
  backup.child.kill('SIGKILL');
  await backup.ended;
  t.equal(helperIds.length, 1);
  const left = readdirSync(directory).filter(isNoSideFile);
  t.match(left, [/^\.davit-partial-/, 'davit.db']);
  t.notOk(existsSync(join(directory, 'copy.db')));

  const foreignPartial = join(directory, '.davit-partial-1-1-00000000-0000-0000-0000-000000000000');
  const oldPartial = foreignPartial.replace('-1-1-', '-2-2-');
  for (const path of [foreignPartial, oldPartial]) writeFileSync(path, 'of another machine on the same disk');
  const longAgo = realEffects.now() / 1_000 - 2 * 86_400;
  utimesSync(oldPartial, longAgo, longAgo);
  t.match(await davit(['backup', 'copy.db']), { exitCode: 0 });
  t.strictSame(readdirSync(directory).filter(isNoSideFile).sort(), [
    foreignPartial.slice(directory.length + 1),
    'copy.db',
    'davit.db',
  ]);
  t.equal(openCopy(t, join(directory, 'copy.db')).pragma('integrity_check', { simple: true }), 'ok');
});

t.test('when only the backup command is killed, its helper process removes the partial copy', async (t) => {
  const { directory, dbPath } = place(t);
  makeLarge(dbPath, 40);
  const backup = await backupUnderWay(t, directory);
  backup.child.kill('SIGKILL');
  await backup.ended;
  await until(() => !readdirSync(directory).some((name) => name.startsWith('.davit-partial-')));
  t.notOk(existsSync(join(directory, 'copy.db')));
});

t.test('when its helper process is killed, as for want of memory, backup says so', async (t) => {
  const { directory, dbPath } = place(t);
  makeLarge(dbPath, 40);
  const backup = await backupUnderWay(t, directory);
  for (const helperId of childrenOf(backup.child.pid)) process.kill(helperId, 'SIGKILL');
  t.strictSame(await backup.ended, [1, null]);
  t.equal(
    await backup.stderr,
    'error: the process that makes the copy was killed (SIGKILL), perhaps as memory ran out: try again\n',
  );
  t.strictSame(readdirSync(directory).filter(isNoSideFile), ['davit.db']);
});

t.test('a backup to a full disk fails and leaves nothing behind', ifMayMount, async (t) => {
  const { directory, dbPath } = place(t);
  makeLarge(dbPath, 8);
  mkdirSync(join(directory, 'small'));
  const { stdout, stderr } = await onSmallDisk(directory, 'small', '2m', [
    '"$0" "$1" backup small/copy.db; echo "exit $?"; ls -A small',
  ]);
  t.equal(stdout, 'exit 1\n');
  t.match(
    stderr,
    /^error: there is no room in .*small for a copy of \.\/davit\.db: make some; nothing was changed\n$/,
  );
  const withoutFiles = await onSmallDisk(directory, 'small', '2m,nr_inodes=1', [
    '"$0" "$1" backup small/copy.db; echo "exit $?"; ls -A small',
  ]);
  t.equal(withoutFiles.stdout, 'exit 1\n');
  t.match(
    withoutFiles.stderr,
    /^error: cannot write in .*small \(ENOSPC\): choose another directory, or make room in that one\n$/,
  );
});

t.test('a backup that would leave a service no room on its disk is not begun', ifMayMount, async (t) => {
  const { directory, dbPath } = place(t);
  makeLarge(dbPath, 8);
  mkdirSync(join(directory, 'small'));
  const { stdout, stderr } = await onSmallDisk(directory, 'small', '22m', [
    'cp davit.db small/davit.db; head -c 3000000 /dev/zero >small/other; mkfifo ready',
    '"$0" "$1" serve --db small/davit.db --listen 127.0.0.1:0 2>log >ready & read line <ready',
    '"$0" "$1" backup small/copy.db --db small/davit.db; echo "exit $?"; ls -A small',
    'kill $!; wait $!; "$0" "$1" backup small/copy.db --db small/davit.db >copied; echo "exit $?"',
    'rm small/copy.db; "$0" "$1" serve --db davit.db --listen 127.0.0.1:0 2>log >ready & read line <ready',
    '"$0" "$1" backup small/copy.db --db davit.db >copied; echo "exit $?"; kill $!; wait $!',
  ]);
  t.equal(
    stdout,
    'exit 1\ndavit.db\ndavit.db-lock\ndavit.db-shm\ndavit.db-wal\nother\nexit 0\nexit 0\n',
    'once no service writes there, it may take the room, as a copy of one that writes on another disk may',
  );
  t.match(
    stderr,
    /^error: there is no room in .*small .* \(it needs 12\.6 MB with 4\.2 MB to spare, and 11\.6 MB are free\): .*\n$/,
  );
});

t.test('what may limit a copy on a disk with room is named', async (t) => {
  const { directory, dbPath, dump } = place(t);
  makeLarge(dbPath, 8);
  const before = dump();
  // Of 2 MiB at most. A quota, which needs a file system that has them, reaches SQLite as the same error.
  const words = ['-c', 'ulimit -f 4096; exec "$0" "$1" backup copy.db', process.execPath, MAIN];
  const { status, stdout, stderr } = spawnSync('sh', words, {
    cwd: directory,
    env: COMPILE_CACHE,
    encoding: 'utf8',
  });
  t.strictSame([status, stdout], [1, '']);
  t.equal(
    stderr,
    `error: there is no room in ${directory} for a copy of ./davit.db (a quota is used up, the size of files is limited, by ulimit -f perhaps, or the disk fails): ` +
      'make some; nothing was changed\n',
  );
  t.strictSame(readdirSync(directory).filter(isNoSideFile), ['davit.db']);
  t.strictSame(dump(), before);
});

t.test('on a terminal, backup shows its progress', needsTerminal, async (t) => {
  const { directory, dbPath } = place(t);
  makeLarge(dbPath, 40);
  const { shown } = onTerminal({ directory }, ['backup', 'copy.db']);
  const [, ...lines] = `\n${shown}`.split(/[\r\n]+/).map((line) => line.replace('\u001b[K', ''));
  t.match(lines[0], /^copying: \d+ % of [\d.]+ MB$/);
  t.match(lines.slice(-3), ['checking the copy', /^copy\.db: /, '']);
});

t.test('backup --help says to keep the copy safe, and --help hides internal commands', async (t) => {
  const { stdout } = await run(['backup', '--help']);
  t.match(stdout, /keep it as safe/);
  t.notMatch((await run(['--help'])).stdout, /__file/);
});

/** `davit backup copy.db`, once the copy is made. */
function backupUnderWay(t: Test, directory: string): Promise<Copying> {
  return copying(t, directory, ['backup', 'copy.db']);
}

function openCopy(t: Test, path: string): Sqlite.Database {
  const copy = new Sqlite(path, { readonly: true, fileMustExist: true });
  t.teardown(() => copy.close());
  return copy;
}

function isNoSideFile(name: string): boolean {
  return !/-(?:wal|shm|lock|journal)$/.test(name);
}
