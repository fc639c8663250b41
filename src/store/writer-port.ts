import type { MessagePort, Worker } from 'node:worker_threads';
import { AppError } from '../errors.ts';
import { createSlots } from '../slots.ts';
import type { Change } from './changes.ts';
import type { GroupCommit, QueuedWrite } from './group-commit.ts';
import type { InputOf, OperationName, OutputOf } from './operations.ts';
import type { CommitListener, Writer } from './writer.ts';

/*
 * The writer's interface across threads. With commits in a thread of their own, requests are read while the disk syncs:
 * 256 connections see a p99 of 39 ms; with one thread for everything it was 2.4 s.
 */

type Port = Pick<MessagePort | Worker, 'postMessage' | 'on'>;

type ToWriter =
  | { kind: 'writes'; writes: { id: number; name: OperationName; input: unknown }[] }
  | { kind: 'close' };

type FromWriter =
  | { kind: 'news'; results: { id: number; result: PortableResult }[]; changes: Change[] }
  | { kind: 'closed' };

type PortableResult = { ok: true; value: unknown } | { ok: false; error: PortableError };

type PortableError =
  | ({ kind: 'refusal' } & Pick<AppError, 'code' | 'message' | 'details' | 'retryAfterSeconds'>)
  | { kind: 'bug'; message: string; stack: string | undefined };

/**
 * A larger turn of the event loop is sent in several messages, so that the writer begins while this thread still reads
 * requests. With one message for a whole turn the two threads alternated: 4,200 deployments a second from 64
 * connections; like this, 5,700.
 */
const LARGEST_MESSAGE = 16;

/**
 * How many writes of a port may wait: twice as many as requests can on all connections. More come only from clients that
 * have given up, and each keeps 10 KB. Counted here, as a writer that hangs in fsync(2) on a disk that does not answer
 * takes no messages: 30,000 writes waited for it, with 290 MB.
 */
const WAITING_MAX = 10_000;

/**
 * A writer that sends its writes through `port` to `serveWriter` in another thread. Rejects at once with `unavailable`
 * while too many wait.
 */
export function connectWriter(port: Port): Writer {
  const waiting = createSlots<PromiseWithResolvers<unknown>>();
  const listeners: CommitListener[] = [];
  let outgoing: { id: number; name: OperationName; input: unknown }[] = [];
  let onClosed: (() => void) | undefined;

  port.on('message', (message: FromWriter) => {
    switch (message.kind) {
      case 'news': {
        // First: what awaits a write runs after the listeners, but before anything that these put off, as a wake does.
        for (const { id, result } of message.results) settle(id, result);
        const changes = new Set(message.changes);
        if (changes.size > 0) for (const listener of listeners) listener(changes);
        return;
      }
      case 'closed':
        onClosed?.();
        return;
      default:
        message satisfies never;
    }
  });

  return {
    write<Name extends OperationName>(name: Name, input: InputOf<Name>) {
      if (waiting.size >= WAITING_MAX) return Promise.reject(tooMany());
      const answer = Promise.withResolvers<OutputOf<Name>>();
      const id = waiting.put(answer as PromiseWithResolvers<unknown>);
      if (outgoing.length === 0) setImmediate(flush);
      outgoing.push({ id, name, input });
      if (outgoing.length === LARGEST_MESSAGE) flush();
      return answer.promise;
    },
    onCommit: (listener) => void listeners.push(listener),
    close: () =>
      new Promise((resolve) => {
        onClosed = resolve;
        flush();
        port.postMessage({ kind: 'close' } satisfies ToWriter);
      }),
  };

  function flush(): void {
    if (outgoing.length === 0) return;
    port.postMessage({ kind: 'writes', writes: outgoing } satisfies ToWriter);
    outgoing = [];
  }

  function settle(id: number, result: PortableResult): void {
    const answer = waiting.take(id);
    if (result.ok) answer?.resolve(result.value);
    else answer?.reject(revive(result.error));
  }
}

/**
 * Serves `group` to the thread at the other end of `port`, see `connectWriter`. `concerns` selects the changes that it
 * is told of; `lowPriority` applies to all of its writes; `onClose` is called when it closes its writer.
 */
export function serveWriter(
  group: GroupCommit,
  port: Port,
  { concerns, lowPriority }: { concerns: (change: Change) => boolean; lowPriority: boolean },
  onClose: () => Promise<void>,
): void {
  let results: { id: number; result: PortableResult }[] = [];
  let changes: Change[] = [];

  group.onCommit((committed) => {
    const heard = [...committed].filter(concerns);
    if (heard.length === 0) return;
    flushSoon();
    changes.push(...heard);
  });
  port.on('message', (message: ToWriter) => {
    switch (message.kind) {
      case 'writes':
        for (const { id, name, input } of message.writes) group.enqueue(queued(id, name, input));
        return;
      case 'close':
        void onClose().then(() => {
          flush();
          port.postMessage({ kind: 'closed' } satisfies FromWriter);
        });
        return;
      default:
        message satisfies never;
    }
  });

  function queued(id: number, name: OperationName, input: unknown): QueuedWrite {
    return {
      name,
      input,
      lowPriority,
      settle(result) {
        flushSoon();
        results.push({ id, result: result.ok ? result : { ok: false, error: portable(result.error) } });
      },
    };
  }

  /** Sends all results and changes of a commit in one message. */
  function flushSoon(): void {
    if (results.length === 0 && changes.length === 0) queueMicrotask(flush);
  }

  function flush(): void {
    if (results.length === 0 && changes.length === 0) return;
    port.postMessage({ kind: 'news', results, changes } satisfies FromWriter);
    results = [];
    changes = [];
  }
}

function tooMany(): AppError {
  return new AppError('unavailable', 'too many writes wait: try again shortly', { retryAfterSeconds: 1 });
}

function portable(error: unknown): PortableError {
  if (error instanceof AppError) {
    const { code, message, details, retryAfterSeconds } = error;
    return { kind: 'refusal', code, message, details, retryAfterSeconds };
  }
  return error instanceof Error
    ? { kind: 'bug', message: error.message, stack: error.stack }
    : { kind: 'bug', message: String(error), stack: undefined };
}

function revive(error: PortableError): Error {
  if (error.kind === 'refusal') return new AppError(error.code, error.message, error);
  const bug = new Error(error.message);
  if (error.stack !== undefined) bug.stack = error.stack;
  return bug;
}
