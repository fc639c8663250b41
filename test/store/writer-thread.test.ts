import { randomUUID } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { MessageChannel } from 'node:worker_threads';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import type { Attempt, KeyId } from '../../src/domain.ts';
import type { Change } from '../../src/store/changes.ts';
import { startWriterThread } from '../../src/store/store.ts';
import { type Writer, writePersistently } from '../../src/store/writer.ts';
import { connectWriter } from '../../src/store/writer-port.ts';
import { until } from '../helpers/commands.ts';
import { newWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { KEY, newDeployment, openWithThread, PROJECT, temporaryDirectory } from '../helpers/store.ts';

t.test('each port announces the changes that concern it, and that another process wrote', async (t) => {
  const { store, door, other } = await open(t);
  const [inService, inDispatcher] = [store.writer, door].map(untilEverything) as [
    Promise<Change[]>,
    Promise<Change[]>,
  ];
  const project = await store.writer.write('projects.create', PROJECT);
  const { key } = await store.writer.write('keys.create', KEY);
  const webhook = await newWebhook(store, key.id);
  await store.writer.write('deployments.create', newDeployment(project.id));
  other.exec('UPDATE instance SET probes = probes + 1');
  t.strictSame(await inService, ['queue', 'everything']);
  t.strictSame(await inDispatcher, [webhook.id, 'everything']);
});

t.test('a thread that was started but not opened touches no file, and ends without an error', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const thread = startWriterThread((error) => t.fail('the writer died', { error }));
  await thread.end();
  t.notOk(existsSync(path));
  await t.rejects(thread.open(path, []), { message: 'the writer thread ended' });
  t.notOk(existsSync(path));
});

t.test('open rejects with the cause when the thread cannot open the file', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  writeFileSync(path, 'something else altogether');
  const thread = startWriterThread((error) => t.fail('it was not open yet', { error }));
  await t.rejects(thread.open(path, []), { message: /is not a davit file/ });
  await thread.end();
  t.equal(readFileSync(path, 'utf8'), 'something else altogether');
});

t.test(
  'ending a thread right after it opened its file, as a failed start does, is not reported as a crash',
  async (t) => {
    const path = join(temporaryDirectory(t), 'davit.db');
    const thread = startWriterThread((error) => t.fail('the writer died', { error }));
    await thread.open(path, []);
    await thread.end();
  },
);

t.test('a close rejects with the cause when the writer dies in the middle of it', async (t) => {
  const { port1, port2 } = new MessageChannel();
  const thread = startWriterThread((error) => t.fail('it was told to end', { error }));
  const store = await thread.open(join(temporaryDirectory(t), 'davit.db'), [port1]);
  // Ending the checkpoint thread takes a while, in which the writer still reads messages.
  await until(() => threadNames().includes(CHECKPOINTER));
  port2.postMessage({ kind: 'writes', writes: null }); // a bug
  await t.rejects(store.close(), { message: /iterable/ });
});

t.test(
  'while the thread takes no messages, 10,000 writes wait, and later ones are refused at once',
  async (t) => {
    const { store, door, other, probes } = await open(t);
    other.exec('BEGIN IMMEDIATE'); // the thread blocks while it waits for the end of this transaction
    const order: number[] = [];
    const writes = Array.from({ length: 10_000 }, (_, number) =>
      store.writer.write('instance.probe', undefined).then(() => order.push(number)),
    );
    const refusal = {
      code: 'unavailable',
      message: 'too many writes wait: try again shortly',
      retryAfterSeconds: 1,
    };
    await t.rejects(store.writer.write('instance.probe', undefined), refusal);
    const ofDispatcher = door.write('instance.probe', undefined);
    t.strictSame([order, probes()], [[], 0], 'none of them is done or answered yet');

    const effects = fakeEffects();
    const refused = Promise.withResolvers<unknown>();
    const record = writePersistently(store.writer, 'instance.probe', undefined, effects, refused.resolve);
    t.match(await refused.promise, refusal);
    other.exec('ROLLBACK');
    await Promise.all([...writes, ofDispatcher]);
    t.strictSame(
      order,
      writes.map((_, number) => number),
    );
    t.equal(probes(), 10_001);
    effects.advance(1_000);
    await record;
    t.equal(probes(), 10_002, 'what has happened is recorded in the end');
  },
);

t.test('no commit copies the WAL, however long it has become', async (t) => {
  const { store, walUse, makeLonger } = await open(t);
  const { key } = await store.writer.write('keys.create', KEY);
  // More than the 1,000 pages at which SQLite would, fewer than those at which the thread asks for it.
  await makeLonger(key.id, 1_008 - walUse().log);
  const { log, checkpointed } = walUse();
  t.ok(log > 1_000 && log < 1_018, `${log} pages`);
  t.equal(checkpointed, 0);
});

t.test(
  'the thread that copies the WAL is there before there is much to copy, and goes with the writer',
  async (t) => {
    const store = await openWithThread(t, join(temporaryDirectory(t), 'davit.db'));
    await until(() => threadNames().includes(CHECKPOINTER));
    await store.close();
    t.notOk(threadNames().includes(CHECKPOINTER));
  },
);

t.test('one thread copies the WAL, as often as it has to', async (t) => {
  const { store, walUse, makeLonger } = await open(t);
  const { key } = await store.writer.write('keys.create', KEY);
  const threads: number[] = [];
  for (let time = 0; time < 3; time++) {
    await makeLonger(key.id, 1_100);
    await until(() => walUse().log === walUse().checkpointed);
    threads.push(readdirSync('/proc/self/task').length);
  }
  t.ok(
    threads.every((count) => count <= Number(threads[0])),
    `${threads}`,
  );
});

/** As Linux has it, in 15 characters. */
const CHECKPOINTER = 'checkpoint-thre';

function threadNames(): string[] {
  return readdirSync('/proc/self/task').map((id) =>
    readFileSync(`/proc/self/task/${id}/comm`, 'utf8').trim(),
  );
}

/** The writer in its thread with a door for the dispatcher, and the connection of another process. */
async function open(t: Test) {
  const path = join(temporaryDirectory(t), 'davit.db');
  const { port1, port2 } = new MessageChannel();
  const store = await openWithThread(t, path, { ports: [port1] });
  const other = new Sqlite(path);
  t.teardown(() => {
    other.close();
    return store.close();
  });
  const wal = other.prepare<[], { log: number; checkpointed: number }>('PRAGMA wal_checkpoint(NOOP)');
  const probes = other.prepare<[], number>('SELECT probes FROM instance').pluck();
  return { store, door: connectWriter(port2), other, probes: () => probes.get(), walUse, makeLonger };

  /** Both in pages. */
  function walUse() {
    const use = wal.get();
    if (use === undefined) throw new Error('PRAGMA wal_checkpoint gave no row');
    return use;
  }

  /** Lengthens the WAL by so many pages, and a few more. */
  async function makeLonger(keyId: KeyId, pages: number) {
    await store.writer.write('answer', {
      operation: 'pings.keep',
      input: { response_body: 'x'.repeat(pages * 4_092) } as Attempt,
      keyId,
      identity: { keyId, idempotencyKey: randomUUID(), requestHash: Buffer.alloc(32) },
      statusCode: 200,
      locationPrefix: null,
    });
  }
}

/** All changes that are notified until another process has written. */
function untilEverything(writer: Writer): Promise<Change[]> {
  const heard: Change[] = [];
  return new Promise((resolve) => {
    writer.onCommit((changes) => {
      heard.push(...changes);
      if (changes.has('everything')) resolve(heard);
    });
  });
}
