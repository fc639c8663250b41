import type { IncomingMessage, Server as Listener, ServerResponse } from 'node:http';
import type { Duplex } from 'node:stream';
import type { Request } from '@hapi/hapi';
import { AppError } from '../errors.ts';
import { dropBody, dropRequests, giveUpReading, stopReading } from '../unread.ts';
import { holdBody, refuseTinyPieces } from './body.ts';
import type { Connection, ConnectionPlaces } from './connection-places.ts';

/** Admission control, and which response is under way on a connection. */
export interface Admission {
  /** Throws `unavailable` if there is no place for this connection, or if there are too many pipelined requests. */
  admit(request: Request): void;
  /** The request has a valid key: its connection is no stranger's. */
  welcome(request: Request): void;
  /** Closes the connection after this response, unless a further request has come; those that still come are ignored. */
  closeAfter(request: Request): void;
  /** The response to the latest request of a connection, until both are complete. */
  latestResponse(socket: Duplex): ServerResponse | undefined;
}

/** Unanswered requests of one connection. Hardly any client pipelines at all. */
const UNANSWERED_MAX = 100;
/** Each takes 11 KiB. */
const PIPELINED_MAX = 1_000;
/** How many pipelined requests one turn of the event loop handles: as many as there are in a batch. */
const PIPELINED_PER_TURN = 16;

interface UnderWay {
  connection: Connection;
  /** Infinity: the connection is to be closed, and all further requests on it are ignored. */
  unanswered: number;
  latestResponse: ServerResponse | undefined;
  /** How many of them were pipelined. */
  pipelined: number;
  /** How many of them wait for their turn. */
  waiting: number;
  resumeReading(): void;
}

/**
 * Refuses connections without a place, and limits pipelined requests. One read may bring 3,600, all in one turn of the
 * event loop, which blocked everybody else for 0.6 s; 4,000 connections with 100 requests each, whose clients read
 * nothing, took 4.3 GB.
 * The first request beyond a limit is answered 503 and closes its connection; those behind it do not reach hapi.
 * Pipelined requests below the limits take turns: when each read's were answered at once, none was ever unanswered, and
 * as a turn makes up to 32 reads of a connection, ten of them blocked everybody else for 12 s.
 *
 * Call this after hapi has subscribed to the events of `listener`: it wraps hapi's listeners.
 */
export function createAdmission(
  listener: Listener,
  connections: ConnectionPlaces,
  pipelinedMax: number = PIPELINED_MAX,
): Admission {
  const underWay = new WeakMap<Duplex, UnderWay>();
  const refused = new WeakSet<IncomingMessage>();
  /** Each passes a pipelined request on to hapi. */
  const waiting: (() => void)[] = [];
  let pipelined = 0;
  let passedInTurn = 0;

  for (const event of ['request', 'checkContinue'] as const) {
    const listeners = listener.listeners(event);
    listener.removeAllListeners(event);
    listener.on(event, (request, response) => {
      const state = count(request, response);
      if (state === undefined) {
        dropBody(request);
        dropRequests(request.socket);
        return;
      }
      const pass = () => {
        const { socket } = request;
        // On stopping, davit has half-closed this connection: a request that can no longer be answered is not carried out.
        if (socket.writableEnded) socket.destroy();
        if (socket.destroyed) return;
        for (const listen of listeners) listen.call(listener, request, response);
      };
      if (state.unanswered === 1 || takeTurn()) pass();
      else wait(request, state, pass);
      refuseTinyPieces(request); // 400 instead of reading it; also while it waits
    });
  }
  return { admit, welcome, closeAfter, latestResponse: (socket) => underWay.get(socket)?.latestResponse };

  /** Counts the request, and returns what is under way on its connection. Undefined: ignore it. */
  function count(request: IncomingMessage, response: ServerResponse): UnderWay | undefined {
    const { socket } = request;
    const state = underWayOn(socket);
    const before = state.unanswered;
    if (before > UNANSWERED_MAX) return undefined;
    const isPipelined = before > 0;
    state.connection.begin(request);
    const isRefused = before === UNANSWERED_MAX || (isPipelined && pipelined >= pipelinedMax);
    if (isRefused) {
      refused.add(request);
      giveUpReading(socket);
    }
    if (isPipelined) {
      state.pipelined += 1;
      pipelined += 1;
    }
    state.unanswered = isRefused ? Infinity : before + 1;
    state.latestResponse = response;
    response.once('close', () => {
      if (isPipelined) uncount(state, 1);
      state.unanswered -= 1;
      if (state.unanswered === 0) state.connection.rest();
      // If it were kept until the next request, V8 would move it to the old generation, and then the next request's
      // objects with it: 256 connections created 5,500 deployments a second instead of 8,500.
      if (state.latestResponse === response && request.complete) state.latestResponse = undefined;
    });
    return state;
  }

  /** Pipelined requests of a connection have been answered. */
  function uncount(state: UnderWay, requests: number): void {
    const counted = Math.min(requests, state.pipelined);
    state.pipelined -= counted;
    pipelined -= counted;
  }

  /** False: this turn of the event loop has had as many pipelined requests as it may, as it has while others wait. */
  function takeTurn(): boolean {
    if (passedInTurn === PIPELINED_PER_TURN) return false;
    if (passedInTurn === 0) setImmediate(passSome);
    passedInTurn += 1;
    return true;
  }

  /** No more is read from a connection while any of its requests waits. */
  function wait(request: IncomingMessage, state: UnderWay, pass: () => void): void {
    if (state.waiting === 0) state.resumeReading = stopReading(request.socket);
    state.waiting += 1;
    const releaseBody = holdBody(request);
    waiting.push(() => {
      state.waiting -= 1;
      if (state.waiting === 0) state.resumeReading();
      releaseBody();
      pass();
    });
  }

  function passSome(): void {
    const some = waiting.splice(0, PIPELINED_PER_TURN);
    passedInTurn = some.length;
    if (passedInTurn > 0) setImmediate(passSome);
    for (const pass of some) pass();
  }

  function underWayOn(socket: Duplex): UnderWay {
    const known = underWay.get(socket);
    if (known !== undefined) return known;
    const state = {
      connection: connections.of(socket),
      unanswered: 0,
      latestResponse: undefined,
      pipelined: 0,
      waiting: 0,
      resumeReading: () => undefined,
    };
    underWay.set(socket, state);
    // After a CONNECT, Node closes no response that waits to be sent.
    socket.once('close', () => uncount(state, Infinity));
    return state;
  }

  function admit({ raw: { req, res } }: Request): void {
    if (underWay.get(req.socket)?.connection.takePlace() === false) {
      refuse(res, 'there are too many connections: try again');
    }
    if (refused.has(req)) refuse(res, 'too many requests at once on this connection: wait for their answers');
  }

  function welcome({ raw: { req } }: Request): void {
    underWay.get(req.socket)?.connection.welcome();
  }

  function closeAfter({ raw: { req, res } }: Request): void {
    const state = underWay.get(req.socket);
    // Node sends nothing behind a response with this header, although the requests there are carried out.
    if (state?.latestResponse !== res) return;
    res.setHeader('Connection', 'close');
    state.unanswered = Infinity;
  }
}

function refuse(response: ServerResponse, message: string): never {
  response.setHeader('Connection', 'close');
  throw new AppError('unavailable', message, { retryAfterSeconds: 1 });
}
