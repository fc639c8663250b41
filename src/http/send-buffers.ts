import type { ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import { TLSSocket } from 'node:tls';
import { getHeapStatistics } from 'node:v8';
import type { Request } from '@hapi/hapi';
import type { KeyId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import { createSlots, type Slots } from '../slots.ts';

/**
 * The larger one is more than one page of 50 items on each of the 4,096 connections. It is less where V8 has less memory:
 * what waits takes three times its length, and 170 MB of it ended a davit that was limited to 512 MB.
 */
const SEND_BUFFER_MAX_BYTES = Math.min(256 * 1024 * 1024, getHeapStatistics().heap_size_limit / 6);

/** Smaller responses take hardly more memory than their requests, and are not counted. */
const LARGE_BYTES = 16 * 1024;

/** A client that takes nothing for so long does not read: what was lost on the way is sent again sooner. */
const LOOK_EVERY_MS = 5_000;

interface BufferedResponse {
  response: ServerResponse;
  sinceMs: number;
  /** What the kernel had taken for its connection at the last look. */
  takenBytes: number | undefined;
  /** Counts it no longer. */
  release(): void;
}

/** What one key has not taken yet, or all strangers together. */
interface Holder {
  bytes: number;
  // A Map would move each entry and its text to V8's old generation: 4,600 pages of 50 a second instead of 6,200.
  buffered: Slots<BufferedResponse>;
}

/**
 * Limits the memory of large responses that wait for slow clients: the 600 pages that one key may request at once took
 * 500 MB for two minutes when their client read nothing. While they are more than `maxBytes` together, the connection
 * of the oldest that takes nothing is closed; if all take something, that of the oldest of the key that holds the most. So
 * a client that reads loses nothing to one that does not, and a slow one cuts off only its own. Log streams do not count:
 * they read on only as fast as their client does.
 */
export function createSendBufferLimit(
  effects: Pick<Effects, 'after' | 'monotonicMs'>,
  logger: Logger,
  maxBytes: number = SEND_BUFFER_MAX_BYTES,
): (request: Request) => void {
  /** By their keys; null: the strangers. None is empty. */
  const holders = new Map<KeyId | null, Holder>();
  /** Those whose connections took nothing between the last two looks, the oldest first. */
  let stalled: BufferedResponse[] = [];
  let isLooking = false;
  let bytes = 0;

  return (request) => {
    const length = lengthOf(request);
    if (length < LARGE_BYTES) return;
    count(request.raw.res, length, request.auth.credentials?.app?.keyId ?? null);
    while (bytes > maxBytes) {
      const oldest = oldestStalled() ?? oldestOfLargest(request.raw.res);
      if (oldest === undefined) return;
      oldest.release();
      logger.warn(
        'a response was cut off: its client did not read it, and unread responses take too much memory',
      );
      oldest.response.req.socket.destroy();
    }
  };

  function count(response: ServerResponse, length: number, keyId: KeyId | null): void {
    const holder = holders.get(keyId) ?? { bytes: 0, buffered: createSlots<BufferedResponse>() };
    holders.set(keyId, holder);
    let isCounted = true;
    const sinceMs = effects.monotonicMs();
    const place = holder.buffered.put({ response, sinceMs, takenBytes: undefined, release });
    holder.bytes += length;
    bytes += length;
    response.once('close', release);
    if (!isLooking) lookLater();

    function release(): void {
      if (!isCounted) return;
      isCounted = false;
      holder.buffered.take(place);
      if (holder.buffered.size === 0) holders.delete(keyId);
      holder.bytes -= length;
      bytes -= length;
    }
  }

  /** Nobody tells when a connection takes something, so all are looked at. */
  function look(): void {
    const all = [...holders.values()].flatMap(({ buffered }) => [...buffered]);
    stalled = all.filter(isStalled).sort((a, b) => a.sinceMs - b.sinceMs);
    for (const one of all) one.takenBytes = takenBytes(one.response.req.socket);
    isLooking = false;
    if (all.length > 0) lookLater();
  }

  function lookLater(): void {
    isLooking = true;
    effects.after(LOOK_EVERY_MS, look);
  }

  function oldestStalled(): BufferedResponse | undefined {
    for (;;) {
      const oldest = stalled.shift();
      // It may have been read since the look.
      if (oldest === undefined || (!oldest.response.closed && isStalled(oldest))) return oldest;
    }
  }

  /** Never `latest`, so that a single one is sent whatever its size. */
  function oldestOfLargest(latest: ServerResponse): BufferedResponse | undefined {
    let found: BufferedResponse | undefined;
    let mostBytes = 0;
    for (const holder of holders.values()) {
      const [oldest] = holder.buffered;
      if (holder.bytes <= mostBytes || oldest === undefined || oldest.response === latest) continue;
      found = oldest;
      mostBytes = holder.bytes;
    }
    return found;
  }
}

/** Whether the connection has taken nothing since the last look, or is closed. */
function isStalled(buffered: BufferedResponse): boolean {
  const bytes = takenBytes(buffered.response.req.socket);
  return bytes === undefined || bytes === buffered.takenBytes;
}

/**
 * How much the kernel has taken for a connection. What Node documents, `bytesWritten` and `writableLength`, counts a
 * response as one piece until all of it is taken, so these are its internals; `_parent` is under TLS. Undefined once the
 * connection is closed.
 */
export function takenBytes(socket: Socket): number | undefined {
  const { _handle: handle } = socket as unknown as { _handle?: (Handle & { _parent?: Handle }) | null };
  const stream = handle?._parent ?? handle;
  return stream ? stream.bytesWritten - stream.writeQueueSize : undefined;
}

interface Handle {
  bytesWritten: number;
  writeQueueSize: number;
}

/**
 * Of the text that is copied for this client. A Buffer is sent from where it lies, but over TLS all of it is encrypted at
 * once: ten clients that did not read one of 20 MB took 2 MB, and 223 MB over TLS.
 */
function lengthOf({ response, raw }: Request): number {
  if ('isBoom' in response) return 0;
  const source: unknown = response.source;
  if (typeof source === 'string') return source.length;
  return Buffer.isBuffer(source) && raw.req.socket instanceof TLSSocket ? source.length : 0;
}
