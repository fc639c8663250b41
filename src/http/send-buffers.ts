import type { ServerResponse } from 'node:http';
import { TLSSocket } from 'node:tls';
import { getHeapStatistics } from 'node:v8';
import type { Request } from '@hapi/hapi';
import type { KeyId } from '../domain.ts';
import type { Logger } from '../logger.ts';
import { createSlots, type Slots } from '../slots.ts';

/**
 * The larger one is more than one page of 50 items on each of the 4,096 connections. It is less where V8 has less memory:
 * what waits takes three times its length, and 170 MB of it ended a davit that was limited to 512 MB.
 */
const SEND_BUFFER_MAX_BYTES = Math.min(256 * 1024 * 1024, getHeapStatistics().heap_size_limit / 6);

/** Smaller responses take hardly more memory than their requests, and are not counted. */
const LARGE_BYTES = 16 * 1024;

interface BufferedResponse {
  response: ServerResponse;
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
 * of the oldest of the key that holds the most is closed, so a slow client cannot keep others from their responses, nor
 * cut off theirs. Log streams do not count: they read on only as fast as their client does.
 */
export function createSendBufferLimit(
  logger: Logger,
  maxBytes: number = SEND_BUFFER_MAX_BYTES,
): (request: Request) => void {
  /** By their keys; null: the strangers. None is empty. */
  const holders = new Map<KeyId | null, Holder>();
  let bytes = 0;

  return (request) => {
    const length = lengthOf(request);
    if (length < LARGE_BYTES) return;
    count(request.raw.res, length, request.auth.credentials?.app?.keyId ?? null);
    while (bytes > maxBytes) {
      const oldest = oldestOfLargest(request.raw.res);
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
    const place = holder.buffered.put({ response, release });
    holder.bytes += length;
    bytes += length;
    response.once('close', release);

    function release(): void {
      if (!isCounted) return;
      isCounted = false;
      holder.buffered.take(place);
      if (holder.buffered.size === 0) holders.delete(keyId);
      holder.bytes -= length;
      bytes -= length;
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
