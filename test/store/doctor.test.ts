import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { type ExaminedFile, openForExamination } from '../../src/store/doctor.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { filledFile, swapIndexes } from '../helpers/filled.ts';
import { ifMayUnshare, runInNamespace } from '../helpers/namespaces.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a file that cannot be examined is told by its kind, and not kept open', async (t) => {
  const notes = join(temporaryDirectory(t), 'notes.txt');
  writeFileSync(notes, 'these are my notes, not a database\n'.repeat(100));
  const cases: [path: string, found: object][] = [
    [notes, { kind: 'foreign' }],
    [filledFile(t, 'PRAGMA application_id = 1'), { kind: 'foreign' }],
    [
      filledFile(
        t,
        `PRAGMA user_version = ${SCHEMA_VERSION + 1}; UPDATE instance SET davit_version = '9.8.7'`,
      ),
      { kind: 'newer', schemaVersion: SCHEMA_VERSION + 1, davitVersion: '9.8.7' },
    ],
    [filledFile(t, 'PRAGMA user_version = 0'), { kind: 'older', schemaVersion: 0, damage: undefined }],
    [
      filledFile(t, 'PRAGMA user_version = 0; DELETE FROM events'),
      {
        kind: 'older',
        schemaVersion: 0,
        damage: { kind: 'damaged', problem: '1 of deliveries refer to events that are not there' },
      },
    ],
    [filledFile(t, 'DROP TABLE deployments'), { kind: 'damaged', problem: /^no such table: / }],
  ];
  for (const [path, found] of cases) {
    const openBefore = readdirSync('/proc/self/fd').length;
    t.match(openForExamination(path), found);
    t.equal(readdirSync('/proc/self/fd').length, openBefore);
  }
});

t.test(
  'a file that another machine serves is not opened, as closing it would empty its WAL',
  ifMayUnshare,
  async (t) => {
    const path = filledFile(t);
    lockForServing(path, 4711, fakeEffects())();
    const other = new Sqlite(`${path}-lock`);
    t.teardown(() => other.close());
    other.exec("UPDATE holder SET boot_id = 'b7e3bd5c-0000-4000-8000-000000000000'; BEGIN IMMEDIATE");
    writeFileSync(`${path}-wal`, 'what it has written');
    const source = import.meta.resolve('../../src/store/doctor.ts');
    const program = `import(${JSON.stringify(source)}).then(({ openForExamination }) => openForExamination(${JSON.stringify(path)}).close())`;
    // There, as on another machine, the process that holds the lock cannot be seen.
    const { stderr } = runInNamespace(process.execPath, '--eval', program);
    t.match(stderr, /davit\.db is served by process 4711 since \S+ on another machine: run davit there/);
    t.equal(readFileSync(`${path}-wal`, 'utf8'), 'what it has written');
  },
);

t.test('a stored count of waiting deployments is reported if it is too large or too small', async (t) => {
  const miscounted = (sql: string) => examine(t, sql).miscountedProjects();
  t.strictSame(miscounted(''), []);
  t.strictSame(
    miscounted(`
      INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at)
      VALUES ('dpl_4', 'prj_1', 'v4', 'queued', 1, 'api', 1)`),
    [],
    'deployments that other systems carry out do not count',
  );
  for (const [counted, waiting, sql] of [
    [0, 1, ''],
    [2, 1, ''],
    [1, 0, 'DELETE FROM deployments;'],
  ] as const) {
    t.strictSame(miscounted(`${sql} UPDATE projects SET queued_count = ${counted}`), [
      { id: 'prj_1', counted, waiting },
    ]);
  }
});

t.test('every table is listed with its rows and its size, indexes included, the largest first', async (t) => {
  const path = filledFile(
    t,
    "INSERT INTO log_chunks (deployment_id, start, bytes) VALUES ('dpl_1', 9, zeroblob(100000))",
  );
  const sizes = examinedFile(t, path).examination.tableSizes();
  const database = new Sqlite(path, { readonly: true });
  const ask = (sql: string) => database.prepare<[], unknown>(sql).pluck().all();
  t.strictSame(
    sizes.map(({ name }) => name).sort(),
    ask("SELECT name FROM sqlite_schema WHERE type = 'table' AND name <> 'sqlite_sequence' ORDER BY name"),
  );
  t.match(sizes[0], { name: 'log_chunks', rows: 3 });
  const bytes = sizes.map(({ bytes }) => bytes);
  t.strictSame(
    bytes,
    bytes.toSorted((one, other) => other - one),
  );
  // The table and each of its indexes fit into one page.
  const [pages] = ask("SELECT count(*) FROM sqlite_schema WHERE tbl_name = 'deployments' AND rootpage > 0");
  t.strictSame(
    sizes.find(({ name }) => name === 'deployments'),
    { name: 'deployments', rows: 3, bytes: Number(pages) * 4096 },
  );
  database.close();
});

t.test('unusedBytes is the size of the free pages in the file', async (t) => {
  const path = filledFile(t, 'CREATE TABLE big AS SELECT zeroblob(100000) AS bytes; DROP TABLE big');
  const database = new Sqlite(path, { readonly: true });
  const freePages = Number(database.pragma('freelist_count', { simple: true }));
  database.close();
  t.ok(freePages > 20);
  t.equal(examinedFile(t, path).examination.unusedBytes(), freePages * 4096);
});

t.test('at most five problems of each kind are reported', async (t) => {
  const path = filledFile(
    t,
    `DELETE FROM keys; DELETE FROM projects;
     DROP INDEX deployments_open_reports; DROP INDEX deployments_succeeded; DROP INDEX events_by_age;
     DROP INDEX deliveries_of_event; DROP INDEX replays_open; DROP TRIGGER deployment_end_is_final`,
  );
  swapIndexes(path, 'deployments_unfinished', 'deployments_queued');
  const { examination } = examinedFile(t, path);
  t.equal(examination.foreignKeyProblems().length, 5);
  const problems = examination.integrityProblems();
  t.equal(problems.filter((problem) => problem.endsWith(' is missing')).length, 5);
  t.match(problems[0], 'row 2 missing from index deployments_unfinished');
});

t.test('a file with an unreadable page gives no table sizes', async (t) => {
  const path = filledFile(t);
  const database = new Sqlite(path);
  const page = Number(
    database.prepare("SELECT rootpage FROM sqlite_schema WHERE name = 'webhook_secrets'").pluck().get(),
  );
  database.close();
  const bytes = readFileSync(path);
  writeFileSync(path, bytes.fill(0, (page - 1) * 4096, page * 4096));
  const examined = examinedFile(t, path);
  t.strictSame(examined.examination.tableSizes(), []);
  examined.close();
  t.throws(() => examined.examination.tableSizes(), /not open/, 'no fault of the file');
});

t.test('a write transaction that is kept for 2 s is reported with its process', async (t) => {
  const path = filledFile(t);
  const { examination } = examinedFile(t, path);
  const effects = fakeEffects();
  const other = new Sqlite(path);
  t.teardown(() => other.close());
  t.equal(examination.keptTransaction(effects), undefined);
  other.exec('BEGIN IMMEDIATE');
  t.strictSame(examination.keptTransaction(effects), { processId: process.pid });
  t.equal(effects.monotonicMs(), 2_000);
  other.exec('COMMIT');
  t.equal(examination.keptTransaction(effects), undefined);
  t.equal(effects.monotonicMs(), 2_000, 'no wait where there is no transaction');

  const locked = filledFile(t, 'PRAGMA journal_mode = DELETE');
  const withoutWal = new Sqlite(locked);
  t.teardown(() => withoutWal.close());
  const examined = examinedFile(t, locked);
  withoutWal.exec('BEGIN IMMEDIATE');
  t.strictSame(examined.examination.keptTransaction(effects), { processId: null });
});

t.test('transactions that end are none that is kept, however little time is between them', async (t) => {
  const path = filledFile(t);
  const { examination } = examinedFile(t, path);
  const effects = fakeEffects();
  const busy = new Sqlite(path);
  t.teardown(() => busy.close());
  const begin = () => busy.exec('BEGIN IMMEDIATE; UPDATE instance SET probes = probes + 1');
  begin();
  let commits = 0;
  const block = (durationMs: number) => {
    effects.block(durationMs);
    if (effects.monotonicMs() % 100 !== 0) return;
    busy.exec('COMMIT');
    begin();
    commits += 1;
  };
  t.equal(examination.keptTransaction({ ...effects, block }), undefined);
  t.equal(commits, 1, 'the first commit tells');
  t.ok(busy.inTransaction, 'the other process was not disturbed');
});

function examine(t: Test, sql = '') {
  return examinedFile(t, filledFile(t, sql)).examination;
}

function examinedFile(t: Test, path: string): ExaminedFile {
  const examined = openForExamination(path);
  if ('kind' in examined) throw new Error(examined.kind);
  t.teardown(examined.close);
  return examined;
}
