import type { ServerResponse } from 'node:http';
import type { Request } from '@hapi/hapi';
import type { Logger } from '../logger.ts';
import { createSlots } from '../slots.ts';

/** More than the 4,096 connections that there may be have of pages of 50. */
const UNTAKEN_MAX_BYTES = 256 * 1024 * 1024;

/** Smaller ones take hardly more than their request does. */
const LARGE_BYTES = 16 * 1024;

interface UntakenAnswer {
  response: ServerResponse;
  letGo(): void;
}

/**
 * A large answer is held until its client has taken it: the 600 pages that one key may ask for at once were 500 MB for
 * two minutes, for a client that reads nothing. Of answers that are more than `maxBytes` together, the one that waits
 * for longest is cut off with its connection: so nobody keeps others from theirs. Logs are read as they are taken.
 */
export function createUntakenAnswers(
  logger: Logger,
  maxBytes: number = UNTAKEN_MAX_BYTES,
): (request: Request) => void {
  // In a Map each of them grew old, and its text with it: of pages of 50, 4,600 a second in place of 6,200.
  const untaken = createSlots<UntakenAnswer>();
  let bytes = 0;

  return (request) => {
    const length = lengthOf(request);
    if (length >= LARGE_BYTES) hold(request.raw.res, length);
  };

  function hold(response: ServerResponse, length: number): void {
    let isHeld = true;
    const letGo = () => {
      if (!isHeld) return;
      isHeld = false;
      untaken.take(place);
      bytes -= length;
    };
    const place = untaken.put({ response, letGo });
    bytes += length;
    response.once('close', letGo);
    for (const oldest of untaken) {
      if (bytes <= maxBytes || oldest.response === response) return;
      oldest.letGo();
      logger.warn('an answer that its client did not take is cut off: too much of others waits');
      oldest.response.req.socket.destroy();
    }
  }
}

function lengthOf({ response }: Request): number {
  if ('isBoom' in response || typeof response.source !== 'string') return 0;
  return response.source.length;
}
