import type { MessagePort } from 'node:worker_threads';
import { startThread } from '../assets.ts';
import type { Effects } from '../effects.ts';
import { backlogReads } from './backlog.ts';
import { type Database, openForReading, openForWriting } from './database.ts';
import { deliveryReads } from './deliveries.ts';
import { deploymentReads } from './deployments.ts';
import { gaugeReads } from './gauges.ts';
import { createWriter } from './group-commit.ts';
import { instanceReads } from './instance.ts';
import { keyReads } from './keys.ts';
import { logReads } from './logs.ts';
import { outboxReads } from './outbox.ts';
import { projectReads } from './projects.ts';
import { createMoments, createReadCache } from './read-cache.ts';
import { replayReads } from './replays.ts';
import { webhookReads } from './webhooks.ts';
import type { Writer } from './writer.ts';
import { connectWriter } from './writer-port.ts';
import type { WriterThreadData } from './writer-thread.ts';

/** All reads. They see the latest commit and are synchronous, except those that may scan many rows. */
export type Reads = ReturnType<typeof readsOn>;

/** The open file: reads use a connection of this thread, all writes go through the writer. */
export interface Store {
  reads: Reads;
  writer: Writer;
  /** Closes the reads before the writer, so that the last connection to close can remove the WAL. */
  close(): Promise<void>;
}

/** For commands: reads and writes on one connection of this thread. */
export function openStore(path: string, effects: Effects): Store {
  return storeOn(openForWriting(path, effects), effects);
}

/** The same on a connection that is open already. */
export function storeOn(database: Database, effects: Effects): Store {
  const writer = createWriter(database, effects);
  return { reads: readsOn(database), writer, close: writer.close };
}

/** The writer's thread. It loads in the background, and does nothing before `open`. */
interface WriterThread {
  /**
   * Opens the file; rejects when the thread cannot. `ports` let other threads use the writer; `metricsMemory` is for its
   * metrics.
   */
  open(path: string, ports: MessagePort[], metricsMemory?: SharedArrayBuffer): Promise<Store>;
  /** Ends the thread if no store was opened; an open store is closed by its `close`. */
  end(): Promise<void>;
}

/** For the service: reads in this thread, the writer in its own. `onCrash` is called if that dies, which is fatal. */
export function startWriterThread(onCrash: (error: unknown) => void): WriterThread {
  const thread = startThread('store/writer-thread');
  const ready = Promise.withResolvers<void>();
  const ended = Promise.withResolvers<never>();
  let isOpen = false;
  thread.once('message', opened);
  thread.on('error', died);
  thread.on('exit', () => died(new Error('the writer thread ended')));
  // `open` and `close` race with it; without them the rejection is of no interest.
  ended.promise.catch(() => undefined);
  return { open, end };

  async function open(path: string, ports: MessagePort[], metricsMemory?: SharedArrayBuffer): Promise<Store> {
    thread.postMessage({ path, ports, metricsMemory } satisfies WriterThreadData, ports);
    await Promise.race([ready.promise, ended.promise]);
    const database = openForReading(path);
    const writer = connectWriter(thread);
    return {
      reads: readsOn(database),
      writer,
      async close() {
        isOpen = false;
        database.close();
        // A thread that dies meanwhile will not answer.
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

/** The reads of a thread whose writes go through a port. */
export function openReads(path: string): { reads: Reads; close(): void } {
  const database = openForReading(path);
  return { reads: readsOn(database), close: () => database.close() };
}

/** All reads, on an open connection. */
export function readsOn(database: Database) {
  const moment = createMoments(database);
  const deployments = deploymentReads(database);
  const webhooks = webhookReads(database);
  return {
    instance: instanceReads(database),
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
    /** Creates a cache of reads that is valid until the next commit. */
    cache: <Value>() => createReadCache<Value>(moment),
  };
}
