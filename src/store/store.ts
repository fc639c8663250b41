import type { MessagePort, Worker } from 'node:worker_threads';
import { startThread } from '../assets.ts';
import type { Effects } from '../effects.ts';
import { backlogReads } from './backlog.ts';
import { type Database, openForReading, openForWriting } from './database.ts';
import { deliveryReads } from './deliveries.ts';
import { deploymentReads } from './deployments.ts';
import { gaugeReads } from './gauges.ts';
import { instanceReads } from './instance.ts';
import { keyReads } from './keys.ts';
import { logReads } from './logs.ts';
import { outboxReads } from './outbox.ts';
import { projectReads } from './projects.ts';
import { createMoments } from './read-cache.ts';
import { replayReads } from './replays.ts';
import { webhookReads } from './webhooks.ts';
import { createWriter, type Writer } from './writer.ts';
import { connectWriter } from './writer-port.ts';
import type { WriterThreadData } from './writer-thread.ts';

/** Every read there is, on one connection. They answer at once and see the latest commit. */
export type Reads = ReturnType<typeof makeReads>;

/** The file, open: reads go straight to a connection, writes through the one door. */
export interface Store {
  reads: Reads;
  writer: Writer;
  /** Reads first, then the writer, so that the last connection to close leaves no WAL behind. */
  close(): Promise<void>;
}

/** For one process that does little: the command line. Reads and writes on one connection of this thread. */
export function openStore(path: string, effects: Effects): Store {
  return storeOn(openForWriting(path, effects), effects);
}

/** The same on a connection that is open already. */
export function storeOn(database: Database, effects: Effects): Store {
  const writer = createWriter(database, effects);
  return { reads: makeReads(database), writer, close: writer.close };
}

/**
 * For the service: the writer in a thread of its own, reads here. `ports` are further doors to the writer,
 * for other threads. `onCrash` is called if the writer dies: nothing can go on then. `figures` is where it counts
 * what it does.
 */
export async function openStoreWithThreads(
  path: string,
  ports: MessagePort[],
  onCrash: (error: unknown) => void,
  figures?: SharedArrayBuffer,
): Promise<Store> {
  const thread = startThread('store/writer-thread', {
    workerData: { path, ports, figures } satisfies WriterThreadData,
    transferList: ports,
  });
  await untilReady(thread);
  let closing = false;
  thread.on('error', onCrash);
  thread.on('exit', () => {
    if (!closing) onCrash(new Error('the writer thread ended'));
  });
  const database = openForReading(path);
  const writer = connectWriter(thread);

  return {
    reads: makeReads(database),
    writer,
    async close() {
      closing = true;
      database.close();
      await writer.close();
      await thread.terminate();
    },
  };
}

/** The reads of a thread that writes through a port. */
export function openReads(path: string): { reads: Reads; close(): void } {
  const database = openForReading(path);
  return { reads: makeReads(database), close: () => database.close() };
}

function makeReads(database: Database) {
  const moment = createMoments(database);
  return {
    instance: instanceReads(database, moment),
    keys: keyReads(database, moment),
    projects: projectReads(database),
    deployments: deploymentReads(database),
    logs: logReads(database),
    webhooks: webhookReads(database),
    deliveries: deliveryReads(database),
    replays: replayReads(database),
    outbox: outboxReads(database),
    backlog: backlogReads(database),
    gauges: gaugeReads(database),
  };
}

function untilReady(thread: Worker): Promise<void> {
  return new Promise((resolve, reject) => {
    thread.once('message', () => {
      thread.off('error', reject);
      resolve();
    });
    thread.once('error', reject);
  });
}
