import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import type { Plugin, Server } from '@hapi/hapi';
import type { Test } from 'tap';
import type { Cidr } from '../../src/address.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { authentication } from '../../src/http/auth.ts';
import { describeApi } from '../../src/http/openapi.ts';
import { createHttpServer, type HttpServerOptions } from '../../src/http/server.ts';
import { type Contract, createContract, fetchUnder, type RequestOptions } from './contract.ts';
import { keptLog } from './kept-log.ts';
import { type TestStore, testStore } from './store.ts';

export interface RunningHttp {
  server: Server;
  port: number;
  store: TestStore;
  /** What the service logged, one object for each line. */
  log: Record<string, unknown>[];
}

export interface HttpTestOptions extends Partial<HttpServerOptions> {
  effects?: Effects;
  store?: TestStore;
  resources?: (store: TestStore) => Plugin<void>[];
  trustedProxies?: Cidr[];
}

/**
 * Limits of `startHttp` that are longer than a test may take: for tests with a fake clock, as Node's own timeouts go by
 * the real one, and for tests that must not pass by waiting for a limit.
 */
export const PATIENT = { headersMs: 600_000, requestMs: 600_000 };

/** The real HTTP wing on a real file and a socket of its own, stopped when the test ends. */
export async function startHttp(t: Test, options: HttpTestOptions = {}): Promise<RunningHttp> {
  const { effects = realEffects, resources = () => [], trustedProxies = [], ...httpOptions } = options;
  const store = options.store ?? testStore(t, effects);
  const { logger, lines: log } = keptLog({ level: 'debug' });
  const server = await createHttpServer(
    { listen: { host: '127.0.0.1', port: 0 }, tls: null, rateLimit: null, ...httpOptions },
    {
      authentication: authentication(store, trustedProxies, effects, logger),
      resources: resources(store),
    },
    effects,
    logger,
  );
  await server.start();
  const port = Number(server.info.port);
  contracts.set(port, () => createContract(describeApi(server)));
  t.teardown(() => server.stop({ timeout: 0 }));
  return { server, port, store, log };
}

/** Its one route, GET /held, answers once it is told to. */
export function heldResource() {
  const { promise: released, resolve: release } = Promise.withResolvers<void>();
  let heldCount = 0;
  const plugin: Plugin<void> = {
    name: 'held',
    register(server) {
      server.route({
        method: 'GET',
        path: '/held',
        options: { auth: false },
        async handler() {
          heldCount += 1;
          await released;
          return { held: true };
        },
      });
    },
  };
  return { plugin, release, heldCount: () => heldCount };
}

export interface JsonResponse {
  status: number;
  headers: Headers;
  // A test says by its assertions what it expects.
  body: unknown;
}

/** What the server on each port promises; made when the first of its answers is held against it. */
const contracts = new Map<number, () => Contract>();

function contractOf(port: number): Contract | undefined {
  const contract = contracts.get(port)?.();
  if (contract !== undefined) contracts.set(port, () => contract);
  return contract;
}

/** One request. Throws if the answer is not what the server's own description says. */
export async function requestJson(
  port: number,
  method: string,
  path: string,
  options?: RequestOptions,
): Promise<JsonResponse> {
  const url = `http://127.0.0.1:${port}`;
  const { text, ...answer } = await fetchUnder(() => contractOf(port), url, method, path, options);
  return { ...answer, body: text === '' ? null : JSON.parse(text) };
}

/** The same with a key. */
export async function call(
  port: number,
  method: string,
  path: string,
  key: string,
  body?: unknown,
  idempotencyKey?: string,
): Promise<JsonResponse> {
  return await requestJson(port, method, path, {
    key,
    ...(body === undefined ? {} : { body }),
    ...(idempotencyKey === undefined ? {} : { headers: { 'idempotency-key': idempotencyKey } }),
  });
}

/** What its client is told, but for the id of the request: the same text for answers that must not differ. */
export function toldBy({ status, body }: JsonResponse): string {
  return `${status} ${JSON.stringify(body).replace(/req_\w+/, '')}`;
}

/** Sends `bytes` as they are and gives all that comes back until the server closes. Rejects on a reset. */
export async function rawRequest(port: number, bytes: string | Uint8Array): Promise<string> {
  const connection = await connectRaw(port);
  connection.send(bytes);
  return connection.closed;
}

export interface RawConnection {
  socket: Socket;
  send(bytes: string | Uint8Array): void;
  /** All that was received, once `text` is in it. Rejects when the connection closes before. */
  received(text: string): Promise<string>;
  /** All that was received, once the server has closed. Rejects on a reset. */
  closed: Promise<string>;
}

export function connectRaw(port: number): Promise<RawConnection> {
  return followRaw(connect({ port, host: '127.0.0.1' }));
}

/** The same of a socket that connects. */
export async function followRaw(socket: Socket): Promise<RawConnection> {
  let all = '';
  socket.setEncoding('latin1').on('data', (text: string) => {
    all += text;
  });
  const closed = new Promise<string>((resolve, reject) => {
    socket.once('error', reject).once('close', () => resolve(all));
  });
  closed.catch(() => {});
  await Promise.race([once(socket, 'connect'), closed]);
  return {
    socket,
    closed,
    send: (bytes) => void socket.write(bytes),
    received: (text) =>
      new Promise((resolve, reject) => {
        const look = (): void => {
          if (!all.includes(text)) return;
          socket.off('data', look);
          resolve(all);
        };
        socket.on('data', look);
        closed.then(() => reject(new Error(`closed after: ${all}`)), reject);
        look();
      }),
  };
}

export interface RawResponse {
  status: number;
  headers: Record<string, string>;
  body: string;
}

/** The responses in what a connection received, in order. Each must say its length, as all of ours do. */
export function parseResponses(text: string): RawResponse[] {
  const responses: RawResponse[] = [];
  let rest = text;
  while (rest !== '') {
    const end = rest.indexOf('\r\n\r\n');
    if (end === -1) throw new Error(`not a response: ${rest}`);
    const [statusLine = '', ...lines] = rest.slice(0, end).split('\r\n');
    const headers = Object.fromEntries(
      lines.map((line) => [
        line.slice(0, line.indexOf(':')).toLowerCase(),
        line.slice(line.indexOf(':') + 1).trim(),
      ]),
    );
    const length = Number(headers['content-length'] ?? 0);
    const status = Number(/^HTTP\/1\.1 (\d{3}) /.exec(statusLine)?.[1]);
    responses.push({ status, headers, body: rest.slice(end + 4, end + 4 + length) });
    rest = rest.slice(end + 4 + length);
  }
  return responses;
}
