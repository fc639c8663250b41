import type { Request } from '@hapi/hapi';
import type { KeyId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { createSlots } from '../slots.ts';
import type { Change } from '../store/changes.ts';
import type { Writer } from '../store/writer.ts';
import { isUnread, UNREAD } from '../unread.ts';

/** A request's wait for commits. */
export interface Watch {
  /**
   * Resolves once something may have changed since the watch was opened or this last resolved, or after `timeoutMs`.
   * `closed`, from then on at every call: the request must not wait any longer.
   */
  next(timeoutMs: number): Promise<'changed' | 'timedOut' | 'closed'>;
  close(): void;
}

export interface Watches {
  /**
   * Opens a watch; done before the first read of what it waits for, it misses no change. Throws `rate_limited` if the
   * key has too many watches, `unavailable` if there are too many in all, or if the service is stopping.
   */
  open(changes: readonly Change[], keyId: KeyId): Watch;
  /** Closes all watches, and refuses new ones: the service is stopping. */
  close(): void;
}

/** Each may keep a connection open, and some 100 KiB of a log that its client is slow to read. */
const WATCHES_MAX = 1_000;
const WATCHES_OF_KEY_MAX = 500;
const REFUSED_RETRY_SECONDS = 5;

/** Lets requests wait for commits, also those of other processes, with one subscription to the writer for all. */
export function createWatches(writer: Pick<Writer, 'onCommit'>, effects: Effects): Watches {
  const watches = createSlots<OpenWatch>();
  const watchesOf = new Map<Change, Set<OpenWatch>>();
  const countOf = new Map<KeyId, number>();
  let closed = false;

  writer.onCommit((changes) => {
    for (const change of changes) {
      for (const watch of change === 'everything' ? watches : (watchesOf.get(change) ?? [])) watch.wake();
    }
  });

  return { open, close };

  function open(changes: readonly Change[], keyId: KeyId): Watch {
    refuseIfMany(keyId);
    const watch = createWatch(effects, remove);
    const place = watches.put(watch);
    countOf.set(keyId, (countOf.get(keyId) ?? 0) + 1);
    for (const change of changes) {
      const same = watchesOf.get(change) ?? new Set();
      watchesOf.set(change, same.add(watch));
    }
    return watch;

    function remove(): void {
      watches.take(place);
      const left = (countOf.get(keyId) ?? 0) - 1;
      if (left > 0) countOf.set(keyId, left);
      else countOf.delete(keyId);
      for (const change of changes) {
        const same = watchesOf.get(change);
        same?.delete(watch);
        if (same?.size === 0) watchesOf.delete(change);
      }
    }
  }

  function refuseIfMany(keyId: KeyId): void {
    const retryAfterSeconds = REFUSED_RETRY_SECONDS;
    if (closed) throw new AppError('unavailable', 'the service is stopping', { retryAfterSeconds });
    if ((countOf.get(keyId) ?? 0) >= WATCHES_OF_KEY_MAX) {
      throw new AppError('rate_limited', 'too many requests of this key are waiting', { retryAfterSeconds });
    }
    if (watches.size >= WATCHES_MAX) {
      throw new AppError('unavailable', 'too many requests are waiting', { retryAfterSeconds });
    }
  }

  function close(): void {
    closed = true;
    for (const watch of [...watches]) watch.close();
  }
}

/**
 * Closes the watch when the response is finished, its client disconnects or ends its side, also if that has happened
 * already. A client that has ended its side is still answered, but it has perhaps left, and must not keep its place; nor
 * must one whose connection is read no more, as nothing tells when it leaves.
 */
export function closeWithResponse(watch: Watch, { raw: { req, res } }: Pick<Request, 'raw'>): void {
  const { socket } = req;
  if (res.closed || socket.readableEnded || isUnread(socket)) {
    watch.close();
    return;
  }
  socket.setMaxListeners(0); // all pipelined requests of a connection may wait
  socket.once('end', watch.close).once(UNREAD, watch.close);
  res.once('close', () => {
    socket.off('end', watch.close).off(UNREAD, watch.close);
    watch.close();
  });
}

interface OpenWatch extends Watch {
  wake(): void;
}

function createWatch(effects: Effects, onClose: () => void): OpenWatch {
  let state: 'quiet' | 'changed' | 'closed' = 'quiet';
  let endWait: (() => void) | undefined;

  return {
    async next(timeoutMs) {
      if (state === 'quiet' && timeoutMs > 0) await wait(timeoutMs);
      if (state === 'closed') return 'closed';
      const result = state === 'changed' ? 'changed' : 'timedOut';
      state = 'quiet';
      return result;
    },
    wake() {
      if (state === 'closed') return;
      state = 'changed';
      endWait?.();
    },
    close() {
      if (state === 'closed') return;
      state = 'closed';
      onClose();
      endWait?.();
    },
  };

  function wait(timeoutMs: number): Promise<void> {
    return new Promise((resolve) => {
      const cancelTimer = effects.after(timeoutMs, end);
      endWait = end;

      function end(): void {
        cancelTimer();
        endWait = undefined;
        resolve();
      }
    });
  }
}
