import { join } from 'node:path';
import { MessageChannel } from 'node:worker_threads';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import type { Attempt } from '../../src/domain.ts';
import type { Change } from '../../src/store/context.ts';
import { openStoreWithThreads } from '../../src/store/store.ts';
import type { Writer } from '../../src/store/writer.ts';
import { connectWriter } from '../../src/store/writer-port.ts';
import { newWebhook } from '../helpers/deliveries.ts';
import { KEY, newDeployment, PROJECT, temporaryDirectory } from '../helpers/store.ts';

t.test('each door tells of what concerns who is behind it, and of other processes', async (t) => {
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

t.test('no commit copies the WAL, however long it has become', async (t) => {
  const { store, other } = await open(t);
  const wal = () => (other.pragma('wal_checkpoint(NOOP)') as { log: number; checkpointed: number }[])[0];
  const { key } = await store.writer.write('keys.create', KEY);
  // More than the 1,000 pages at which SQLite would, fewer than those at which the thread asks for it.
  const pages = 1_008 - (wal()?.log ?? 0);
  await store.writer.write('answer', {
    operation: 'pings.keep',
    input: { response_body: 'x'.repeat(pages * 4_092) } as Attempt,
    keyId: key.id,
    memory: { keyId: key.id, idempotencyKey: 'large', requestHash: Buffer.alloc(32) },
    statusCode: 200,
    locationPrefix: null,
  });
  const { log = 0, checkpointed } = wal() ?? {};
  t.ok(log > 1_000 && log < 1_018, `${log} pages`);
  t.equal(checkpointed, 0);
});

/** The writer in its thread with a door for the dispatcher, and the connection of another process. */
async function open(t: Test) {
  const path = join(temporaryDirectory(t), 'davit.db');
  const { port1, port2 } = new MessageChannel();
  const store = await openStoreWithThreads(path, [port1], (error) => t.fail('the writer died', { error }));
  const other = new Sqlite(path);
  t.teardown(() => {
    other.close();
    return store.close();
  });
  return { store, door: connectWriter(port2), other };
}

/** All that is heard of until another process has written. */
function untilEverything(writer: Writer): Promise<Change[]> {
  const heard: Change[] = [];
  return new Promise((resolve) => {
    writer.onCommit((changes) => {
      heard.push(...changes);
      if (changes.has('everything')) resolve(heard);
    });
  });
}
