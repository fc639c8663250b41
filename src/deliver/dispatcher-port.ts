import type { MessagePort } from 'node:worker_threads';
import { startThread } from '../assets.ts';
import type { PingResult, WebhookId } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import { AppError, unreadable } from '../errors.ts';
import type { LogOptions } from '../logger.ts';
import { createSlots } from '../slots.ts';
import type { FileIdentity } from '../store/place.ts';
import type { RetrySchedule } from './retry.ts';
import type { SenderOptions } from './send.ts';

/** What the dispatcher thread is started with. */
export interface DispatcherThreadData {
  path: string;
  /** The files that the writer has open. */
  files: FileIdentity[];
  /** A port to the writer thread. */
  port: MessagePort;
  sender: SenderOptions;
  schedule: RetrySchedule;
  log: LogOptions;
  /** Shared memory for its metrics; undefined: there are none. */
  metricsMemory: SharedArrayBuffer | undefined;
}

export type ToDispatcherThread =
  | { kind: 'begin'; data: DispatcherThreadData }
  | { kind: 'quietMs' }
  /** `graceMs`: how long attempts that are under way may go on. */
  | { kind: 'stop'; graceMs: number }
  | { kind: 'trust'; caPem: string }
  | { kind: 'ping'; pingId: number; webhookId: WebhookId };
export type FromDispatcherThread =
  | { kind: 'ready' }
  /** It ends without having begun: the path leads to other files than the writer has open. */
  | { kind: 'moved' }
  | { kind: 'stopped' }
  | { kind: 'quietMs'; quietMs: number }
  /** `unreadable`: the webhook could not be read from the disk; null: it failed because of a bug. Both are logged. */
  | { kind: 'pinged'; pingId: number; result: PingResult | 'unreadable' | null };

interface DispatcherThread {
  /** Starts sending. Resolves once it has started; rejects if it cannot. */
  begin(data: DispatcherThreadData): Promise<void>;
  /**
   * Resolves to how long ago its loop's last successful tick began; does not resolve while the thread hangs. To be called
   * again only once it has resolved.
   */
  quietMs(): Promise<number>;
  /** Sends one ping now, and resolves to its result. */
  ping(webhookId: WebhookId): Promise<PingResult>;
  /** Replaces the sender's `caPem` for new connections. */
  trust(caPem: string): void;
  /** Lets the attempts that are under way end within `graceMs`, then ends the thread. */
  stop(graceMs: number): Promise<void>;
}

const TERMINATE_MAX_MS = 500;
const MOVED_AT_START =
  'the database was moved or replaced while davit started: put it back in its place, and start davit again';

/**
 * Starts the dispatcher thread, which loads its code while other parts of davit start, and does nothing before `begin`.
 * `onCrash` is called if it ends on its own.
 */
export function startDispatcherThread(onCrash: (error: unknown) => void, effects: Effects): DispatcherThread {
  const thread = startThread('deliver/dispatcher-thread');
  const ready = Promise.withResolvers<void>();
  const stopped = Promise.withResolvers<void>();
  let tellQuietMs = (_quietMs: number): void => undefined;
  const pings = createSlots<PromiseWithResolvers<PingResult>>();
  /** Whether its end is expected, or was told. */
  let ending = false;

  thread.on('message', (message: FromDispatcherThread) => {
    if (message.kind === 'ready') return ready.resolve();
    if (message.kind === 'moved') return fail(new AppError('conflict', MOVED_AT_START));
    if (message.kind === 'stopped') return stopped.resolve();
    if (message.kind === 'pinged') return settlePing(message);
    tellQuietMs(message.quietMs);
  });
  thread.on('error', fail);
  thread.on('exit', () => {
    stopped.resolve();
    if (!ending) onCrash(new Error('the dispatcher thread ended'));
  });
  // Not unhandled: `begin` returns the same promise.
  ready.promise.catch(() => undefined);

  return {
    begin(data) {
      thread.postMessage({ kind: 'begin', data } satisfies ToDispatcherThread, [data.port]);
      return ready.promise;
    },
    quietMs: () =>
      new Promise((resolve) => {
        tellQuietMs = resolve;
        thread.postMessage({ kind: 'quietMs' } satisfies ToDispatcherThread);
      }),
    ping(webhookId) {
      const ping = Promise.withResolvers<PingResult>();
      const pingId = pings.put(ping);
      thread.postMessage({ kind: 'ping', pingId, webhookId } satisfies ToDispatcherThread);
      return ping.promise;
    },
    trust: (caPem) => thread.postMessage({ kind: 'trust', caPem } satisfies ToDispatcherThread),
    async stop(graceMs) {
      ending = true;
      thread.postMessage({ kind: 'stop', graceMs } satisfies ToDispatcherThread);
      await stopped.promise;
      // A name lookup under way delays the end of the thread, and is not worth waiting for.
      await Promise.race([thread.terminate(), delay(TERMINATE_MAX_MS, effects)]);
    },
  };

  function fail(error: unknown): void {
    ending = true;
    ready.reject(error);
    onCrash(error);
  }

  function settlePing({ pingId, result }: Extract<FromDispatcherThread, { kind: 'pinged' }>): void {
    const ping = pings.take(pingId);
    if (result === 'unreadable') ping?.reject(unreadable());
    else if (result === null) ping?.reject(new Error('a ping went wrong inside the dispatcher thread'));
    else ping?.resolve(result);
  }
}
