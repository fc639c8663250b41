import { spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  chownSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  truncateSync,
  watch,
  writeFileSync,
} from 'node:fs';
import { basename, join } from 'node:path';
import { text } from 'node:stream/consumers';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { type Effects, realEffects } from '../../src/effects.ts';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { migrateFile } from '../../src/store/migrations.ts';
import { COMPILE_CACHE, MAIN, place, runHere } from '../helpers/cli.ts';
import { childrenOf } from '../helpers/commands.ts';
import { changeFile, dumpFile } from '../helpers/files.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { KNOWS_OLDER_SCHEMAS, makeOlder, presentSchema, STEPS, schemaOf } from '../helpers/older-schema.ts';
import { serveWithLog } from '../helpers/served.ts';
import { ifMayMount, onSmallDisk } from '../helpers/small-disk.ts';
import { needsTerminal, onTerminal } from '../helpers/terminal.ts';

const NODE_OPTIONS = KNOWS_OLDER_SCHEMAS;
const OLDER = SCHEMA_VERSION - 1;

t.test('serve migrates once, keeps a copy of the older file and logs each step', async (t) => {
  const { directory, dbPath, before, dump, present } = await olderFile(t);
  // What the older file has is of 1970: it would be removed while it is compared.
  const options = ['--retention', 'off'];
  const service = await serveWithLog(t, directory, { options, env: { NODE_OPTIONS } });
  await service.logged(/^migrated: /);
  t.match(service.log().slice(0, 4), [
    { level: 'info', file: dbPath, to_schema: SCHEMA_VERSION, msg: /copying it first/ },
    { level: 'info', kept_as: String, msg: 'the file as it was is kept' },
    { level: 'info', to_schema: SCHEMA_VERSION, msg: 'migrating' },
    { level: 'info', from_schema: OLDER, to_schema: SCHEMA_VERSION, kept_as: String, msg: /^migrated: / },
  ]);
  const [kept = '', ...more] = keptIn(directory);
  t.match(
    kept,
    new RegExp(`^davit\\.db\\.before-v${SCHEMA_VERSION}-20\\d\\d-\\d\\d-\\d\\dT\\d\\d-\\d\\d-[\\d.]+Z$`),
  );
  t.strictSame(more, []);
  t.equal(statSync(join(directory, kept)).mode & 0o777, 0o600);
  t.strictSame(dumpFile(join(directory, kept)), before);
  t.equal(userVersionOf(join(directory, kept)), OLDER);
  t.strictSame(schemaOf(dbPath), present);
  const { projects, log_chunks } = dump();
  t.strictSame(projects?.length, before['projects']?.length);
  t.strictSame(log_chunks, before['log_chunks']);
  t.equal(await service.stop(), 0);
  t.strictSame(readdirSync(directory).sort(), ['davit.db', kept, 'davit.db-lock'].sort());

  const again = await serveWithLog(t, directory, { env: { NODE_OPTIONS } });
  t.notMatch(again.stderr(), /migrat/);
  t.equal(await again.stop(), 0);
  t.strictSame(keptIn(directory), [kept]);
});

t.test('admin migrate migrates the file without starting a service', async (t) => {
  const { older, directory, dbPath, present } = await olderFile(t);
  t.match(await older(['admin', 'project', 'list']), {
    exitCode: 1,
    stdout: '',
    stderr: new RegExp(
      `^error: an older davit wrote \\./davit\\.db \\(schema ${OLDER}, this one needs ${SCHEMA_VERSION}\\): ` +
        "stop that one if it runs; then 'davit serve' migrates the file, or 'davit admin migrate' .*\n$",
    ),
  });
  const { stdout, stderr, exitCode } = await older(['admin', 'migrate']);
  t.equal(stdout, `./davit.db is migrated from schema ${OLDER} to ${SCHEMA_VERSION}\n`);
  t.match(
    stderr,
    /^the file as it was is kept as \/.*davit\.db\.before-v\S+Z: remove it once all is well\n$/,
  );
  t.equal(exitCode, 0);
  t.strictSame(schemaOf(dbPath), present);
  t.match(await older(['admin', 'project', 'pause', 'website']), { exitCode: 0 });
  t.match(await older(['admin', 'migrate']), {
    exitCode: 0,
    stdout: './davit.db is up to date: there is nothing to do\n',
    stderr: '',
  });
  t.strictSame(JSON.parse((await older(['admin', 'migrate', '--json'])).stdout), {
    file: './davit.db',
    migrated: false,
  });
  t.equal(keptIn(directory).length, 1);
});

t.test('the copy that root keeps belongs to who owns the file', ifMayBeNobody(), async (t) => {
  const { older, directory, dbPath } = await olderFile(t);
  chownSync(dbPath, 65_534, 65_533);
  t.match(await older(['admin', 'migrate']), { exitCode: 0 });
  t.match(statSync(join(directory, keptIn(directory)[0] ?? '')), { uid: 65_534, gid: 65_533 });
});

t.test('while an older service has the file, it can be backed up and examined, not migrated', async (t) => {
  const { older, refused, directory, dbPath, before } = await olderFile(t);
  const release = lockForServing(dbPath, process.pid, realEffects);
  for (const words of [
    ['serve', '--listen', '127.0.0.1:0'],
    ['admin', 'migrate'],
  ]) {
    const { message, exitCode } = await refused(words, { env: { NODE_OPTIONS, PATH: '/usr/bin:/bin' } });
    t.equal(exitCode, 1);
    t.match(message, new RegExp(`served already by process ${process.pid} since .*: stop that one first`));
  }
  t.match(await older(['admin', 'key', 'list']), { exitCode: 1, stderr: /stop that one if it runs/ });
  const doctor = await older(['doctor', '--json']);
  t.match(JSON.parse(doctor.stdout), {
    ok: false,
    schema_version: OLDER,
    service: { process_id: process.pid },
  });
  t.match(JSON.parse(doctor.stdout).findings, [
    { check: 'permissions' },
    { check: 'disk' },
    { check: 'integrity', level: 'ok' },
    { check: 'schema', level: 'problem', advice: /restart the service with this one/ },
  ]);
  const backup = await older(['backup', 'copy.db', '--json']);
  t.match(JSON.parse(backup.stdout), { schema_version: OLDER, projects: 1, running_deployments: 1 });
  t.strictSame(dumpFile(join(directory, 'copy.db')), before);
  t.strictSame(dumpFile(dbPath), before);
  t.strictSame(keptIn(directory), []);
  release();
  t.match(JSON.parse((await older(['doctor', '--json'])).stdout).findings.at(-1), {
    check: 'schema',
    advice: /^'davit serve' migrates it/,
  });
});

t.test('a file that another davit migrates just before it is locked is not migrated again', async (t) => {
  const { directory, dbPath } = await olderFile(t);
  const effects: Effects = {
    ...realEffects,
    // The lock tells since when it is held, which asks for the time first.
    now() {
      migrateFile(dbPath, { migrations: STEPS });
      return realEffects.now();
    },
  };
  t.strictSame(await runHere(['admin', 'migrate'], { cwd: directory, effects }), {
    stdout: './davit.db is up to date: there is nothing to do\n',
    stderr: '',
    exitCode: 0,
  });
  t.equal(userVersionOf(dbPath), SCHEMA_VERSION);
  t.strictSame(keptIn(directory), []);
  lockForServing(dbPath, process.pid, realEffects)();
});

t.test('while another process has the file open, it is not migrated', async (t) => {
  const { refused, directory, dbPath } = await olderFile(t);
  const made = namesMadeIn(t, directory);
  const other = new Sqlite(dbPath);
  other.prepare('SELECT count(*) FROM projects').get();
  for (const words of [
    ['admin', 'migrate'],
    ['serve', '--listen', '127.0.0.1:0'],
  ]) {
    t.match(await refused(words, { env: { NODE_OPTIONS, PATH: '/usr/bin:/bin' } }), {
      exitCode: 1,
      message: new RegExp(
        `^error: process ${process.pid} has .*davit\\.db open, .*: try again when it has ended$`,
      ),
    });
  }
  other.close();
  const names = await made();
  t.ok(names.includes('davit.db-lock'));
  t.strictSame(
    names.filter((name) => name.startsWith('.davit-partial')),
    [],
    'nor copied at each try',
  );
  t.equal(userVersionOf(dbPath), OLDER);
});

t.test(
  'what another process writes while the copy is made is neither migrated nor missing in it',
  async (t) => {
    const { older, directory, dbPath, before } = await olderFile(t);
    const effects: Effects = {
      ...realEffects,
      // The name that a finished copy is given has the time in it.
      now() {
        const names = readdirSync(directory).filter((name) => name.startsWith('.davit-partial'));
        if (names.some((name) => statSync(join(directory, name)).size > 0)) {
          changeFile(dbPath, 'UPDATE instance SET probes = probes + 1');
        }
        return realEffects.now();
      },
    };
    t.match(await runHere(['admin', 'migrate'], { cwd: directory, effects }), {
      stderr: /^error: another process, .*, has written to \/.*davit\.db since it was copied: try again/,
      exitCode: 1,
    });
    t.strictSame(keptIn(directory), []);
    t.equal(userVersionOf(dbPath), OLDER);
    const [instance] = before['instance'] as [{ probes: number }];
    const written = { ...before, instance: [{ ...instance, probes: instance.probes + 1 }] };
    t.strictSame(dumpFile(dbPath), written);

    t.match(await older(['admin', 'migrate']), { exitCode: 0 });
    const [kept = ''] = keptIn(directory);
    t.strictSame(dumpFile(join(directory, kept)), written);
  },
);

t.test('restoring a backup of an older schema migrates it', async (t) => {
  const { older, directory, dbPath, present, before } = await olderFile(t);
  t.match(await older(['backup', 'copy.db']), { exitCode: 0 });
  const copy = readFileSync(join(directory, 'copy.db'));
  const restored = await older(['restore', 'copy.db', '--yes', '--json']);
  t.match(JSON.parse(restored.stdout), { schema_version: SCHEMA_VERSION, migrated_from: OLDER, projects: 1 });
  t.strictSame(schemaOf(dbPath), present);
  t.strictSame(readFileSync(join(directory, 'copy.db')), copy, 'the backup is unchanged');
  t.equal(dumpFile(dbPath)['deployments']?.length, before['deployments']?.length);
  const again = await older(['restore', 'copy.db', '--yes']);
  t.match(
    again.stderr,
    new RegExp(`it is migrated from schema ${OLDER} to ${SCHEMA_VERSION}; the copy stays`),
  );
  t.match(await older(['restore', 'copy.db', '--db', 'new.db']), { exitCode: 0 });
  t.strictSame(schemaOf(join(directory, 'new.db')), present);
});

t.test('a migration that breaks references is rolled back and leaves no copy', async (t) => {
  const { older, directory, dbPath, before } = await olderFile(t);
  for (const words of [
    ['admin', 'migrate'],
    ['serve', '--listen', '127.0.0.1:0', '--log-level', 'silent'],
  ]) {
    const { exitCode, stderr } = await older(words, { TEST_MIGRATION: 'breaks' });
    t.equal(exitCode, 1);
    t.match(stderr, /refer to projects that are not there/);
    t.strictSame(dumpFile(dbPath), before);
    t.equal(userVersionOf(dbPath), OLDER);
    t.strictSame(keptIn(directory), [], 'no copy is left');
  }
  t.match(await older(['admin', 'migrate']), { exitCode: 0 });
});

t.test('a damaged file is not migrated, and doctor says what is damaged', async (t) => {
  const { older, refused, directory, dbPath } = await olderFile(t);
  changeFile(dbPath, "DELETE FROM keys WHERE id = 'key_1'");
  t.match(await refused(['admin', 'migrate'], { env: { NODE_OPTIONS } }), {
    exitCode: 1,
    message:
      /davit\.db is damaged \(\d of \w+ refer to keys that are not there\): 'davit doctor --db \S*davit\.db' tells more/,
  });
  t.strictSame(keptIn(directory), []);
  t.match(JSON.parse((await older(['doctor', '--json'])).stdout).findings.slice(-2), [
    { check: 'integrity', level: 'problem', message: /refer to keys that are not there/ },
    { check: 'schema' },
  ]);
});

t.test('a migration that was stopped or killed leaves the file as it was and can be repeated', async (t) => {
  for (const [signal, ending, kept] of [
    ['SIGTERM', [143, null], 0],
    ['SIGHUP', [129, null], 0],
    ['SIGKILL', [null, 'SIGKILL'], 1],
  ] as const) {
    const { older, directory, dbPath, before, present } = await olderFile(t);
    const { child, stderr } = await migrationUnderWay(t, directory, ['admin', 'migrate']);
    const children = childrenOf(child.pid);
    const ended = once(child, 'exit');
    child.kill(signal);
    t.strictSame(await ended, ending);
    if (signal === 'SIGKILL') for (const processId of children) process.kill(processId, 'SIGKILL');
    else t.equal(await stderr, 'stopped: nothing was changed\n');
    await Promise.all(children.map(untilGone));
    t.strictSame(dumpFile(dbPath), before);
    t.equal(userVersionOf(dbPath), OLDER);
    t.equal(keptIn(directory).length, kept, 'only who was killed leaves a copy');
    for (const copy of keptIn(directory)) t.strictSame(dumpFile(join(directory, copy)), before);
    t.match(await older(['admin', 'migrate']), { exitCode: 0 });
    t.strictSame(schemaOf(dbPath), present);
  }
});

t.test('when the process that migrates is killed, as for want of memory, davit says so', async (t) => {
  const { directory, dbPath, before } = await olderFile(t);
  const { child, stderr } = await migrationUnderWay(t, directory, ['admin', 'migrate']);
  const ended = once(child, 'exit');
  for (const processId of childrenOf(child.pid)) process.kill(processId, 'SIGKILL');
  t.strictSame(await ended, [1, null]);
  t.equal(
    await stderr,
    'error: the process that migrates the file was killed (SIGKILL), perhaps as memory ran out: try again\n',
  );
  t.strictSame(keptIn(directory), []);
  t.strictSame(dumpFile(dbPath), before);
  t.equal(userVersionOf(dbPath), OLDER);
});

t.test('the process that migrates for a davit that has ended leaves the file as it was', async (t) => {
  const { older, directory, dbPath, before } = await olderFile(t);
  const nobody = '0'; // no process that could have asked for it
  t.match(await older(['__file', 'migrate', dbPath, dbPath, nobody]), {
    stdout: /^\{"kind":"failed",.*the davit that asked for this has ended/,
  });
  t.strictSame(readdirSync(directory), [basename(dbPath)]);
  t.strictSame(dumpFile(dbPath), before);
});

t.test('a migration that was stopped when all was committed keeps the copy', async (t) => {
  const { directory, dbPath, before } = await olderFile(t);
  const { child, stderr } = await migrationUnderWay(t, directory, ['admin', 'migrate'], 'commits');
  const ended = once(child, 'exit');
  child.kill('SIGTERM');
  t.strictSame(await ended, [143, null]);
  t.match(
    await stderr,
    /^stopped while it was migrated: the file as it was is kept as \/.*\.before-v\d+-\S+\n$/,
  );
  t.equal(userVersionOf(dbPath), SCHEMA_VERSION);
  const [kept = '', ...more] = keptIn(directory);
  t.strictSame(dumpFile(join(directory, kept)), before);
  t.strictSame(more, []);
});

t.test('during a migration, serve ignores SIGHUP and ends at SIGTERM as it does later', async (t) => {
  const { older, directory, dbPath } = await olderFile(t);
  const words = ['serve', '--listen', '127.0.0.1:0', '--log-level', 'silent'];
  const { child, stderr } = await migrationUnderWay(t, directory, words);
  const ended = once(child, 'exit');
  // The system delivers them in this order.
  child.kill('SIGHUP');
  child.kill('SIGTERM');
  t.strictSame(await ended, [0, null]);
  t.equal(await stderr, 'stopped: nothing was changed\n');
  t.equal(userVersionOf(dbPath), OLDER);
  t.strictSame(keptIn(directory), []);
  t.match(await older(['admin', 'migrate']), { exitCode: 0 });
});

t.test('a full disk during the copy or the migration leaves the file unchanged', ifMayMount, async (t) => {
  for (const [size, mode, what] of [
    ['7m', '', 'a copy of small/davit\\.db'],
    ['14m', 'grows', 'the migration of small/davit\\.db'],
  ] as const) {
    const { directory, dbPath } = await olderFile(t);
    changeFile(
      dbPath,
      "INSERT INTO log_chunks (deployment_id, start, bytes) VALUES ('dpl_1', 100, zeroblob(4000000))",
    );
    mkdirSync(join(directory, 'small'));
    const { stdout, stderr } = await onSmallDisk(directory, 'small', size, [
      'cp davit.db small/davit.db; sha256sum <small/davit.db',
      `export NODE_OPTIONS='${NODE_OPTIONS}' TEST_MIGRATION='${mode}'`,
      '"$0" "$1" admin migrate --db small/davit.db; echo "exit $?"',
      'ls -A small; "$0" "$1" backup copy.db --db small/davit.db --json',
    ]);
    t.match(
      stderr,
      new RegExp(`^error: there is no room in .*small for ${what}: make some; nothing was changed\n$`),
    );
    t.match(stdout, /\nexit 1\ndavit\.db\ndavit\.db-lock\n\{/);
    t.match(JSON.parse(stdout.slice(stdout.indexOf('{'))), { schema_version: OLDER, projects: 1 });
  }
});

t.test(
  'an older file that is mounted by itself is not migrated: its -wal may be elsewhere',
  ifMayMount,
  async (t) => {
    const { directory, dbPath, before } = await olderFile(t);
    mkdirSync(join(directory, 'mounted'));
    const { stdout, stderr } = await onSmallDisk(directory, 'mounted', '4m', [
      'touch mounted/davit.db && mount --bind davit.db mounted/davit.db',
      `export NODE_OPTIONS='${NODE_OPTIONS}'`,
      '"$0" "$1" admin migrate --db mounted/davit.db; echo "exit $?"',
      '"$0" "$1" serve --listen 127.0.0.1:0 --db mounted/davit.db; echo "exit $?"',
      'ls mounted',
    ]);
    t.equal(stdout, 'exit 1\nexit 1\ndavit.db\n');
    t.match(stderr, /^(?:error: .*mounted\/davit\.db is mounted by itself, .*\n){2}$/);
    t.strictSame(dumpFile(dbPath), before);
    t.equal(userVersionOf(dbPath), OLDER);
  },
);

t.test('a file of a newer davit or of another program is refused and left unchanged', async (t) => {
  const { directory, davit } = place(t);
  const inDirectory = (name: string) => join(directory, name);
  await davit(['admin', 'project', 'create', '--name', 'website', '--db', 'newer.db']);
  changeFile(inDirectory('newer.db'), "PRAGMA user_version = 9; UPDATE instance SET davit_version = '1.4.0'");
  await davit(['admin', 'project', 'create', '--name', 'website', '--db', 'unheard.db']);
  changeFile(inDirectory('unheard.db'), 'PRAGMA user_version = 9; DROP TABLE instance');
  await davit(['admin', 'project', 'create', '--name', 'website', '--db', 'lying.db']);
  changeFile(
    inDirectory('lying.db'),
    `PRAGMA user_version = 9; UPDATE instance SET davit_version = '\u001b[2J'`,
  );
  changeFile(inDirectory('songs.db'), 'CREATE TABLE songs (title TEXT)');
  changeFile(inDirectory('marked.db'), 'PRAGMA application_id = 7');
  changeFile(inDirectory('counted.db'), 'PRAGMA user_version = 1');
  writeFileSync(inDirectory('text.db'), 'my notes, longer than a header of a hundred bytes\n'.repeat(10));
  writeFileSync(inDirectory('byte.db'), 'x');
  writeFileSync(inDirectory('zeros.db'), '');
  truncateSync(inDirectory('zeros.db'), 8192);
  const refusals: [name: string, message: RegExp][] = [
    ['newer.db', /newer\.db needs davit 1\.4\.0 or newer: its schema is 9, and this is davit \d+\.\d+\.\d+/],
    ['unheard.db', /unheard\.db needs a newer davit: its schema is 9/],
    ['lying.db', /lying\.db needs a newer davit: its schema is 9/],
    ...['songs', 'marked', 'counted', 'text', 'byte', 'zeros'].map((name): [string, RegExp] => [
      `${name}.db`,
      new RegExp(`${name}\\.db is not a davit file`),
    ]),
  ];
  const before = readdirSync(directory).sort();
  for (const [name, message] of refusals) {
    const bytes = readFileSync(inDirectory(name));
    const commands = [
      ['serve', '--listen', '127.0.0.1:0'],
      ['admin', 'migrate'],
      ['admin', 'key', 'list'],
    ];
    for (const answer of await Promise.all(commands.map((words) => davit([...words, '--db', name])))) {
      t.match(answer, { exitCode: 1, stdout: '', stderr: message }, name);
      t.equal(answer.stderr.split('\n').length, 2);
    }
    t.strictSame(readFileSync(inDirectory(name)), bytes, name);
  }
  t.strictSame(readdirSync(directory).sort(), before, 'no side files are left');
});

t.test('on a terminal, migrate shows its progress', needsTerminal, async (t) => {
  const there = await olderFile(t);
  const { shown, exitCode } = onTerminal(there, ['admin', 'migrate'], { env: { NODE_OPTIONS } });
  t.equal(exitCode, 0);
  const lines = shown.split(/[\r\n]+/).map((line) => line.replace('\u001b[K', ''));
  t.match(lines[0], /^copying: \d+ % of /);
  // How often that is said depends on how busy the machine is.
  const after = lines.filter((line) => !line.startsWith('copying: '));
  t.match(after, [
    'checking the copy',
    `migrating to schema ${SCHEMA_VERSION}`,
    'checking the result',
    /davit\.db is migrated from/,
    /^the file as it was is kept as/,
    '',
  ]);
});

/** A file of the schema before the present one, in a place where davit knows the step. */
async function olderFile(t: Test) {
  const there = place(t);
  makeOlder(there.dbPath, OLDER);
  const older = (words: readonly string[], env: Record<string, string> = {}) =>
    there.davit(words, { env: { NODE_OPTIONS, ...env } });
  return { ...there, present: presentSchema(t), before: dumpFile(there.dbPath), older };
}

/** `davit` with these words, once it hangs in the middle of the last migration, or when that has committed all. */
async function migrationUnderWay(
  t: Test,
  directory: string,
  words: readonly string[],
  extra: 'hangs' | 'commits' = 'hangs',
) {
  const watcher = watch(directory);
  const underWay = join(directory, 'migrating');
  const isMigrating = new Promise<void>((resolve) => {
    watcher.on('change', (_, name) => name === basename(underWay) && resolve());
  });
  const child = spawn(process.execPath, [MAIN, ...words], {
    cwd: directory,
    env: { ...COMPILE_CACHE, NODE_OPTIONS, TEST_MIGRATION: extra, TEST_MIGRATION_UNDER_WAY: underWay },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  const stderr = text(child.stderr);
  await isMigrating;
  watcher.close();
  return { child, stderr };
}

/** Returns a function that resolves to the names of all that was made in the directory until then. */
function namesMadeIn(t: Test, directory: string): () => Promise<string[]> {
  const names: string[] = [];
  const last = 'last';
  const all = Promise.withResolvers<string[]>();
  const watcher = watch(directory, (_, name) => {
    if (name === last) all.resolve(names);
    else if (name !== null) names.push(name);
  });
  t.teardown(() => watcher.close());
  return () => {
    writeFileSync(join(directory, last), '');
    return all.promise;
  };
}

function keptIn(directory: string): string[] {
  return readdirSync(directory).filter((name) => name.includes('.before-v'));
}

function userVersionOf(path: string): unknown {
  const database = new Sqlite(path, { fileMustExist: true });
  try {
    return database.pragma('user_version', { simple: true });
  } finally {
    database.close();
  }
}

/** A process that was killed holds its locks until the system has taken it down. */
async function untilGone(processId: number): Promise<void> {
  while (existsSync(`/proc/${processId}/fd/0`)) await new Promise(setImmediate);
}
