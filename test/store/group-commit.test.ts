import {
  copyFileSync,
  readdirSync,
  readFileSync,
  renameSync,
  statSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import type { Attempt } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { AppError } from '../../src/errors.ts';
import { openForReading, openForWriting } from '../../src/store/database.ts';
import { createGroupCommit, createWriter, type WriteResult } from '../../src/store/group-commit.ts';
import { walBytesOf } from '../../src/store/wal.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { limitFileSize, useUpFiles } from '../helpers/limits.ts';
import { ifHas } from '../helpers/programs.ts';
import {
  KEY,
  newDeployment,
  openWithThread,
  PROJECT,
  preparedBy,
  temporaryDirectory,
  testStore,
} from '../helpers/store.ts';

t.test('an operation that is rejected leaves the others of its group untouched', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const archived = await store.project();
  await store.writer.write('projects.setStatus', { id: archived, status: 'archived' });

  const results = await Promise.allSettled([
    store.writer.write('deployments.create', newDeployment(projectId)),
    store.writer.write('deployments.create', newDeployment(archived)),
    store.writer.write('deployments.create', newDeployment(projectId)),
  ]);

  t.strictSame(
    results.map(({ status }) => status),
    ['fulfilled', 'rejected', 'fulfilled'],
  );
  t.match(results[1], { reason: { code: 'conflict' } });
  t.strictSame(store.query('SELECT project_id FROM deployments'), [
    { project_id: projectId },
    { project_id: projectId },
  ]);
  t.strictSame(store.query('SELECT count(*) AS events FROM events'), [{ events: 2 }]);
});

t.test('listeners are notified of what was committed, and of nothing else', async (t) => {
  const store = testStore(t);
  const archived = await store.project();
  await store.writer.write('projects.setStatus', { id: archived, status: 'archived' });
  const heard: unknown[] = [];
  store.writer.onCommit((changes) => heard.push([...changes]));

  await t.rejects(store.writer.write('deployments.create', newDeployment(archived)), { code: 'conflict' });
  t.strictSame(heard, []);

  const projectId = await store.project();
  await store.writer.write('deployments.create', newDeployment(projectId));
  t.strictSame(heard, [['queue']]);
});

t.test('a bug in one operation rolls back its own work and is told to its caller only', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const before = store.dump();

  const bad = newDeployment(projectId, { ref: '' as never });
  await t.rejects(store.writer.write('deployments.create', bad), /CHECK constraint failed/);
  t.strictSame(store.dump(), before);

  t.match(await store.writer.write('deployments.create', newDeployment(projectId)), { status: 'queued' });
});

t.test('an operation that fails half-way is undone, and the others of its group are done', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const heard: unknown[] = [];
  store.writer.onCommit((changes) => heard.push([...changes]));
  const results = await Promise.allSettled([
    store.writer.write('deployments.create', newDeployment(projectId)),
    // The project is written before its variables.
    store.writer.write('projects.create', { ...PROJECT, name: 'bad', variables: { A: null as never } }),
    store.writer.write('deployments.create', newDeployment(projectId)),
  ]);

  const [first, second, third] = results;
  t.match(second, { status: 'rejected', reason: /NOT NULL constraint failed/ });
  t.strictSame(
    store.query('SELECT id FROM deployments ORDER BY seq').map(({ id }) => id),
    [first, third].map((result) =>
      result?.status === 'fulfilled' ? (result.value as { id: string }).id : '',
    ),
  );
  t.strictSame(store.query('SELECT count(*) AS events FROM events'), [{ events: 2 }]);
  t.strictSame(store.query("SELECT count(*) AS projects FROM projects WHERE name = 'bad'"), [
    { projects: 0 },
  ]);
  t.strictSame(heard, [['queue']]);
});

t.test('on a full disk writes are rejected and change nothing; later they succeed again', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const before = store.dump();
  store.limitPages(true);

  const results = await Promise.allSettled(
    Array.from({ length: 100 }, () =>
      store.writer.write('projects.create', { ...PROJECT, variables: { FILLER: 'x'.repeat(100_000) } }),
    ),
  );
  for (const result of results) {
    t.match(result, { status: 'rejected', reason: { code: 'unavailable', retryAfterSeconds: 5 } });
  }
  t.strictSame(store.dump(), before);

  store.limitPages(false);
  t.match(await store.writer.write('deployments.create', newDeployment(projectId)), { status: 'queued' });
});

t.test(
  'a WAL that cannot grow starts over, as long as the file takes its pages',
  ifHas('prlimit'),
  async (t) => {
    const store = testStore(t);
    const projectId = await store.project();
    const create = () => store.writer.write('deployments.create', newDeployment(projectId));
    while (walBytesOf(store.path) < 2 * statSync(store.path).size) await create();
    const walBytes = walBytesOf(store.path);

    limitFiles(t, walBytes);
    await t.rejects(create(), { code: 'unavailable' });
    t.match(await create(), { status: 'queued' });
    t.equal(walBytesOf(store.path), walBytes);
  },
);

t.test('on a full disk a short WAL is copied, too, so that it starts over', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const other = new Sqlite(store.path);
  t.teardown(() => other.close());
  const wal = () => (other.pragma('wal_checkpoint(NOOP)') as { log: number; checkpointed: number }[])[0];
  const probe = () => store.writer.write('instance.probe', undefined);
  const refuse = () =>
    t.rejects(
      store.writer.write('projects.create', { ...PROJECT, variables: { FILLER: 'x'.repeat(100_000) } }),
      { message: /the disk is full/ },
    );
  await store.project();
  store.limitPages(true);
  t.match(wal(), { checkpointed: 0 });
  await refuse();
  t.equal(wal()?.checkpointed, wal()?.log);
  await probe();
  t.match(wal(), { log: 1, checkpointed: 0 });
  await refuse();
  t.match(wal(), { log: 1, checkpointed: 1 });

  await probe();
  other.exec('BEGIN; SELECT * FROM instance');
  await probe();
  await refuse();
  other.exec('COMMIT');
  t.match(wal(), { log: 2, checkpointed: 1 });
  await refuse();
  t.match(wal(), { log: 2, checkpointed: 2 }, 'what a reader held up is copied as soon as it may be');
});

t.test(
  'after a checkpoint that failed on a full disk, the next comes a second later',
  ifHas('prlimit'),
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const large = { ...PROJECT, variables: { FILLER: 'x'.repeat(100_000) } };
    await store.writer.write('projects.create', large);
    const refuse = () =>
      t.rejects(store.writer.write('projects.create', { ...large, name: 'other' }), {
        message: /the disk is full/,
      });
    const copiedFrames = () => {
      const other = new Sqlite(store.path);
      const [wal] = other.pragma('wal_checkpoint(NOOP)') as { checkpointed: number }[];
      other.close();
      return wal?.checkpointed;
    };
    store.limitPages(true);
    const lift = limitFiles(t, statSync(store.path).size);
    await refuse();
    lift();
    const failedAt = copiedFrames();
    effects.advance(999);
    await refuse();
    t.equal(copiedFrames(), failedAt);
    effects.advance(1);
    await refuse();
    t.not(copiedFrames(), failedAt);
  },
);

t.test('a write that was rejected as its fsync failed does not come back after a kill', async (t) => {
  const store = testStore(t);
  const refused = newDeployment(await store.project());
  const copy = copyAfterKill(t, store.path);
  const other = createWriter(openForWriting(copy, realEffects), realEffects);
  await other.write('deployments.create', refused);
  const walWithIt = readFileSync(`${copy}-wal`);
  await other.close();

  const database = openForWriting(store.path, realEffects);
  const commit = database.prepare('COMMIT');
  let fails = true;
  const run = () => {
    if (!fails) return commit.run();
    fails = false;
    // All of it is written before the fsync.
    writeFileSync(`${store.path}-wal`, walWithIt, { flag: 'r+' });
    throw new Sqlite.SqliteError('disk I/O error', 'SQLITE_IOERR_FSYNC');
  };
  const failing = preparedBy(database, (sql) => (sql === 'COMMIT' ? { run } : database.prepare(sql)));
  const writer = createWriter(failing, realEffects);
  t.teardown(writer.close);
  await t.rejects(writer.write('deployments.create', refused), { code: 'unavailable' });

  const found = openForReading(copyAfterKill(t, store.path));
  t.teardown(() => found.close());
  t.equal(found.prepare('SELECT count(*) FROM deployments').pluck().get(), 0);
});

for (const suffix of ['', '-wal', '-shm']) {
  t.test(`nothing is written while davit.db${suffix} is not where it was`, async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const projectId = await store.project();
    const before = store.dump();
    effects.advance(10); // the last look holds for so long
    const file = `${store.path}${suffix}`;
    renameSync(file, `${file}.elsewhere`);
    const refusal = { code: 'unavailable', message: /was moved, removed or replaced/, retryAfterSeconds: 5 };
    await t.rejects(store.writer.write('deployments.create', newDeployment(projectId)), refusal);

    copyFileSync(`${file}.elsewhere`, file);
    await t.rejects(store.writer.write('deployments.create', newDeployment(projectId)), refusal);
    t.strictSame(store.dump(), before);

    renameSync(`${file}.elsewhere`, file);
    t.match(await store.writer.write('deployments.create', newDeployment(projectId)), { status: 'queued' });
  });
}

t.test('a WAL that was cut short takes no writes, and a clean stop leaves what the file has', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const earlier = createWriter(openForWriting(path, realEffects), realEffects);
  await earlier.write('projects.create', { ...PROJECT, name: 'kept' });
  await earlier.close();
  const writer = createWriter(openForWriting(path, realEffects), realEffects);
  await writer.write('projects.create', { ...PROJECT, name: 'lost' });

  truncateSync(`${path}-wal`, 0);
  const refusal = { code: 'unavailable', message: /-wal was cut short/, retryAfterSeconds: 5 };
  for (let times = 0; times < 2; times++) {
    await t.rejects(writer.write('projects.create', { ...PROJECT, name: 'refused' }), refusal);
  }
  t.equal(walBytesOf(path), 0, 'a write behind what was cut off would leave a gap for a checkpoint to copy');
  await writer.close();

  const found = openForReading(path);
  t.teardown(() => found.close());
  t.strictSame(found.prepare('SELECT name FROM projects').pluck().all(), ['kept']);
});

t.test('a WAL that is cut short while a write is under way does not take its commit', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  let cuts = false;
  const now = () => {
    if (cuts) truncateSync(`${path}-wal`, 0);
    return realEffects.now();
  };
  const effects = { ...realEffects, now };
  const writer = createWriter(openForWriting(path, effects), effects);
  t.teardown(() => writer.close());
  await writer.write('projects.create', PROJECT);
  cuts = true;
  await t.rejects(writer.write('projects.create', PROJECT), { message: /-wal was cut short/ });
  t.equal(walBytesOf(path), 0);
});

t.test('a commit that failed is not overwritten in a WAL that was cut short', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const database = openForWriting(path, realEffects);
  const commit = database.prepare('COMMIT');
  let commits = 0;
  const run = () => {
    commits += 1;
    if (commits !== 2) return commit.run();
    truncateSync(`${path}-wal`, 0);
    throw new Sqlite.SqliteError('disk I/O error', 'SQLITE_IOERR_WRITE');
  };
  const failing = preparedBy(database, (sql) => (sql === 'COMMIT' ? { run } : database.prepare(sql)));
  const writer = createWriter(failing, realEffects);
  t.teardown(() => writer.close());
  await writer.write('projects.create', PROJECT);
  await t.rejects(writer.write('projects.create', PROJECT), { code: 'unavailable' });
  t.equal(walBytesOf(path), 0);
});

t.test('a WAL that was cut short takes no writes until nothing has the file open', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const other = openForWriting(path, realEffects);
  other.prepare('SELECT * FROM projects').all();
  for (let restarts = 0; restarts < 2; restarts++) {
    const writer = createWriter(openForWriting(path, realEffects), realEffects);
    if (restarts === 0) await writer.write('projects.create', PROJECT);
    truncateSync(`${path}-wal`, 0);
    const message = /until davit and whatever else has the file open was ended/;
    await t.rejects(writer.write('projects.create', PROJECT), { code: 'unavailable', message });
    await writer.close();
  }
  other.close();
  const writer = createWriter(openForWriting(path, realEffects), realEffects);
  t.match(await writer.write('projects.create', PROJECT), { status: 'active' });
  await writer.close();
});

t.test('a WAL that another process has copied and emptied is not one that was cut short', async (t) => {
  const store = testStore(t, realEffects);
  await store.project({ name: 'one' });
  const other = openForWriting(store.path, realEffects);
  t.teardown(() => other.close());
  other.pragma('wal_checkpoint(TRUNCATE)');
  t.equal(walBytesOf(store.path), 0);
  await store.project({ name: 'two' });
  t.strictSame(store.query('SELECT name FROM projects'), [{ name: 'one' }, { name: 'two' }]);
});

t.test(
  'a WAL that another process empties while a write waits for it is not one that was cut short',
  async (t) => {
    const path = join(temporaryDirectory(t), 'davit.db');
    const other = openForWriting(path, realEffects);
    t.teardown(() => other.close());
    const block = () => {
      if (!other.inTransaction) return;
      other.exec('COMMIT');
      other.pragma('wal_checkpoint(TRUNCATE)');
    };
    const effects = { ...realEffects, block };
    const writer = createWriter(openForWriting(path, effects), effects);
    t.teardown(() => writer.close());
    await writer.write('projects.create', PROJECT);
    other.exec('BEGIN IMMEDIATE; UPDATE instance SET probes = probes + 1');
    t.match(await writer.write('projects.create', PROJECT), { status: 'active' });
    t.notOk(other.inTransaction);
  },
);

for (const [moment, sql] of [
  ['between the two looks at it', 'PRAGMA wal_checkpoint(NOOP)'],
  ['while a group begins again', 'ROLLBACK'],
] as const) {
  t.test(`a WAL that another process empties ${moment} is not one that was cut short`, async (t) => {
    const path = join(temporaryDirectory(t), 'davit.db');
    const other = openForWriting(path, realEffects);
    t.teardown(() => other.close());
    other.exec('UPDATE instance SET probes = probes + 1');
    const database = openForWriting(path, realEffects);
    const statement = database.prepare<[], unknown>(sql);
    let emptied = 0;
    const thenEmpty = (result: unknown) => {
      if (walBytesOf(path) > 0) emptied += 1;
      other.pragma('wal_checkpoint(TRUNCATE)');
      return result;
    };
    const emptying = {
      get: () => thenEmpty(statement.get()),
      run: () => thenEmpty(statement.run()),
    };
    const writer = createWriter(
      preparedBy(database, (text) => (text === sql ? emptying : database.prepare(text))),
      realEffects,
    );
    t.teardown(() => writer.close());
    const [good, bad] = await Promise.allSettled([
      writer.write('projects.create', { ...PROJECT, name: 'good' }),
      writer.write('projects.create', { ...PROJECT, name: 'bad', variables: { A: null as never } }),
    ]);
    t.match(good, { status: 'fulfilled' });
    t.match(bad, { status: 'rejected', reason: /NOT NULL constraint failed/ });
    t.equal(emptied, 1);
  });
}

t.test('a WAL of smaller pages than those of davit is not one that was cut short', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  openForWriting(path, realEffects).close();
  const shell = new Sqlite(path);
  shell.exec('PRAGMA journal_mode = DELETE; PRAGMA page_size = 512; VACUUM');
  shell.close();
  const writer = createWriter(openForWriting(path, realEffects), realEffects);
  t.teardown(() => writer.close());
  for (const name of ['one', 'two']) {
    t.match(await writer.write('projects.create', { ...PROJECT, name }), { status: 'active' });
  }
});

t.test('nothing is written while the path of the file cannot be resolved', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const projectId = await store.project();
  const before = store.dump();
  effects.advance(10);
  renameSync(store.path, `${store.path}.elsewhere`);
  symlinkSync(store.path, store.path);
  t.throws(() => statSync(store.path), { code: 'ELOOP' });
  await t.rejects(store.writer.write('deployments.create', newDeployment(projectId)), {
    code: 'unavailable',
  });
  t.strictSame(store.dump(), before);

  renameSync(`${store.path}.elsewhere`, store.path);
  t.match(await store.writer.write('deployments.create', newDeployment(projectId)), { status: 'queued' });
});

t.test('the WAL of a file that a link leads to is looked for beside the file', async (t) => {
  const directory = temporaryDirectory(t);
  const [file, link] = [join(directory, 'file.db'), join(directory, 'link.db')];
  symlinkSync(file, link);
  const effects = fakeEffects();
  const writer = createWriter(openForWriting(link, effects), effects);
  t.teardown(writer.close);
  await writer.write('projects.create', PROJECT);
  t.equal(walBytesOf(link), statSync(`${file}-wal`).size);

  effects.advance(10);
  renameSync(`${file}-wal`, `${file}-wal.elsewhere`);
  await t.rejects(writer.write('projects.create', { ...PROJECT, name: 'other' }), { code: 'unavailable' });
  renameSync(`${file}-wal.elsewhere`, `${file}-wal`);
  await t.resolves(writer.write('projects.create', { ...PROJECT, name: 'other' }));
});

t.test('the writer in its thread answers as it does in place, refusals and bugs too', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const store = await openWithThread(t, path);
  const project = await store.writer.write('projects.create', PROJECT);
  const created = await store.writer.write('deployments.create', newDeployment(project.id));
  t.match(store.reads.deployments.get(created.id), created, 'what was answered can be read at once');

  const refusal = await store.writer
    .write('deployments.create', newDeployment('prj_none' as never))
    .catch((e) => e);
  t.ok(refusal instanceof AppError);
  t.equal(refusal.code, 'not_found');
  await t.rejects(
    store.writer.write('deployments.create', newDeployment(project.id, { ref: '' as never })),
    /CHECK constraint failed/,
  );

  const full = newDeployment(project.id, { maxQueued: 1 });
  await t.rejects(store.writer.write('deployments.create', full), {
    code: 'rate_limited',
    retryAfterSeconds: 30,
  });

  await store.close();
  t.strictSame(readdirSync(dirname(path)), ['davit.db'], 'a clean stop leaves one file');
  t.equal(statSync(path).mode & 0o777, 0o600, 'that only its owner reads');
});

t.test('writes that were handed in before the end are committed, later ones are refused', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const store = await openWithThread(t, path);
  const handedIn = store.writer.write('projects.create', PROJECT);
  await store.close();
  const project = await handedIn;

  const again = await openWithThread(t, path);
  t.match(again.reads.projects.resolve(project.id), project);
  await again.close();
});

t.test('the WAL is copied into the file even if no listener is notified of the writes', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const store = await openWithThread(t, path);
  const limitBytes = 32 * 1024 * 1024;
  const walBytes = () => statSync(`${path}-wal`).size;
  const told: unknown[] = [];
  store.writer.onCommit((changes) => told.push(...changes));
  const { key } = await store.writer.write('keys.create', KEY);
  await store.writer.write('answer', {
    operation: 'pings.keep',
    input: { response_body: 'x'.repeat(limitBytes) } as Attempt,
    keyId: key.id,
    identity: { keyId: key.id, idempotencyKey: 'large', requestHash: Buffer.alloc(32) },
    statusCode: 200,
    locationPrefix: null,
  });
  t.ok(walBytes() > limitBytes);
  const looking = new Sqlite(path, { readonly: true });
  await until(() => {
    const [wal] = looking.pragma('wal_checkpoint(NOOP)') as { log: number; checkpointed: number }[];
    return wal !== undefined && wal.log === wal.checkpointed;
  });
  looking.close();
  await store.writer.write('keys.touch', { keyId: key.id, atMs: 1 });
  t.equal(walBytes(), limitBytes, 'the WAL begins anew, and what is beyond its limit is cut off');
  t.strictSame(told, []);
  await store.close();
});

t.test(
  'the WAL is copied into the file even if no thread can be started for that',
  ifHas('prlimit'),
  async (t) => {
    const path = `${temporaryDirectory(t)}/davit.db`;
    const store = await openWithThread(t, path);
    const other = new Sqlite(path);
    const walPagesLeft = () => {
      const [wal] = other.pragma('wal_checkpoint(NOOP)') as { log: number; checkpointed: number }[];
      return wal && wal.log - wal.checkpointed;
    };
    other.prepare('SELECT probes FROM instance').get(); // opens all files that it needs
    const { key } = await store.writer.write('keys.create', KEY);
    const makeLarge = (idempotencyKey: string) =>
      store.writer.write('answer', {
        operation: 'pings.keep',
        input: { response_body: 'x'.repeat(8 * 1024 * 1024) } as Attempt,
        keyId: key.id,
        identity: { keyId: key.id, idempotencyKey, requestHash: Buffer.alloc(32) },
        statusCode: 200,
        locationPrefix: null,
      });
    const release = useUpFiles();
    await makeLarge('without a thread');
    await until(() => walPagesLeft() === 0);
    release();
    await makeLarge('with one again');
    await until(() => walPagesLeft() === 0);
    other.close();
    await store.close();
  },
);

t.test('what another connection wrote is seen by the next read', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const one = await openWithThread(t, path);
  const other = await openWithThread(t, path);
  const versionBefore = one.reads.instance.dataVersion();
  const project = await other.writer.write('projects.create', PROJECT);
  t.not(one.reads.instance.dataVersion(), versionBefore);
  t.match(one.reads.projects.resolve(project.id), project);
  await other.close();
  await one.close();
});

t.test(
  'a commit of another process is notified once, as everything; one of this process is not again',
  async (t) => {
    const store = testStore(t);
    const group = createGroupCommit(openForWriting(store.path, realEffects), realEffects);
    t.teardown(group.close);
    const heard: unknown[] = [];
    group.onCommit((changes) => heard.push([...changes]));
    group.pollOtherProcesses();
    t.strictSame(heard, []);
    const wrote = new Promise((resolve) =>
      group.enqueue({ name: 'projects.create', input: PROJECT, lowPriority: false, settle: resolve }),
    );
    t.match(await wrote, { ok: true });
    group.pollOtherProcesses();
    t.strictSame(heard, []);
    await store.project();
    group.pollOtherProcesses();
    group.pollOtherProcesses();
    t.strictSame(heard, [['everything']]);
  },
);

t.test('many writes from one turn share commits', async (t) => {
  const store = testStore(t, realEffects);
  const projectId = await store.project();
  let commits = 0;
  store.writer.onCommit(() => {
    commits += 1;
  });
  await Promise.all(
    Array.from({ length: 100 }, () => store.writer.write('deployments.create', newDeployment(projectId))),
  );
  t.equal(commits, 1);
});

t.test('a close commits all waiting writes, and later ones are rejected', async (t) => {
  const store = testStore(t);
  const database = openForWriting(store.path, realEffects);
  const group = createGroupCommit(database, realEffects);
  const results: WriteResult[] = [];
  const enqueue = () =>
    group.enqueue({
      name: 'projects.create',
      input: PROJECT,
      lowPriority: false,
      settle: (result) => results.push(result),
    });
  for (let number = 0; number < 300; number++) enqueue();
  group.close();
  t.equal(results.filter(({ ok }) => ok).length, 300);
  t.strictSame(store.query('SELECT count(*) AS projects FROM projects'), [{ projects: 300 }]);
  t.notOk(database.open);

  enqueue();
  t.match(results.at(-1), { ok: false, error: { code: 'unavailable', retryAfterSeconds: 5 } });
  await nextTurn();
  t.equal(results.length, 301, 'nothing is committed any more');
});

t.test(
  'what a close does last is done before the connection is closed, and to no file that was moved',
  (t) => {
    for (const isMoved of [false, true]) {
      const effects = fakeEffects();
      const path = join(temporaryDirectory(t), 'davit.db');
      const database = openForWriting(path, effects);
      const group = createGroupCommit(database, effects);
      if (isMoved) renameSync(path, `${path}.elsewhere`);
      effects.advance(10);
      const done: boolean[] = [];
      group.close(() => done.push(database.open));
      t.strictSame(done, isMoved ? [] : [true]);
      t.notOk(database.open);
    }
    t.end();
  },
);

t.test('a write waits until another process has written, for 5 s at most, and later ones less', async (t) => {
  const store = testStore(t);
  const other = new Sqlite(store.path);
  t.teardown(() => other.close());
  const effects = fakeEffects();
  let releasedAtMs = Number.POSITIVE_INFINITY;
  const blocking: Effects = {
    ...effects,
    block(durationMs) {
      effects.block(durationMs);
      if (other.inTransaction && effects.monotonicMs() >= releasedAtMs) other.exec('ROLLBACK');
    },
  };
  const database = openForWriting(store.path, realEffects);
  const writer = createWriter(database, blocking);
  t.teardown(writer.close);

  database.exec('BEGIN');
  await t.rejects(writer.write('projects.create', PROJECT), { message: /within a transaction/ });
  t.equal(effects.monotonicMs(), 0, 'but for nothing else');
  other.exec('BEGIN IMMEDIATE');
  await t.rejects(writer.write('projects.create', PROJECT), {
    code: 'unavailable',
    message: 'the database takes no writes at the moment: nothing was written; try again shortly',
  });
  t.equal(effects.monotonicMs(), 5_000);
  await t.rejects(writer.write('projects.create', PROJECT), { code: 'unavailable' });
  t.equal(effects.monotonicMs(), 5_250);
  other.exec('ROLLBACK');
  await t.resolves(writer.write('projects.create', PROJECT));

  other.exec('BEGIN IMMEDIATE');
  releasedAtMs = effects.monotonicMs() + 4_900;
  await t.resolves(writer.write('projects.create', PROJECT));
});

t.test('listeners are not notified of what a full disk undid', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const heard: unknown[] = [];
  store.writer.onCommit((changes) => heard.push([...changes]));
  store.limitPages(true);
  const results = await Promise.allSettled([
    store.writer.write('deployments.create', newDeployment(projectId)),
    store.writer.write('projects.create', { ...PROJECT, variables: { FILLER: 'x'.repeat(100_000) } }),
  ]);
  t.strictSame(
    results.map(({ status }) => status),
    ['rejected', 'rejected'],
  );
  store.limitPages(false);
  await store.writer.write('instance.probe', undefined);
  t.strictSame(heard, []);
});

t.test('low-priority writes let the others go first, but every commit has some of them', async (t) => {
  const store = testStore(t);
  const group = createGroupCommit(openForWriting(store.path, realEffects), realEffects);
  t.teardown(group.close);
  const order: string[] = [];
  const write = (who: string, lowPriority: boolean) =>
    new Promise<void>((resolve) =>
      group.enqueue({
        name: 'instance.probe',
        input: undefined,
        lowPriority,
        settle() {
          order.push(who);
          resolve();
        },
      }),
    );
  await Promise.all([
    ...Array.from({ length: 300 }, () => write('low', true)),
    ...Array.from({ length: 300 }, () => write('other', false)),
  ]);
  t.strictSame(
    [order.slice(0, 224), order.slice(224, 256)].map((part) => new Set(part)),
    [new Set(['other']), new Set(['low'])],
    'in the first commit',
  );
  t.strictSame(new Set(order.slice(256, 332)), new Set(['other']), 'in the second');
  t.equal(order.lastIndexOf('other') < order.lastIndexOf('low'), true);
  t.equal(order.length, 600);
});

/** A copy of what the next start would find if davit were killed now. */
function copyAfterKill(t: Test, path: string): string {
  const copy = join(temporaryDirectory(t), 'davit.db');
  for (const side of ['', '-wal']) copyFileSync(path + side, copy + side);
  return copy;
}

/** No file grows beyond `bytes` until the returned function is called, or the test has ended. */
function limitFiles(t: Test, bytes: number): () => void {
  const ignore = () => undefined; // else the signal ends the process
  process.on('SIGXFSZ', ignore);
  const lift = limitFileSize(bytes);
  t.teardown(() => {
    lift();
    process.off('SIGXFSZ', ignore);
  });
  return lift;
}
