import type { MessagePort } from 'node:worker_threads';
import { startThread } from '../assets.ts';
import type { WebhookId } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import type { LogOptions } from '../logger.ts';
import type { PingResult } from './ping.ts';
import type { RetrySchedule } from './retry.ts';
import type { SenderOptions } from './send.ts';

/** What the dispatcher begins with. */
export interface DispatcherThreadData {
  path: string;
  /** A door to the writer. */
  port: MessagePort;
  sender: SenderOptions;
  schedule: RetrySchedule;
  log: LogOptions;
  /** Where it counts what it does; undefined: nobody asks. */
  figures?: SharedArrayBuffer | undefined;
}

export type ToDispatcherThread =
  | { begin: DispatcherThreadData }
  | 'look'
  | 'stop'
  | { trust: string }
  | { ping: WebhookId; pingId: number };
export type FromDispatcherThread =
  | 'ready'
  | 'stopped'
  | { quietMs: number }
  /** Null: it went wrong inside, and the log says how. */
  | { pingId: number; result: PingResult | null };

interface DispatcherThread {
  /** Begins to send. Resolves when it has; rejects when it cannot. */
  begin(data: DispatcherThreadData): Promise<void>;
  /** How long ago its loop last looked for work; does not resolve while the thread hangs. */
  quietMs(): Promise<number>;
  /** Sends one ping now and tells what came of it. */
  ping(webhookId: WebhookId): Promise<PingResult>;
  /** These certificates in PEM are trusted from now on, in place of the sender's `caPem`. */
  trust(caPem: string): void;
  /** Lets the attempts that are under way end, then the thread. */
  stop(): Promise<void>;
}

const TERMINATE_MAX_MS = 1_000;

/**
 * Starts the dispatcher's thread, which loads while others do their part and does nothing before `begin`. `onCrash`
 * is called if it dies.
 */
export function startDispatcherThread(onCrash: (error: unknown) => void, effects: Effects): DispatcherThread {
  const thread = startThread('deliver/dispatcher-thread');
  const ready = Promise.withResolvers<void>();
  const stopped = Promise.withResolvers<void>();
  let looks: ((quietMs: number) => void)[] = [];
  const pings = new Map<number, PromiseWithResolvers<PingResult>>();
  let lastPingId = 0;
  let stopping = false;

  thread.on('message', (message: FromDispatcherThread) => {
    if (message === 'ready') return ready.resolve();
    if (message === 'stopped') return stopped.resolve();
    if ('pingId' in message) return settlePing(message);
    for (const answer of looks) answer(message.quietMs);
    looks = [];
  });
  thread.on('error', (error) => {
    ready.reject(error);
    onCrash(error);
  });
  thread.on('exit', () => {
    stopped.resolve();
    if (!stopping) onCrash(new Error('the dispatcher thread ended'));
  });
  // Whoever begins hears of it.
  ready.promise.catch(() => undefined);

  return {
    begin(data) {
      thread.postMessage({ begin: data } satisfies ToDispatcherThread, [data.port]);
      return ready.promise;
    },
    quietMs: () =>
      new Promise((resolve) => {
        looks.push(resolve);
        thread.postMessage('look' satisfies ToDispatcherThread);
      }),
    ping(webhookId) {
      lastPingId += 1;
      const ping = Promise.withResolvers<PingResult>();
      pings.set(lastPingId, ping);
      thread.postMessage({ ping: webhookId, pingId: lastPingId } satisfies ToDispatcherThread);
      return ping.promise;
    },
    trust: (caPem) => thread.postMessage({ trust: caPem } satisfies ToDispatcherThread),
    async stop() {
      stopping = true;
      thread.postMessage('stop' satisfies ToDispatcherThread);
      await stopped.promise;
      // A name that is being resolved keeps the thread until it is, which nobody has to wait for.
      await Promise.race([thread.terminate(), delay(TERMINATE_MAX_MS, effects)]);
    },
  };

  function settlePing({ pingId, result }: { pingId: number; result: PingResult | null }): void {
    const ping = pings.get(pingId);
    pings.delete(pingId);
    if (result === null) ping?.reject(new Error('a ping went wrong inside the dispatcher thread'));
    else ping?.resolve(result);
  }
}
