import type { IncomingMessage, Server as Listener, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { Request } from '@hapi/hapi';
import { AppError } from '../errors.ts';

export interface AdmissionOptions {
  tls: boolean;
  maxConnections: number;
  /** How many requests, over all connections, may have come before the one ahead of them was answered. */
  behindOthersMax?: number | undefined;
}

/** Who is let in, and what is under way on a connection. */
export interface Admission {
  /** Throws `unavailable` for a request of one connection too many, or one too many of its connection. */
  admit(request: Request): void;
  /** What answers the latest request of a connection, until both are over. */
  latestResponse(socket: Duplex): ServerResponse | undefined;
}

/** Hardly any client sends a second request before it has the answer to the first. */
const UNANSWERED_MAX = 100;
/** Each takes 11 KiB. */
const BEHIND_OTHERS_MAX = 1_000;

interface UnderWay {
  /** Infinity: no further request of this connection is looked at. */
  unanswered: number;
  latestResponse: ServerResponse | undefined;
}

/**
 * No more connections than can be served, and of each no more requests: one read may bring 3,600, all in one turn of
 * the event loop, and for 0.6 s nobody else was answered then. 4,000 connections of clients that take no answers took
 * 4.3 GB, with 100 requests each. The first one beyond a maximum is answered, and the connection's last; what follows
 * on it does not reach hapi.
 *
 * To be called when hapi listens to `listener` already.
 */
export function createAdmission(listener: Listener, options: AdmissionOptions): Admission {
  const { tls, maxConnections, behindOthersMax = BEHIND_OTHERS_MAX } = options;
  const underWay = new WeakMap<Duplex, UnderWay>();
  const refused = new WeakSet<IncomingMessage>();
  let connections = 0;
  let behindOthers = 0;

  listener.on(tls ? 'secureConnection' : 'connection', (socket: Socket) => {
    connections++;
    socket.once('close', () => connections--);
  });
  for (const event of ['request', 'checkContinue'] as const) {
    const listeners = listener.listeners(event);
    listener.removeAllListeners(event);
    listener.on(event, (request, response) => {
      if (!begin(request, response)) return;
      for (const listen of listeners) listen.call(listener, request, response);
    });
  }
  return { admit, latestResponse: (socket) => underWay.get(socket)?.latestResponse };

  /** Whether anybody is to hear of the request. */
  function begin(request: IncomingMessage, response: ServerResponse): boolean {
    const { socket } = request;
    if (socket.writableEnded) {
      // davit is stopping, and gave up waiting for it. It cannot be answered any more: it is not carried out either.
      socket.destroy();
      return false;
    }
    const own = underWayOn(socket);
    const before = own.unanswered;
    if (before > UNANSWERED_MAX) return false;
    const behind = before === 0 ? 0 : 1;
    const isTooMany = behind > 0 && behindOthers >= behindOthersMax;
    const isRefused = before === UNANSWERED_MAX || isTooMany;
    if (isRefused) {
      refused.add(request);
      readNoMore(socket);
    }
    behindOthers += behind;
    own.unanswered = isRefused ? Infinity : before + 1;
    own.latestResponse = response;
    response.once('close', () => {
      behindOthers -= behind;
      own.unanswered -= 1;
      // Kept until the next comes, it would outlive two small collections of garbage, and what the next one has with it:
      // to 256 connections 5,500 deployments were created a second in place of 8,500.
      if (own.latestResponse === response && request.complete) own.latestResponse = undefined;
    });
    return true;
  }

  function underWayOn(socket: Duplex): UnderWay {
    let own = underWay.get(socket);
    if (own === undefined) {
      own = { unanswered: 0, latestResponse: undefined };
      underWay.set(socket, own);
    }
    return own;
  }

  function admit({ raw: { req, res } }: Request): void {
    if (connections > maxConnections) refuse(res, 'there are too many connections: try again');
    if (refused.has(req)) refuse(res, 'too many requests at once on this connection: wait for their answers');
  }
}

function refuse(response: ServerResponse, message: string): never {
  response.setHeader('Connection', 'close');
  throw new AppError('unavailable', message, { retryAfterSeconds: 1 });
}

/** Node reads on with each request that is over, and keeps what it read: all that a client sends while one waits. */
function readNoMore(socket: Socket): void {
  socket.on('resume', () => socket.pause());
  socket.pause();
}
