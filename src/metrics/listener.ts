import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { cannotListen, type ListenAddress } from '../config.ts';
import type { Logger } from '../logger.ts';
import { dropBody, dropRequests, giveUpReading } from '../unread.ts';
import { CONTENT_TYPE } from './exposition.ts';

interface MetricsListener {
  /** The actual one, also for port 0. */
  port: number;
  /** Closes every connection, also those that wait for an answer. */
  close(): Promise<void>;
}

/** Each Prometheus keeps one open. For one beyond these an idle one is closed; if none is idle, it is closed itself. */
const MAX_CONNECTIONS = 32;
/** Per connection. One read may bring 2,000 pipelined scrapes, and answering them all took 0.5 s. */
const MAX_REQUESTS = 100;
const HEADERS_MAX_BYTES = 8 * 1024;

/** Options of Node's server, in milliseconds. */
const TIMEOUTS = {
  headersTimeout: 5_000,
  requestTimeout: 10_000,
  connectionsCheckingInterval: 1_000,
  /** Until the next scrape, which usually comes every minute. */
  keepAliveTimeout: 65_000,
};

/** For a client that does not read its answer. */
const IDLE_TIMEOUT_MS = 30_000;

/**
 * Answers `GET /metrics`, and nothing else, with what `scrape` resolves to, without authentication. Throws AppError
 * `unavailable` if it cannot listen there.
 */
export async function startMetricsListener(
  listen: ListenAddress,
  scrape: () => Promise<string>,
  logger: Logger,
  timeouts: Partial<typeof TIMEOUTS> = {},
): Promise<MetricsListener> {
  /** Those whose requests have all been answered, and sent; first the one that has been idle for longest. */
  const idle = new Set<Socket>();
  const server = createServer(
    { ...TIMEOUTS, ...timeouts, maxHeaderSize: HEADERS_MAX_BYTES },
    (request, response) => {
      dropBody(request);
      endAfterLast(request, response);
      noteIdle(idle, request, response);
      void answer(request, response, scrape, logger);
    },
  );
  Object.assign(server, { httpAllowHalfOpen: true }); // see http/server.ts
  server.timeout = IDLE_TIMEOUT_MS;
  // Others that are idle would keep a Prometheus out for as long as connections are kept alive. Node's own function for
  // these also cuts off an answer that is still being sent.
  server.on('connection', (socket) => {
    socket.once('close', () => idle.delete(socket));
    server.getConnections((_error, count) => {
      if (count <= MAX_CONNECTIONS) return;
      const [longestIdle = socket] = idle;
      longestIdle.destroy();
    });
  });
  await new Promise<void>((resolve, reject) => {
    server.once('error', (error) => reject(cannotListen(listen, '--metrics-listen', error)));
    server.listen(listen.port, listen.host, resolve);
  });
  // For instance, a connection cannot be accepted for want of file descriptors.
  server.on('error', (error) =>
    logger.warn({ err: error }, 'the listener for metrics failed, and tries again'),
  );
  return {
    port: (server.address() as AddressInfo).port,
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        server.closeAllConnections();
      }),
  };
}

/** Closes the connection after the answer to the last request that it may bring. What comes behind it is ignored. */
function endAfterLast({ socket }: IncomingMessage, response: ServerResponse): void {
  const count = (requests.get(socket) ?? 0) + 1;
  requests.set(socket, count);
  if (count < MAX_REQUESTS) return;
  response.setHeader('Connection', 'close');
  dropRequests(socket);
  giveUpReading(socket);
}

/** How many a connection has brought. */
const requests = new WeakMap<Socket, number>();

/** Answers are sent in order: a connection is idle after the one to its latest request. */
function noteIdle(idle: Set<Socket>, { socket }: IncomingMessage, response: ServerResponse): void {
  const count = requests.get(socket);
  idle.delete(socket);
  response.once('close', () => {
    if (requests.get(socket) === count && !socket.destroyed) idle.add(socket);
  });
}

async function answer(
  request: IncomingMessage,
  response: ServerResponse,
  scrape: () => Promise<string>,
  logger: Logger,
): Promise<void> {
  response.setHeader('X-Content-Type-Options', 'nosniff');
  response.setHeader('Cache-Control', 'no-store');
  const [path] = (request.url ?? '').split('?', 1);
  if (path !== '/metrics') return refuse(response, 404, 'the metrics are at /metrics');
  switch (request.method) {
    case 'HEAD':
      response.writeHead(200, { 'Content-Type': CONTENT_TYPE }).end();
      return;
    case 'GET':
      break;
    default:
      return refuse(response.setHeader('Allow', 'GET, HEAD'), 405, 'the metrics are read with GET');
  }
  try {
    const text = await scrape();
    response.writeHead(200, { 'Content-Type': CONTENT_TYPE, 'Content-Length': Buffer.byteLength(text) });
    response.end(text);
  } catch (error) {
    if (response.destroyed) return;
    logger.error({ err: error }, 'the metrics could not be read');
    refuse(response, 500, 'the metrics could not be read: see the log');
  }
}

/** Closes the connection after the answer, so that the rest of the request is not read. */
function refuse(response: ServerResponse, statusCode: number, message: string): void {
  response.writeHead(statusCode, { 'Content-Type': 'text/plain; charset=utf-8', Connection: 'close' });
  response.end(`${message}\n`);
}
