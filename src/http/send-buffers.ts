import type { ServerResponse } from 'node:http';
import { getHeapStatistics } from 'node:v8';
import type { Request } from '@hapi/hapi';
import type { Logger } from '../logger.ts';
import { createSlots } from '../slots.ts';

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

/**
 * Limits the memory of large responses that wait for slow clients: the 600 pages that one key may request at once took
 * 500 MB for two minutes when their client read nothing. While they are more than `maxBytes` together, the connection
 * of the oldest is closed, so a slow client cannot keep others from their responses. Log streams do not count: they
 * read on only as fast as their client does.
 */
export function createSendBufferLimit(
  logger: Logger,
  maxBytes: number = SEND_BUFFER_MAX_BYTES,
): (request: Request) => void {
  // A Map would move each entry and its text to V8's old generation: 4,600 pages of 50 a second instead of 6,200.
  const buffered = createSlots<BufferedResponse>();
  let bytes = 0;

  return (request) => {
    const length = lengthOf(request);
    if (length >= LARGE_BYTES) count(request.raw.res, length);
  };

  function count(response: ServerResponse, length: number): void {
    let isCounted = true;
    const release = () => {
      if (!isCounted) return;
      isCounted = false;
      buffered.take(place);
      bytes -= length;
    };
    const place = buffered.put({ response, release });
    bytes += length;
    response.once('close', release);
    for (const oldest of buffered) {
      if (bytes <= maxBytes || oldest.response === response) return;
      oldest.release();
      logger.warn(
        'a response was cut off: its client did not read it, and unread responses take too much memory',
      );
      oldest.response.req.socket.destroy();
    }
  }
}

function lengthOf({ response }: Request): number {
  if ('isBoom' in response || typeof response.source !== 'string') return 0;
  return response.source.length;
}
