import type { IncomingMessage } from 'node:http';
import { Readable } from 'node:stream';
import type { Request } from '@hapi/hapi';
import type { Effects } from '../effects.ts';
import { dropBody } from '../unread.ts';
import { INTERRUPTED } from './body.ts';

/**
 * `text` as a stream that ends only when the rest of the request's body has been drained. Closing the connection before
 * would reset it, and a client that reads only after sending everything would lose the response. Bounded in time and
 * bytes, as nginx's `lingering_close` is.
 */
export function lingeringResponse(text: string, request: Request, effects: Effects): Readable {
  const stream = new Readable({ read() {} });
  stream.push(text);
  drain(request.raw.req, effects, () => stream.push(null));
  return stream;
}

const DRAIN_MAX_BYTES = 64 * 1024 * 1024;
/** As nginx's `lingering_timeout` and `lingering_time`: some proxies read the response only after sending everything. */
const DRAIN_CHECK_MS = 5_000;
const DRAIN_MAX_CHECKS = 6;

/** Discards the rest of the body until it ends, stalls for 5 s, takes 30 s, or exceeds DRAIN_MAX_BYTES. */
function drain(req: IncomingMessage, effects: Effects, ended: () => void): void {
  let bytesAtLastCheck = -1;
  let checks = 0;
  let cancelCheck = (): void => {};
  req.on('close', stop).on(INTERRUPTED, stop);
  dropBody(req, DRAIN_MAX_BYTES, stop);
  req.resume();
  checkProgress();

  function checkProgress(): void {
    const { bytesRead } = req.socket;
    if (bytesRead === bytesAtLastCheck || checks === DRAIN_MAX_CHECKS) {
      stop();
      return;
    }
    bytesAtLastCheck = bytesRead;
    checks++;
    cancelCheck = effects.after(DRAIN_CHECK_MS, checkProgress);
  }
  function stop(): void {
    cancelCheck();
    req.off('close', stop).off(INTERRUPTED, stop);
    ended();
  }
}
