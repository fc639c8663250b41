import { readFileSync } from 'node:fs';
import {
  createServer,
  type IncomingHttpHeaders,
  type IncomingMessage,
  type OutgoingHttpHeaders,
  type ServerResponse,
} from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { AddressInfo, Socket } from 'node:net';
import { TLSSocket } from 'node:tls';
import type { Test } from 'tap';

/** What a delivery looked like where it arrived. */
export interface Received {
  method: string;
  path: string;
  headers: IncomingHttpHeaders;
  /** The bytes before any parsing. */
  body: Buffer;
  /** Tells connections apart: 1 for the first that was accepted. */
  connection: number;
  /** Whether its TLS session was resumed. */
  resumed: boolean;
}

/** What a receiver does with a request, once it has come in whole. */
export type Answer = (response: ServerResponse, received: Received) => void;

export interface Receiver {
  /** Where deliveries can be sent to. */
  url: string;
  port: number;
  /** All requests, in the order in which they came. */
  requests: readonly Received[];
  /** The next request that was not yet returned. */
  next(): Promise<Received>;
  /** What the coming requests are answered with; the last answer goes on for ever. */
  answerWith(...answers: [Answer, ...Answer[]]): void;
  /** How many connections it accepted so far. */
  connections(): number;
  /** Resolves when no connection is open. */
  deserted(): Promise<void>;
  /** Closes the port and every connection. */
  close(): Promise<void>;
}

interface ReceiverOptions {
  /** Which certificate of test/fixtures/tls it shows; plain HTTP without one. */
  tls?: 'localhost' | 'wrong-host' | 'expired' | 'self-signed';
  answers?: [Answer, ...Answer[]];
  /** Where it listens: 127.0.0.1 unless told. */
  host?: string;
}

/** The authority that signed `localhost`, `wrong-host` and `expired`. */
export const CA_PEM = tlsFixture('ca.pem');

/** A real receiver on a free port, closed with the test. Answers 200 unless told otherwise. */
export async function startReceiver(t: Test, options: ReceiverOptions = {}): Promise<Receiver> {
  const { tls, host = '127.0.0.1' } = options;
  let answers: readonly Answer[] = options.answers ?? [status(200)];
  const requests: Received[] = [];
  const waiting: ((received: Received) => void)[] = [];
  const numbers = new WeakMap<Socket, number>();
  const sockets = new Set<Socket>();
  let returned = 0;
  let accepted = 0;
  let whenDeserted: (() => void)[] = [];

  const server = tls
    ? createTlsServer({ cert: tlsFixture(`${tls}.pem`), key: tlsFixture(`${tls}.key`) }, receive)
    : createServer(receive);
  server.on(tls ? 'secureConnection' : 'connection', (socket: Socket) => {
    accepted += 1;
    numbers.set(socket, accepted);
  });
  // TCP, below TLS: also of handshakes that fail.
  server.on('connection', (socket: Socket) => {
    sockets.add(socket);
    socket.on('close', () => {
      sockets.delete(socket);
      if (sockets.size > 0) return;
      for (const resolve of whenDeserted) resolve();
      whenDeserted = [];
    });
  });
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject);
    server.listen(0, host, resolve);
  });
  const { port } = server.address() as AddressInfo;
  t.teardown(close);

  return {
    url: `${tls ? 'https' : 'http'}://${host.includes(':') ? `[${host}]` : host}:${port}/hook`,
    port,
    requests,
    next() {
      const received = requests[returned];
      returned += 1;
      if (received !== undefined) return Promise.resolve(received);
      return new Promise((resolve) => waiting.push(resolve));
    },
    answerWith(...next) {
      answers = next;
    },
    connections: () => accepted,
    deserted: () =>
      sockets.size === 0 ? Promise.resolve() : new Promise((resolve) => whenDeserted.push(resolve)),
    close,
  };

  async function receive(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const received = await readWhole(request, numbers);
    if (received === undefined) return;
    const [answer, ...rest] = answers;
    if (rest.length > 0) answers = rest;
    requests.push(received);
    waiting.shift()?.(received);
    answer?.(response, received);
  }

  async function close(): Promise<void> {
    if (!server.listening) return;
    const closed = new Promise((resolve) => server.close(resolve));
    for (const socket of sockets) socket.destroy();
    await closed;
  }
}

/** Undefined if the sender went away before its end. */
async function readWhole(
  request: IncomingMessage,
  numbers: WeakMap<Socket, number>,
): Promise<Received | undefined> {
  const pieces: Buffer[] = [];
  try {
    for await (const piece of request) pieces.push(piece as Buffer);
  } catch {
    return undefined;
  }
  const { socket } = request;
  return {
    method: request.method ?? '',
    path: request.url ?? '',
    headers: request.headers,
    body: Buffer.concat(pieces),
    connection: numbers.get(socket) ?? 0,
    resumed: socket instanceof TLSSocket && socket.isSessionReused(),
  };
}

/** A file of test/fixtures/tls. */
export function tlsFixture(name: string): string {
  return readFileSync(`${import.meta.dirname}/../fixtures/tls/${name}`, 'utf8');
}

export function status(
  code: number,
  { headers = {}, body = '' }: { headers?: Record<string, string>; body?: string | Uint8Array } = {},
): Answer {
  return (response) => response.writeHead(code, headers).end(body);
}

export function redirect(location: string): Answer {
  return status(302, { headers: { Location: location } });
}

/** No answer at all. */
export function silence(): Answer {
  return () => {};
}

/** The beginning of an answer that never ends. */
export function unfinished(code: number, beginning: string): Answer {
  return (response) => response.writeHead(code).write(beginning);
}

/** A body without end. */
export function endless(code: number, text = 'x', headers: OutgoingHttpHeaders = {}): Answer {
  return (response) => {
    const piece = Buffer.alloc(1024, text);
    const pour = () => {
      while (!response.destroyed && response.write(piece));
    };
    response.writeHead(code, headers).on('drain', pour);
    pour();
  };
}

/** The connection breaks with a TCP reset. */
export function reset(): Answer {
  return (response) => response.socket?.resetAndDestroy();
}

/** The connection is closed without an answer. */
export function hangUp(): Answer {
  return (response) => response.socket?.destroy();
}

/** These bytes in place of an HTTP answer, and then the end of the connection. */
export function raw(bytes: string): Answer {
  return (response) => response.socket?.end(bytes, 'latin1');
}

/** `answer`, but not before `release` is called. */
export function held(answer: Answer): { answer: Answer; release: () => void } {
  const { promise, resolve } = Promise.withResolvers<void>();
  return {
    answer: (response, received) => void promise.then(() => answer(response, received)),
    release: resolve,
  };
}
