import { execFileSync } from 'node:child_process';
import fs, {
  chmodSync,
  chownSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import {
  ATTEMPT_TRIGGERS,
  DELIVERY_STATUSES,
  DEPLOYMENT_STATUSES,
  EVENT_TYPES,
  PROJECT_STATUSES,
  QUEUE_POLICIES,
  REASONS,
  TRIGGERS,
  WEBHOOK_STATUSES,
} from '../../src/domain.ts';
import { APPLICATION_ID, openForReading, openForWriting, SCHEMA_VERSION } from '../../src/store/database.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { changeFile } from '../helpers/files.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('the file is made on first use, private and durable', (t) => {
  const openFiles = readdirSync('/proc/self/fd').length;
  const path = `${temporaryDirectory(t)}/davit.db`;
  const database = openForWriting(path, fakeEffects());
  t.equal(statSync(path).mode & 0o777, 0o600);
  t.equal(database.pragma('journal_mode', { simple: true }), 'wal');
  t.equal(database.pragma('synchronous', { simple: true }), 2, 'FULL');
  t.equal(database.pragma('foreign_keys', { simple: true }), 1);
  t.equal(database.pragma('auto_vacuum', { simple: true }), 2, 'INCREMENTAL');
  t.equal(database.pragma('application_id', { simple: true }), APPLICATION_ID);
  t.equal(database.pragma('user_version', { simple: true }), SCHEMA_VERSION);
  t.strictSame(database.pragma('integrity_check'), [{ integrity_check: 'ok' }]);
  database.close();
  t.equal(readdirSync('/proc/self/fd').length, openFiles);

  t.intercept(process, 'getuid', { value: () => 1_000 });
  const others = join(temporaryDirectory(t), 'davit.db');
  openForWriting(others, fakeEffects()).close();
  t.equal(statSync(others).mode & 0o777, 0o600, 'whoever makes it');
  t.end();
});

t.test('a file that is moved while it is opened is not made anew, which would delete its -wal', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const service = openForWriting(path, fakeEffects());
  t.teardown(() => service.close());
  service.exec('UPDATE instance SET probes = 1');
  const walBytes = statSync(`${path}-wal`).size;
  const { accessSync } = fs;
  const replaceAccess = (replacement: typeof accessSync) => {
    Object.assign(fs, { accessSync: replacement });
    syncBuiltinESMExports();
  };
  t.teardown(() => replaceAccess(accessSync));
  replaceAccess((...words) => {
    replaceAccess(accessSync);
    accessSync(...words);
    renameSync(path, `${path}.moved`);
  });
  t.throws(() => openForWriting(path, fakeEffects()), { code: 'conflict', message: /^cannot open / });
  t.notOk(existsSync(path));
  t.equal(statSync(`${path}-wal`, { throwIfNoEntry: false })?.size, walBytes);
});

const MODULE = join(import.meta.dirname, '../../src/store/database.ts');
const NOBODY = 65_534;

t.test(
  'a read-only file is refused, and nothing is created beside it',
  ifMayBeNobody(MODULE, process.execPath),
  async (t) => {
    const directory = temporaryDirectory(t);
    const path = join(directory, 'davit.db');
    openForWriting(path, fakeEffects()).close();
    for (const [name, mode] of Object.entries({ '': 0o777, 'davit.db': 0o644 })) {
      chmodSync(join(directory, name), mode);
    }
    t.equal(
      openedByNobody(path),
      `cannot write to ${path}: check that this user may write to it and its directory\n`,
    );
    t.strictSame(readdirSync(directory), ['davit.db']);
  },
);

t.test(
  'once a file is writable again, what a reader created beside it meanwhile does no harm',
  ifMayBeNobody(MODULE, process.execPath),
  async (t) => {
    const directory = temporaryDirectory(t);
    const path = join(directory, 'davit.db');
    openForWriting(path, fakeEffects()).close();
    for (const [side, mode] of Object.entries({ '': 0o600, '-wal': 0o400, '-shm': 0o400 })) {
      writeFileSync(path + side, '', { flag: 'a' });
      chmodSync(path + side, mode);
      chownSync(path + side, NOBODY, NOBODY);
    }
    chownSync(directory, NOBODY, NOBODY);
    t.equal(openedByNobody(path), '');
    t.strictSame(readdirSync(directory), ['davit.db']);
  },
);

t.test('a file that root makes belongs to the owner of its directory', ifMayBeNobody(), (t) => {
  const directory = temporaryDirectory(t);
  const [own, others] = [join(directory, 'own'), join(directory, 'others')];
  for (const path of [own, others]) mkdirSync(path, { mode: 0o700 });
  chownSync(others, NOBODY, NOBODY);
  const path = join(others, 'davit.db');
  const database = openForWriting(path, fakeEffects());
  database.prepare('SELECT * FROM instance').get(); // makes the -wal and -shm
  for (const side of ['', '-wal', '-shm']) {
    const { uid, gid, mode } = statSync(path + side);
    t.strictSame([uid, gid, mode & 0o777], [NOBODY, NOBODY, 0o600], side);
  }
  database.close();
  symlinkSync(join(own, 'davit.db'), join(others, 'link.db'));
  openForWriting(join(others, 'link.db'), fakeEffects()).close();
  t.equal(statSync(join(own, 'davit.db')).uid, 0, 'not to that of a link to it');
  writeFileSync(join(others, 'empty.db'), '', { mode: 0o600 });
  openForWriting(join(others, 'empty.db'), fakeEffects()).close();
  t.equal(statSync(join(others, 'empty.db')).uid, 0, 'one that was there is left as it is');
  t.end();
});

/** Not tap's: its children write to its folder, which these may not. */
const PLAIN = { PATH: '/usr/bin:/bin' };
const mayDropCapabilities = { ...ifHas('setpriv'), ...ifMayBeNobody() };

t.test('a file that root may not give away, or not use then, is its own', mayDropCapabilities, (t) => {
  for (const capability of ['chown', 'dac_override']) {
    const directory = temporaryDirectory(t);
    chmodSync(directory, 0o777);
    chownSync(directory, NOBODY, NOBODY);
    const path = join(directory, 'davit.db');
    const words = [`--bounding-set=-${capability}`, process.execPath, ...wordsToOpen(path)];
    t.equal(execFileSync('setpriv', words, { env: PLAIN, encoding: 'utf8' }), '', capability);
    t.equal(statSync(path).uid, 0, capability);
  }
  t.end();
});

/** The error of the file when the user `nobody` opens and closes it; empty if there is none. */
function openedByNobody(path: string): string {
  return execFileSync(process.execPath, wordsToOpen(path), { uid: NOBODY, env: PLAIN, encoding: 'utf8' });
}

/** With these Node opens a file as davit does at its start, closes it, and prints the error of it. */
function wordsToOpen(path: string): string[] {
  const script = `
    const { isOlder, openForWriting } = await import(process.argv[1]);
    const { realEffects } = await import(new URL('../effects.ts', process.argv[1]));
    try {
      if (isOlder(process.argv[2])) throw new Error('it is older');
      openForWriting(process.argv[2], realEffects).close();
    } catch ({ message }) {
      console.log(message);
    }`;
  return ['--no-warnings', '--input-type=module', '--eval', script, pathToFileURL(MODULE).href, path];
}

t.test('no INSERT makes SQLite build a temporary table to check constraints', (t) => {
  const database = openForWriting(`${temporaryDirectory(t)}/davit.db`, fakeEffects());
  const tables = database
    .prepare<[], string>(`SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'`)
    .pluck()
    .all();
  t.ok(tables.includes('deployments'));
  for (const table of tables) {
    const steps = database
      .prepare<[], { opcode: string }>(`EXPLAIN INSERT INTO ${table} DEFAULT VALUES`)
      .all()
      .map(({ opcode }) => opcode);
    t.ok(steps.includes('MakeRecord'), table);
    t.notOk(steps.includes('OpenEphemeral'), table);
  }
  database.close();
  t.end();
});

t.test('each column allows exactly the words that domain.ts lists for it', (t) => {
  const database = openForWriting(`${temporaryDirectory(t)}/davit.db`, fakeEffects());
  const stored = DELIVERY_STATUSES.filter((status) => status !== 'held');
  const sent = ATTEMPT_TRIGGERS.filter((trigger) => trigger !== 'ping');
  const words: Record<string, Record<string, readonly string[]>> = {
    projects: { status: PROJECT_STATUSES, policy: QUEUE_POLICIES },
    deployments: { status: DEPLOYMENT_STATUSES, reason: REASONS, trigger: TRIGGERS },
    events: { type: EVENT_TYPES },
    webhooks: { status: WEBHOOK_STATUSES },
    deliveries: { status: stored, ladder_trigger: sent },
    attempts: { trigger: sent },
    replays: { delivery_status: stored },
  };
  const tableOf = database.prepare<[string], string>('SELECT sql FROM sqlite_schema WHERE name = ?').pluck();
  for (const [table, columns] of Object.entries(words)) {
    for (const [column, known] of Object.entries(columns)) {
      const [definition = ''] =
        new RegExp(`^ +${column} +TEXT[^]*?,(?: --.*)?\n`, 'm').exec(tableOf.get(table) ?? '') ?? [];
      const allowed = [...definition.matchAll(/'([^']+)'/g)].map(([, word]) => word);
      t.strictSame(allowed.toSorted(), known.toSorted(), `${table}.${column}`);
    }
  }
  database.close();
  t.end();
});

t.test('SQLite is new enough that two connections under WAL cannot corrupt the file', (t) => {
  const version = new Sqlite(':memory:').prepare<[], string>('SELECT sqlite_version()').pluck().get() ?? '';
  const [major = 0, minor = 0, patch = 0] = version.split('.').map(Number);
  t.ok(major * 1_000_000 + minor * 1000 + patch >= 3_051_003, version);
  t.end();
});

t.test('a file that is not davit’s is refused and left as it was', (t) => {
  const path = `${temporaryDirectory(t)}/other.db`;
  changeFile(path, 'CREATE TABLE things (name TEXT)');
  const before = readFileSync(path);
  t.throws(() => openForWriting(path, fakeEffects()), { code: 'conflict', message: /not a davit file/ });
  t.strictSame(readFileSync(path), before);

  const text = `${temporaryDirectory(t)}/notes.txt`;
  writeFileSync(text, 'nothing that SQLite knows, and longer than a header of a hundred bytes'.repeat(4));
  t.throws(() => openForWriting(text, fakeEffects()), { code: 'conflict', message: /not a davit file/ });
  t.end();
});

t.test('a file of a newer davit is refused and left as it was', (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  openForWriting(path, fakeEffects()).close();
  for (const said of ['davit_version', "'a strange one'"]) {
    const database = new Sqlite(path);
    database.exec(`UPDATE instance SET davit_version = ${said}; PRAGMA user_version = ${SCHEMA_VERSION + 1}`);
    database.close();
    const before = readFileSync(path);
    t.throws(() => openForWriting(path, fakeEffects()), {
      code: 'conflict',
      message: /needs a newer davit: its schema is/,
    });
    t.strictSame(readFileSync(path), before);
  }
  t.end();
});

t.test('an error about a file that cannot be created names its path and --db', (t) => {
  const long = `${temporaryDirectory(t)}/${'x'.repeat(300)}`;
  t.throws(() => openForWriting(long, fakeEffects()), {
    code: 'conflict',
    message: `cannot create ${long} (ENAMETOOLONG): choose another place with --db`,
  });
  t.throws(() => openForWriting(`${temporaryDirectory(t)}/no/such/davit.db`, fakeEffects()), {
    code: 'conflict',
    message:
      /^cannot create .*no\/such\/davit\.db \(its directory is not there\): choose another place with --db$/,
  });
  t.end();
});

t.test(
  'a user who may not create the file is told which directory is to be open to them',
  ifMayBeNobody(MODULE, process.execPath),
  async (t) => {
    const directory = temporaryDirectory(t);
    const path = join(directory, 'davit.db');
    chmodSync(directory, 0o755);
    const advice = `let this user write to ${directory}, or choose another place with --db`;
    t.equal(openedByNobody(path), `cannot create ${path} (EACCES): ${advice}\n`);

    const link = join(temporaryDirectory(t), 'link.db');
    chmodSync(dirname(link), 0o755);
    symlinkSync(path, link);
    t.equal(openedByNobody(link), `cannot create ${link} (EACCES): ${advice}\n`, 'not where a link to it is');
  },
);

t.test('no file is made beside a WAL that was left over: SQLite would remove that', (t) => {
  const directory = temporaryDirectory(t);
  const [path, link] = [join(directory, 'davit.db'), join(directory, 'link.db')];
  symlinkSync(path, link);
  writeFileSync(`${path}-wal`, 'what was acknowledged');
  for (const name of [path, link]) {
    t.throws(() => openForWriting(name, fakeEffects()), {
      code: 'conflict',
      message: `${name} is not there, but ${path}-wal is, which holds a part of it: move ${name} back, or, to begin anew without it, move the -wal away too`,
    });
  }
  t.strictSame(readdirSync(directory), ['davit.db-wal', 'link.db']);
  t.equal(readFileSync(`${path}-wal`, 'utf8'), 'what was acknowledged');

  writeFileSync(`${path}-wal`, ''); // which holds nothing
  openForWriting(link, fakeEffects()).close();
  t.ok(existsSync(path));
  t.end();
});

t.test('a connection for reading cannot write', (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const writing = openForWriting(path, fakeEffects());
  const reading = openForReading(path);
  t.throws(() => reading.exec('DELETE FROM instance'), /readonly/);
  reading.close();
  writing.close();
  t.end();
});
