import type { IncomingMessage, Server as Listener, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { Request } from '@hapi/hapi';
import { AppError } from '../errors.ts';
import { dropBody, dropRequests, stopReading } from '../unread.ts';

export interface AdmissionOptions {
  tls: boolean;
  maxConnections: number;
  /** How many pipelined requests, those sent before the previous one was answered, there may be over all connections. */
  pipelinedMax?: number | undefined;
}

/** Admission control, and which response is under way on a connection. */
export interface Admission {
  /**
   * Throws `unavailable` if this connection is one too many, or if there are too many pipelined requests. Connections
   * that came before the maximum was reached go on, however many others come and say nothing.
   */
  admit(request: Request): void;
  /** Closes the connection after this response, unless a further request has come; those that still come are ignored. */
  closeAfter(request: Request): void;
  /** The response to the latest request of a connection, until both are complete. */
  latestResponse(socket: Duplex): ServerResponse | undefined;
}

/** Unanswered requests of one connection. Hardly any client pipelines at all. */
const UNANSWERED_MAX = 100;
/** Each takes 11 KiB. */
const PIPELINED_MAX = 1_000;

interface UnderWay {
  /** Infinity: the connection is to be closed, and all further requests on it are ignored. */
  unanswered: number;
  latestResponse: ServerResponse | undefined;
}

/**
 * Limits connections and pipelined requests. One read may bring 3,600 requests, all in one turn of the event loop, which
 * blocked everybody else for 0.6 s; 4,000 connections with 100 requests each, whose clients read nothing, took 4.3 GB.
 * The first request beyond a limit is answered 503 and closes its connection; those behind it do not reach hapi.
 *
 * Call this after hapi has subscribed to the events of `listener`: it wraps hapi's listeners.
 */
export function createAdmission(listener: Listener, options: AdmissionOptions): Admission {
  const { tls, maxConnections, pipelinedMax = PIPELINED_MAX } = options;
  const underWay = new WeakMap<Duplex, UnderWay>();
  const refused = new WeakSet<IncomingMessage>();
  /** The connections that were beyond the maximum when they came, until they are admitted. */
  const beyond = new WeakSet<Duplex>();
  let connections = 0;
  let pipelined = 0;

  listener.on(tls ? 'secureConnection' : 'connection', (socket: Socket) => {
    connections++;
    if (connections > maxConnections) beyond.add(socket);
    socket.once('close', () => connections--);
  });
  for (const event of ['request', 'checkContinue'] as const) {
    const listeners = listener.listeners(event);
    listener.removeAllListeners(event);
    listener.on(event, (request, response) => {
      if (!count(request, response)) {
        dropBody(request);
        dropRequests(request.socket);
        return;
      }
      for (const listen of listeners) listen.call(listener, request, response);
    });
  }
  return { admit, closeAfter, latestResponse: (socket) => underWay.get(socket)?.latestResponse };

  /** Counts the request. False: ignore it. */
  function count(request: IncomingMessage, response: ServerResponse): boolean {
    const { socket } = request;
    if (socket.writableEnded) {
      // On stopping, davit has half-closed this connection: a request that can no longer be answered is not carried out.
      socket.destroy();
      return false;
    }
    const state = underWayOn(socket);
    const before = state.unanswered;
    if (before > UNANSWERED_MAX) return false;
    const isPipelined = before > 0;
    const isRefused = before === UNANSWERED_MAX || (isPipelined && pipelined >= pipelinedMax);
    if (isRefused) {
      refused.add(request);
      stopReading(socket);
    }
    if (isPipelined) pipelined += 1;
    state.unanswered = isRefused ? Infinity : before + 1;
    state.latestResponse = response;
    response.once('close', () => {
      if (isPipelined) pipelined -= 1;
      state.unanswered -= 1;
      // If it were kept until the next request, V8 would move it to the old generation, and then the next request's
      // objects with it: 256 connections created 5,500 deployments a second instead of 8,500.
      if (state.latestResponse === response && request.complete) state.latestResponse = undefined;
    });
    return true;
  }

  function underWayOn(socket: Duplex): UnderWay {
    let state = underWay.get(socket);
    if (state === undefined) {
      state = { unanswered: 0, latestResponse: undefined };
      underWay.set(socket, state);
    }
    return state;
  }

  function admit({ raw: { req, res } }: Request): void {
    if (beyond.has(req.socket)) {
      if (connections > maxConnections) refuse(res, 'there are too many connections: try again');
      beyond.delete(req.socket);
    }
    if (refused.has(req)) refuse(res, 'too many requests at once on this connection: wait for their answers');
  }

  function closeAfter({ raw: { req, res } }: Request): void {
    const state = underWayOn(req.socket);
    // Node sends nothing behind a response with this header, although the requests there are carried out.
    if (state.latestResponse !== res) return;
    res.setHeader('Connection', 'close');
    state.unanswered = Infinity;
  }
}

function refuse(response: ServerResponse, message: string): never {
  response.setHeader('Connection', 'close');
  throw new AppError('unavailable', message, { retryAfterSeconds: 1 });
}
