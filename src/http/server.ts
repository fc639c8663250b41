import {
  createServer as createPlainServer,
  type IncomingHttpHeaders,
  type IncomingMessage,
  type Server as Listener,
} from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { Socket } from 'node:net';
import { methodNotAllowed } from '@hapi/boom';
import { type Plugin, type Request, Server } from '@hapi/hapi';
import type { ListenAddress } from '../config.ts';
import { newId, type RequestId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, invalid } from '../errors.ts';
import type { Logger } from '../logger.ts';
import type { Caller } from '../store/keys.ts';
import { openFilesMax } from '../system-limits.ts';
import { acceptors } from './acceptors.ts';
import { isFromSocket, requestBodies } from './body.ts';
import { answerParserErrors, commonHeaders, errorBodies, notFound } from './errors.ts';
import { createRateLimiter, type RateLimit, rateLimiting } from './limits.ts';
import { type Certificate, tlsOptions } from './tls.ts';
import { together } from './together.ts';
import { UNTAKEN_MAX_BYTES, untakenAnswers } from './untaken.ts';
import { idempotencyKeys, routeValidation } from './validation.ts';

declare module '@hapi/hapi' {
  /** `request.app`: what a request carries from its first moment on. */
  interface RequestApplicationState {
    requestId: RequestId;
    /** Monotonic. */
    receivedAtMs: number;
    /** No body came; `payload` is null then, as it is for the body `null`. */
    bodyIsEmpty: boolean;
  }
  /** `request.auth.credentials.app` */
  interface AppCredentials extends Caller {}
  /** `request.headers`, as Node has them. */
  interface ReqRefDefaults {
    Headers: IncomingHttpHeaders;
  }
}

export interface HttpServerOptions {
  /** `server.info` has the port that it got once the server has started. */
  listen: ListenAddress;
  /** Null serves plain HTTP. */
  tls: Pick<Certificate, 'chain' | 'key'> | null;
  /** Null: there is none. */
  rateLimit: RateLimit | null;
  maxConnections?: number;
  /** How many requests, over all connections, may have come before the one ahead of them was answered. */
  behindOthersMax?: number;
  /** How much of large answers may wait for their clients, over all connections. */
  untakenMaxBytes?: number;
  /** Hears of every request that is over. */
  onAnswer?: ((request: AnsweredRequest) => void) | undefined;
  timeouts?: Partial<HttpTimeouts>;
}

export interface AnsweredRequest {
  /** The pattern, since the path itself may hold anything; null where none fits. */
  route: string | null;
  method: string;
  /** 499: the client left before there was an answer. */
  status: number;
  durationMs: number;
}

export interface HttpTimeouts {
  /** For a request's head, from its first byte or from the connection's start. */
  headersMs: number;
  /** For a whole request, its body included. */
  requestMs: number;
  /** How late both may be noticed. */
  checkMs: number;
  /** For a connection's next request. Longer than the minute for which common proxies reuse a connection. */
  keepAliveMs: number;
  /** For a connection on which nothing moves in either direction, a client that does not read for instance. */
  idleMs: number;
}

const DEFAULT_TIMEOUTS: HttpTimeouts = {
  headersMs: 10_000,
  requestMs: 20_000,
  checkMs: 500,
  keepAliveMs: 65_000,
  idleMs: 120_000,
};

const HEADERS_MAX_BYTES = 16 * 1024;

/** Each costs a file descriptor and, idle after its first request, 29 KiB (measured). */
const CONNECTIONS_MAX = 4_096;

/** Of the maximum, so many more still hear that there are too many; the rest is dropped unheard. */
const SPARE_FRACTION = 1 / 16;

/**
 * The HTTP wing, in the order in which a request meets it. `authentication` brings the default strategy,
 * `resources` the routes. Not listening yet: `await server.start()`, and `server.stop({ timeout })` in the end.
 */
export async function createHttpServer(
  options: HttpServerOptions,
  plugins: { authentication: Plugin<void>; resources: readonly Plugin<void>[] },
  effects: Effects,
  logger: Logger,
): Promise<Server> {
  const { tls, maxConnections = defaultMaxConnections(), behindOthersMax = BEHIND_OTHERS_MAX } = options;
  const { untakenMaxBytes = UNTAKEN_MAX_BYTES } = options;
  const listener = createListener(options, maxConnections);
  const server = createHapiServer(listener, options);
  answerParserErrors(listener, effects, logger);

  await server.register([
    envelope(effects, logger, options.onAnswer), // the request's id, what every response carries, and the line in the log
    errorBodies(effects, logger), // one body for every error
    ...(tls === null ? [together()] : []), // those that arrived at once go on side by side
    admission(listener, tls, maxConnections), // no more connections than we can serve
    acceptors(listener, effects, logger), // those that come at once come in at once
    pipelining(listener, behindOthersMax), // nor requests of one of them
    untakenAnswers(untakenMaxBytes, logger), // nor answers that nobody takes
    routing(), // host, path, query syntax; 404 and 405
    requestBodies(), // size, type, syntax: 413, 415, 400
    plugins.authentication, // 401
    rateLimiting(createRateLimiter(options.rateLimit, effects)), // 429
    // Then hapi itself: the route's scope (403), and what it validates (400).
    idempotencyKeys(), // 400
    ...plugins.resources,
  ]);
  return server;
}

/** Half of the files that may be open are for davit's own work: without one, not even a cancellation is carried out. */
function defaultMaxConnections(): number {
  return Math.min(CONNECTIONS_MAX, Math.floor(openFilesMax() / 2));
}

/** Node's own listener, because hapi's takes none of these options. */
function createListener({ tls, timeouts }: HttpServerOptions, maxConnections: number): Listener {
  const { headersMs, requestMs, checkMs, keepAliveMs, idleMs } = { ...DEFAULT_TIMEOUTS, ...timeouts };
  const httpOptions = {
    headersTimeout: headersMs,
    requestTimeout: requestMs,
    connectionsCheckingInterval: checkMs,
    keepAliveTimeout: keepAliveMs,
    maxHeaderSize: HEADERS_MAX_BYTES,
    // Node would answer this itself, without a body.
    requireHostHeader: false,
  };
  const listener =
    tls === null
      ? createPlainServer(httpOptions)
      : createTlsServer({ ...httpOptions, ...tlsOptions(tls), handshakeTimeout: headersMs });
  listener.timeout = idleMs;
  listener.maxConnections = Math.ceil(maxConnections * (1 + SPARE_FRACTION));
  // Any other expectation than 100-continue may be ignored (RFC 9110, 10.1.1); Node would answer a bare 417.
  listener.on('checkExpectation', (request, response) => listener.emit('request', request, response));
  return listener;
}

/** Everything that hapi would add by itself is off: what a response carries is decided here. */
function createHapiServer(listener: Listener, { listen, tls }: HttpServerOptions): Server {
  return new Server({
    listener,
    tls: tls !== null,
    address: listen.host,
    port: listen.port,
    compression: false,
    debug: false,
    routes: {
      cache: false,
      cors: false,
      security: false,
      response: { ranges: false },
      state: { parse: false, failAction: 'ignore' },
      validate: routeValidation,
    },
  });
}

function envelope(effects: Effects, logger: Logger, onAnswer: HttpServerOptions['onAnswer']): Plugin<void> {
  return {
    name: 'envelope',
    register(server) {
      server.ext('onRequest', (request, h) => {
        const requestId = newId('req', effects);
        request.app = { requestId, receivedAtMs: effects.monotonicMs(), bodyIsEmpty: false };
        // Straight onto Node's response, so that they are there however hapi comes to end it.
        for (const [name, value] of Object.entries(commonHeaders(requestId)))
          request.raw.res.setHeader(name, value);
        return h.continue;
      });
      server.events.on('response', (request) => {
        const { requestId, receivedAtMs } = request.app;
        const durationMs = effects.monotonicMs() - receivedAtMs;
        const answered = {
          method: request.method.toUpperCase(),
          route: routeOf(request),
          status: statusOf(request),
        };
        logBrokenOff(request, logger);
        logger.info(
          {
            request_id: requestId,
            key_id: request.auth.credentials?.app?.keyId ?? null,
            ...answered,
            duration_ms: Math.round(durationMs * 1000) / 1000,
          },
          'request',
        );
        onAnswer?.({ ...answered, durationMs });
      });
    },
  };
}

function routeOf({ route }: Request): string | null {
  return route.path.endsWith('*}') ? null : route.path;
}

function statusOf({ response }: Request): number {
  return 'isBoom' in response ? response.output.statusCode : response.statusCode;
}

/** What hapi puts down when the client left before there was an answer. */
const CLIENT_LEFT = 499;

/** By now an error is one of sending: the client has a part of the answer, and then the end of its connection. */
function logBrokenOff(request: Request, logger: Logger): void {
  if (!('isBoom' in request.response) || statusOf(request) === CLIENT_LEFT) return;
  logger.error(
    { request_id: request.app.requestId, route: routeOf(request), err: request.response },
    'an answer broke off',
  );
}

function admission(listener: Listener, tls: HttpServerOptions['tls'], maxConnections: number): Plugin<void> {
  let connections = 0;
  listener.on(tls === null ? 'connection' : 'secureConnection', (socket) => {
    connections++;
    socket.once('close', () => connections--);
  });
  return {
    name: 'admission',
    register(server) {
      server.ext('onRequest', (request, h) => {
        if (connections <= maxConnections) return h.continue;
        request.raw.res.setHeader('Connection', 'close');
        throw new AppError('unavailable', 'there are too many connections: try again', {
          retryAfterSeconds: 1,
        });
      });
    },
  };
}

/** Hardly any client sends a second request before it has the answer to the first. */
const UNANSWERED_MAX = 100;
/** Over all connections, so many requests may have come before the one ahead of them was answered: each takes 11 KiB. */
const BEHIND_OTHERS_MAX = 1_000;

/**
 * One read may bring 3,600 requests, all in one turn of the event loop: for 0.6 s nobody else was answered then. And
 * 4,000 connections of clients that take no answers took 4.3 GB, with 100 each. The first one beyond a maximum is
 * answered, and the connection's last; what follows on it does not reach hapi.
 */
function pipelining(listener: Listener, behindOthersMax: number): Plugin<void> {
  const unanswered = new WeakMap<Socket, number>();
  let behindOthers = 0;
  const refused = new WeakSet<IncomingMessage>();
  for (const event of ['request', 'checkContinue'] as const) {
    const listeners = listener.listeners(event);
    listener.removeAllListeners(event);
    listener.on(event, (request, response) => {
      const { socket } = request;
      const before = unanswered.get(socket) ?? 0;
      if (before > UNANSWERED_MAX) return;
      const behind = before === 0 ? 0 : 1;
      const isTooMany = behind > 0 && behindOthers >= behindOthersMax;
      const isRefused = before === UNANSWERED_MAX || isTooMany;
      if (isRefused) {
        refused.add(request);
        readNoMore(socket);
      }
      behindOthers += behind;
      unanswered.set(socket, isRefused ? Infinity : before + 1);
      response.once('close', () => {
        behindOthers -= behind;
        unanswered.set(socket, (unanswered.get(socket) ?? 1) - 1);
      });
      for (const listen of listeners) listen.call(listener, request, response);
    });
  }
  return {
    name: 'pipelining',
    register(server) {
      server.ext('onRequest', (request, h) => {
        if (!refused.has(request.raw.req)) return h.continue;
        request.raw.res.setHeader('Connection', 'close');
        throw new AppError(
          'unavailable',
          'too many requests at once on this connection: wait for their answers',
          { retryAfterSeconds: 1 },
        );
      });
    },
  };
}

/** Node reads on with each request that is over, and keeps what it read: all that a client sends while one waits. */
function readNoMore(socket: Socket): void {
  socket.on('resume', () => socket.pause());
  socket.pause();
}

/** What hapi leaves to the handler or answers in its own way: the request line, and where it leads. */
function routing(): Plugin<void> {
  return {
    name: 'routing',
    register(server) {
      server.ext('onRequest', (request, h) => {
        checkHost(request);
        checkPath(request);
        checkQuerySyntax(request);
        return h.continue;
      });
      server.route({
        method: '*',
        path: UNKNOWN_ROUTE,
        options: { auth: false },
        handler: (request) => refuseRoute(server, request),
      });
      // Before its body is looked at: hapi would take in whatever comes to get past it.
      server.ext('onPreAuth', (request, h) =>
        request.route.path === UNKNOWN_ROUTE ? refuseRoute(server, request) : h.continue,
      );
    },
  };
}

/** RFC 9112, 3.2: exactly one in HTTP/1.1. */
function checkHost({ raw: { req } }: Request): void {
  if (!isFromSocket(req)) return;
  let hosts = 0;
  for (let index = 0; index < req.rawHeaders.length; index += 2) {
    if (req.rawHeaders[index]?.toLowerCase() === 'host') hosts++;
  }
  if (hosts > 1 || (hosts === 0 && req.httpVersion === '1.1'))
    throw invalid('header', 'Host', 'must be sent once');
}

/**
 * Of a request for `foo://bar`, whose path is empty, hapi's router throws where nobody catches it: davit would end. Bad
 * encoding it would answer with 400 too, but only after taking in the whole body.
 */
function checkPath({ path }: Request): void {
  if (!path.startsWith('/')) throw invalid('path', 'path', 'must begin with /');
  if (path.includes('%') && decoded(path) === undefined)
    throw invalid('path', 'path', 'is not valid percent-encoding');
}

/** hapi replaces what is no UTF-8, and drops parameters beyond the thousandth. */
function checkQuerySyntax({ raw: { req } }: Request): void {
  const start = req.url?.indexOf('?') ?? -1;
  if (req.url === undefined || start === -1) return;
  const query = req.url.slice(start + 1);
  const text = decoded(query);
  if (text === undefined) throw invalid('query', 'query', 'is not valid percent-encoding');
  if (text.includes('\0')) throw invalid('query', 'query', 'must not contain NUL');
  if (query.split('&', QUERY_MAX_PARAMETERS + 1).length > QUERY_MAX_PARAMETERS) {
    throw invalid('query', 'query', `must have at most ${QUERY_MAX_PARAMETERS} parameters`);
  }
}

const UNKNOWN_ROUTE = '/{any*}';

const QUERY_MAX_PARAMETERS = 100;

function decoded(text: string): string | undefined {
  try {
    return decodeURIComponent(text);
  } catch {
    return undefined;
  }
}

/** 405 with what is allowed, if the path is one of ours with another method; else 404. */
function refuseRoute(server: Server, { path }: Request): never {
  const allowed = METHODS.filter((method) => leadsSomewhere(server, method, path));
  if (allowed.length === 0) throw notFound();
  throw methodNotAllowed('', null, allowed.includes('GET') ? ['GET', 'HEAD', ...allowed.slice(1)] : allowed);
}

const METHODS = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE'] as const;

function leadsSomewhere(server: Server, method: (typeof METHODS)[number], path: string): boolean {
  const route = server.match(method, path);
  return route !== null && route.path !== UNKNOWN_ROUTE;
}
