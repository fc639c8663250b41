import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { version } from '../../src/assets.ts';
import type { ProjectId } from '../../src/domain.ts';
import { checkDatabase } from '../../src/store/check.ts';
import { isOlder, openForWriting, SCHEMA_VERSION } from '../../src/store/database.ts';
import { MIGRATIONS, type Migration, migrateFile } from '../../src/store/migrations.ts';
import { runningIn } from '../../src/store/restore.ts';
import { openStore } from '../../src/store/store.ts';
import { diskCallsOf } from '../helpers/disk-calls.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { changeFile, dumpFile } from '../helpers/files.ts';
import {
  makeFile,
  makeOlder,
  OLDER_SCHEMAS,
  presentSchema,
  STEPS,
  schemaOf,
} from '../helpers/older-schema.ts';
import { newDeployment, temporaryDirectory } from '../helpers/store.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/schemas');
const frozen = (version: number) => readFileSync(join(FIXTURES, `v${version}.sql`), 'utf8');

t.test('the frozen copy of the present schema is schema.sql', async (t) => {
  const [directory, now] = [temporaryDirectory(t), presentSchema(t)];
  makeFile(join(directory, 'frozen.db'), frozen(SCHEMA_VERSION), '');
  t.strictSame(
    schemaOf(join(directory, 'frozen.db')),
    now,
    `schema.sql differs from schema ${SCHEMA_VERSION}: if that is released, src/store/migrations.ts says how to make ` +
      `the next; if not, cp schema.sql test/fixtures/schemas/v${SCHEMA_VERSION}.sql`,
  );
});

t.test('there is a step to each schema after the first, and a frozen copy of every schema', async (t) => {
  const versions = Array.from({ length: SCHEMA_VERSION }, (_, index) => index + 1);
  t.strictSame(
    MIGRATIONS.map(({ version }) => version),
    versions.slice(1),
  );
  t.strictSame(
    readdirSync(FIXTURES)
      .filter((name) => /^v\d+\.sql$/.test(name))
      .sort(),
    versions.map((version) => `v${version}.sql`).sort(),
  );
});

for (const from of Array.from({ length: SCHEMA_VERSION }, (_, index) => index + 1)) {
  t.test(`a file of schema ${from} becomes what schema.sql makes, with all that is in it`, async (t) => {
    const path = join(temporaryDirectory(t), 'davit.db');
    const rowsPath = join(FIXTURES, `v${from}-rows.sql`);
    makeFile(path, frozen(from), existsSync(rowsPath) ? readFileSync(rowsPath, 'utf8') : '');
    const before = dumpFile(path);
    for (const [table, rows] of Object.entries(before))
      t.not(rows.length, 0, `something is in ${table}: else add it to v${from}-rows.sql`);
    // What is asked of older files, too.
    t.match(checkDatabase(path), { kind: 'good', facts: { schema_version: from, projects: 1 } });
    t.strictSame(runningIn(path), ['dpl_2']);
    migrateFile(path);
    t.strictSame(schemaOf(path), presentSchema(t));
    const after = dumpFile(path);
    for (const [table, rows] of Object.entries(before)) t.equal(after[table]?.length, rows.length, table);
    t.match(checkDatabase(path), { kind: 'good', facts: { schema_version: SCHEMA_VERSION } });
    openForWriting(path, fakeEffects()).close();
  });
}

t.test('a replay that is open in a file of schema 2 leaves out nothing that succeeded by then', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  makeFile(path, frozen(2), readFileSync(join(FIXTURES, 'v2-rows.sql'), 'utf8'));
  t.match(dumpFile(path)['attempts'], [{ delivery_id: 'dlv_1' }]);
  migrateFile(path);
  t.match(dumpFile(path)['replays'], [{ finished_at: null, last_attempt: 1 }]);
});

t.test('deployments that wait in a file of schema 3 are counted once, and so are new ones', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  makeFile(path, frozen(3), readFileSync(join(FIXTURES, 'v3-rows.sql'), 'utf8'));
  t.match(dumpFile(path)['projects'], [{ id: 'prj_1', queued_count: 1 }]);
  migrateFile(path);
  const store = openStore(path, fakeEffects());
  const created = await store.writer.write('deployments.create', newDeployment('prj_1' as ProjectId));
  t.match(created, { queue_position: 2 });
  await store.close();
  t.match(dumpFile(path)['projects'], [{ queued_count: 2 }]);
});

for (const from of OLDER_SCHEMAS.keys()) {
  t.test(`a file of schema ${from} is migrated step by step, and nothing is lost`, async (t) => {
    const path = join(temporaryDirectory(t), 'davit.db');
    makeOlder(path, from);
    t.ok(isOlder(path));
    t.throws(() => openForWriting(path, fakeEffects()), {
      code: 'conflict',
      message: /an older davit wrote .*davit\.db \(schema -?\d, .*'davit serve' migrates the file/,
    });
    const before = { ...dumpFile(path), ...sequences(path) };
    const heard: (number | null)[] = [];
    migrateFile(path, { migrations: STEPS, onStep: (version) => heard.push(version) });
    t.strictSame(heard, [...STEPS.map((step) => step.version).filter((version) => version > from), null]);
    t.notOk(isOlder(path));
    t.strictSame(schemaOf(path), presentSchema(t));
    const { instance, replays, ...after } = { ...dumpFile(path), ...sequences(path) };
    t.match(instance, [{ ...Object(before['instance']?.[0]), davit_version: version }]);
    t.ok(replays);
    const { instance: _, replays: __, ...kept } = before;
    t.strictSame(after, kept);
    t.match(checkDatabase(path), { kind: 'good', facts: { schema_version: SCHEMA_VERSION } });

    const database = openForWriting(path, fakeEffects());
    t.equal(database.pragma('foreign_keys', { simple: true }), 1);
    t.throws(() => database.exec("DELETE FROM projects WHERE id = 'prj_1'"), /FOREIGN KEY/);
    database.exec("UPDATE deployments SET status = 'canceled', finished_at = 1 WHERE id = 'dpl_3'");
    t.equal(
      database.prepare('SELECT queued_count FROM projects').pluck().get(),
      0,
      'the triggers of another table find the one that was made anew',
    );
    database.close();
  });
}

t.test('a migration outlasts a power cut: its journal is gone and the directory synced', async (t) => {
  const directory = temporaryDirectory(t);
  const path = join(directory, 'davit.db');
  makeOlder(path);
  const calls = diskCallsOf(() => {
    migrateFile(path, { migrations: STEPS });
    t.notOk(existsSync(`${path}-journal`), 'a journal would undo it');
  });
  t.strictSame(calls, [`sync ${basename(directory)}`]);
});

t.test('a step that fails, or breaks a reference, leaves the file as it was', async (t) => {
  const steps: [name: string, migrate: Migration['migrate'], message: RegExp][] = [
    ['throws', () => JSON.parse('{'), /JSON/],
    ['is no SQL', (database) => database.exec('DROP TABLE absent'), /no such table/],
    [
      'loses rows that others refer to',
      (database) => database.exec('DELETE FROM projects'),
      /the migration of schema -?\d broke it: \d of \w+ refer to projects that are not there/,
    ],
    [
      'loses the row of the file',
      (database) => database.exec('DELETE FROM instance'),
      /broke it: the row of the table instance/,
    ],
  ];
  for (const [name, migrate, message] of steps) {
    const path = join(temporaryDirectory(t), 'davit.db');
    makeOlder(path);
    const before = { dump: dumpFile(path), schema: schemaOf(path) };
    const last = STEPS.at(-1);
    const migrations = [
      ...STEPS.slice(0, -1),
      {
        version: SCHEMA_VERSION,
        migrate(database: Sqlite.Database) {
          last?.migrate(database);
          migrate(database);
        },
      },
    ];
    t.throws(() => migrateFile(path, { migrations }), { message }, name);
    t.ok(isOlder(path));
    t.strictSame({ dump: dumpFile(path), schema: schemaOf(path) }, before, name);
    migrateFile(path, { migrations: STEPS });
    t.strictSame(schemaOf(path), presentSchema(t), 'and the right steps can still be taken');
  }
});

t.test('a file that another process has open is not migrated', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  makeOlder(path);
  const other = new Sqlite(path);
  other.prepare('SELECT count(*) FROM projects').get();
  t.throws(() => migrateFile(path, { migrations: STEPS }), {
    code: 'conflict',
    message: /another process has .*davit\.db open/,
  });
  other.close();
  t.ok(isOlder(path));
});

t.test(
  'a file of this davit is left alone, and one of a schema that no step leads from is refused',
  async (t) => {
    const path = join(temporaryDirectory(t), 'davit.db');
    openForWriting(path, fakeEffects()).close();
    const before = readFileSync(path);
    migrateFile(path, { migrations: STEPS });
    t.strictSame(readFileSync(path), before);

    changeFile(path, 'PRAGMA user_version = -7');
    t.throws(() => migrateFile(path, { migrations: STEPS }), {
      code: 'conflict',
      message: / has schema -7, which this davit does not know/,
    });
    t.ok(isOlder(path));
  },
);

/** What AUTOINCREMENT has given out, by table. */
function sequences(path: string): Record<string, unknown[]> {
  const database = new Sqlite(path, { fileMustExist: true });
  try {
    return { sequences: database.prepare('SELECT name, seq FROM sqlite_sequence ORDER BY name').all() };
  } finally {
    database.close();
  }
}
