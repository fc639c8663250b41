import type { MessagePort } from 'node:worker_threads';
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

/** They answer at once and see the latest commit. */
export type Reads = ReturnType<typeof readsOn>;

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
  return { reads: readsOn(database), writer, close: writer.close };
}

/** The writer's thread, which loads while others do their part and does nothing before `open`. */
interface StoreThread {
  /**
   * Opens the file; rejects when the thread cannot. `ports` are further doors to the writer, for other threads;
   * `figures` is where it counts what it does.
   */
  open(path: string, ports: MessagePort[], figures?: SharedArrayBuffer): Promise<Store>;
  /** For whoever opened nothing; a store that is open is closed. */
  end(): Promise<void>;
}

/** For the service: the writer in a thread of its own, reads here. `onCrash`: it died, and nothing can go on. */
export function startStoreThread(onCrash: (error: unknown) => void): StoreThread {
  const thread = startThread('store/writer-thread');
  const ready = Promise.withResolvers<void>();
  const ended = Promise.withResolvers<never>();
  let isOpen = false;
  thread.once('message', opened);
  thread.on('error', died);
  thread.on('exit', () => died(new Error('the writer thread ended')));
  // Whoever opens or closes hears of it.
  ended.promise.catch(() => undefined);
  return { open, end };

  async function open(path: string, ports: MessagePort[], figures?: SharedArrayBuffer): Promise<Store> {
    thread.postMessage({ path, ports, figures } satisfies WriterThreadData, ports);
    await Promise.race([ready.promise, ended.promise]);
    const database = openForReading(path);
    const writer = connectWriter(thread);
    return {
      reads: readsOn(database),
      writer,
      async close() {
        isOpen = false;
        database.close();
        // One that dies meanwhile says no more.
        await Promise.race([writer.close(), ended.promise]).finally(end);
      },
    };
  }

  async function end(): Promise<void> {
    thread.off('message', opened);
    isOpen = false;
    await thread.terminate();
  }

  function opened(): void {
    isOpen = true;
    ready.resolve();
  }

  function died(error: unknown): void {
    ended.reject(error);
    if (isOpen) onCrash(error);
  }
}

/** The reads of a thread that writes through a port. */
export function openReads(path: string): { reads: Reads; close(): void } {
  const database = openForReading(path);
  return { reads: readsOn(database), close: () => database.close() };
}

/** Every read there is, on a connection that is open already. */
export function readsOn(database: Database) {
  const moment = createMoments(database);
  const deployments = deploymentReads(database);
  const webhooks = webhookReads(database);
  return {
    instance: instanceReads(database, moment),
    keys: keyReads(database, moment),
    projects: projectReads(database),
    deployments,
    logs: logReads(database),
    webhooks,
    deliveries: deliveryReads(database),
    replays: replayReads(database),
    outbox: outboxReads(database),
    backlog: backlogReads(database, deployments, webhooks),
    gauges: gaugeReads(database),
  };
}
