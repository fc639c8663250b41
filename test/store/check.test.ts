import { readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { timestamp } from '../../src/domain.ts';
import {
  checkDatabase,
  completenessProblems,
  type FileFacts,
  foreignKeyProblems,
  integrityProblems,
  newestMs,
  type Unusable,
  whatIsWrong,
  withDatabase,
} from '../../src/store/check.ts';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { filledFile, swapIndexes } from '../helpers/filled.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('the check of an intact file gives facts about its content', async (t) => {
  const cases: [what: string, sql: string, facts: Partial<FileFacts>][] = [
    ['as it is', '', { last_event_at: timestamp(2000) }],
    ['a key that was not used', 'UPDATE keys SET last_used_at = NULL', { last_event_at: timestamp(1031) }],
    [
      'another key',
      "INSERT INTO keys (id, name, scopes, all_projects, created_at) VALUES ('key_3', 'cd', '[]', 1, 1)",
      { keys: 2 },
    ],
    ['a deployment that is canceling', "UPDATE deployments SET status = 'canceling' WHERE id = 'dpl_2'", {}],
    [
      'deployments that other systems carry out',
      'UPDATE deployments SET reported = 1',
      { running_deployments: 0, waiting_deployments: 0 },
    ],
    ['a paused project', "UPDATE projects SET status = 'paused'", { waiting_deployments: 0 }],
    ['an archived project', "UPDATE projects SET status = 'archived'", { waiting_deployments: 0 }],
    ['a disabled webhook', "UPDATE webhooks SET status = 'disabled'", { pending_deliveries: 0 }],
    ['a deleted webhook', 'UPDATE webhooks SET deleted_at = 1', { pending_deliveries: 0 }],
    [
      'a delivery that succeeded',
      "UPDATE deliveries SET status = 'delivered', next_attempt_at = NULL, delivered_at = 1",
      { pending_deliveries: 0 },
    ],
  ];
  for (const [what, sql, facts] of cases) {
    const path = filledFile(t, sql);
    t.strictSame(
      checkDatabase(path),
      {
        kind: 'good',
        facts: {
          schema_version: SCHEMA_VERSION,
          bytes: statSync(path).size,
          created_at: timestamp(1000),
          last_event_at: timestamp(2000),
          projects: 1,
          keys: 1,
          deployments: 3,
          running_deployments: 1,
          waiting_deployments: 1,
          pending_deliveries: 1,
          ...facts,
        },
      },
      what,
    );
  }
});

t.test('newestMs is the latest time in any row', async (t) => {
  const newest = (sql = '') => withDatabase(filledFile(t, sql), newestMs);
  t.equal(newest(), 2000);
  for (const sql of [
    'UPDATE instance SET created_at = 5000',
    'UPDATE projects SET created_at = 5000',
    'UPDATE keys SET created_at = 5000',
    'UPDATE keys SET last_used_at = 5000',
    'UPDATE deployments SET created_at = 5000',
    "UPDATE deployments SET started_at = 5000 WHERE status = 'running'",
    "UPDATE deployments SET finished_at = 5000 WHERE status = 'failed'",
    'UPDATE events SET created_at = 5000',
    'UPDATE attempts SET at = 5000',
  ]) {
    t.equal(newest(sql), 5000, sql);
  }
  t.equal(newest('DELETE FROM keys; DELETE FROM deployments'), 1031, 'some tables may be empty');
});

t.test('the check leaves a file without a WAL, and no descriptor open', async (t) => {
  const path = filledFile(t);
  const openBefore = readdirSync('/proc/self/fd').length;
  t.match(checkDatabase(path), { kind: 'good' });
  t.equal(readdirSync('/proc/self/fd').length, openBefore);
  const database = new Sqlite(path);
  t.equal(database.pragma('journal_mode', { simple: true }), 'delete');
  database.close();
});

t.test('a foreign file, a newer one and a damaged one are told apart', async (t) => {
  const newer = `PRAGMA user_version = ${SCHEMA_VERSION + 1}; UPDATE instance SET davit_version = '9.8.7'`;
  const cases: [sql: string, check: Unusable][] = [
    ['PRAGMA application_id = 1', { kind: 'foreign' }],
    [newer, { kind: 'newer', schemaVersion: SCHEMA_VERSION + 1, davitVersion: '9.8.7' }],
    ['DELETE FROM instance', damaged('the row of the table instance is missing')],
    ['DROP TABLE instance; DROP TABLE replays', damaged('the table instance is missing')],
    [
      'DROP INDEX one_running_deployment_per_project',
      damaged('the index one_running_deployment_per_project is missing'),
    ],
    ['DROP TRIGGER deployment_end_is_final', damaged('the trigger deployment_end_is_final is missing')],
    ['PRAGMA user_version = 0; DROP TABLE instance', damaged('no such table: instance')],
    ['DELETE FROM events', damaged('1 of deliveries refer to events that are not there')],
  ];
  for (const [sql, check] of cases) t.strictSame(checkDatabase(filledFile(t, sql)), check, sql);
  t.match(
    checkDatabase(filledFile(t, 'PRAGMA user_version = 0; DROP TABLE replays')),
    { kind: 'good' },
    'which tables an older schema has is not checked',
  );
  const path = join(temporaryDirectory(t), 'notes.txt');
  writeFileSync(path, 'these are my notes, not a database\n'.repeat(100));
  t.strictSame(checkDatabase(path), { kind: 'foreign' });
});

t.test('an index with the right number of wrong entries is damage', async (t) => {
  const path = filledFile(t);
  swapIndexes(path, 'deployments_unfinished', 'deployments_queued');
  t.strictSame(checkDatabase(path), damaged('row 2 missing from index deployments_unfinished'));
});

t.test('all problems with pages are joined into one line', async (t) => {
  const path = filledFile(t);
  const bytes = Buffer.concat([readFileSync(path), Buffer.alloc(4096)]);
  const pageCount = bytes.length / 4096;
  // sqlite.org/fileformat.html, section 1.3
  bytes.writeUInt32BE(pageCount, 28);
  bytes.writeUInt32BE(7, 36);
  writeFileSync(path, bytes);
  t.strictSame(checkDatabase(path), damaged('Freelist: size is 0 but should be 7'));
  withDatabase(path, (database) =>
    t.strictSame(integrityProblems(database, 5), [
      `Freelist: size is 0 but should be 7; Page ${pageCount}: never used`,
    ]),
  );
});

t.test('no check reports more problems than asked for', async (t) => {
  const path = filledFile(
    t,
    'DROP INDEX replays_open; DROP INDEX events_by_age; DELETE FROM keys; DELETE FROM projects',
  );
  swapIndexes(path, 'deployments_unfinished', 'deployments_queued');
  withDatabase(path, (database) => {
    for (const problems of [integrityProblems, completenessProblems, foreignKeyProblems]) {
      for (const limit of [1, 2]) t.equal(problems(database, limit).length, limit);
    }
    t.strictSame(foreignKeyProblems(database, 100).sort(), [
      '1 of idempotency_keys refer to keys that are not there',
      '1 of key_projects refer to keys that are not there',
      '1 of key_projects refer to projects that are not there',
      '1 of key_secrets refer to keys that are not there',
      '1 of project_variables refer to projects that are not there',
      '1 of webhooks refer to keys that are not there',
      '2 of deployments refer to keys that are not there',
      '3 of deployments refer to projects that are not there',
    ]);
  });
});

t.test('an error that is not the fault of the file is thrown', async (t) => {
  const error = (code: string) => new Sqlite.SqliteError('said by SQLite', code);
  for (const code of ['SQLITE_CORRUPT', 'SQLITE_CORRUPT_INDEX', 'SQLITE_ERROR']) {
    t.strictSame(whatIsWrong(error(code), 'davit.db'), damaged('said by SQLite'), code);
  }
  t.strictSame(whatIsWrong(error('SQLITE_NOTADB'), 'davit.db'), { kind: 'foreign' });
  t.throws(() => whatIsWrong(error('SQLITE_IOERR_READ'), 'davit.db'), { code: 'SQLITE_IOERR_READ' });
  t.throws(() => whatIsWrong(error('SQLITE_READONLY'), 'davit.db'), { code: 'conflict' });
  t.throws(() => whatIsWrong(new Error('a bug'), 'davit.db'), { message: 'a bug' });
});

function damaged(problem: string): Unusable {
  return { kind: 'damaged', problem };
}
