import {
  createServer as createPlainServer,
  type IncomingHttpHeaders,
  type Server as Listener,
} from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import { type Plugin, type Request, Server } from '@hapi/hapi';
import type { ListenAddress } from '../config.ts';
import { newId, type RequestId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import type { Caller } from '../store/keys.ts';
import { openFilesMax } from '../system-limits.ts';
import { acceptors } from './acceptors.ts';
import { type Admission, type AdmissionOptions, createAdmission } from './admission.ts';
import { callerOf } from './auth.ts';
import { takeBody } from './body.ts';
import { answerParserErrors, commonHeaders, present } from './errors.ts';
import { applyRateDecision, createRateLimiter, type RateLimit } from './limits.ts';
import { checkHead, unknownRoutes } from './routing.ts';
import { type Certificate, tlsOptions } from './tls.ts';
import { createGathering } from './together.ts';
import { createUntakenAnswers } from './untaken.ts';
import { checkIdempotencyKey, routeValidation } from './validation.ts';

declare module '@hapi/hapi' {
  /** `request.app`: what a request carries from its first moment on. */
  interface RequestApplicationState {
    requestId: RequestId;
    /** Monotonic. */
    receivedAtMs: number;
  }
  /** `request.auth.credentials.app` */
  interface AppCredentials extends Caller {}
  /** `request.headers`, as Node has them. */
  interface ReqRefDefaults {
    Headers: IncomingHttpHeaders;
  }
}

export interface HttpServerOptions extends Pick<AdmissionOptions, 'behindOthersMax'> {
  /** `server.info` has the port that it got once the server has started. */
  listen: ListenAddress;
  /** Null serves plain HTTP. */
  tls: Pick<Certificate, 'chain' | 'key'> | null;
  /** Null: there is none. */
  rateLimit: RateLimit | null;
  maxConnections?: number;
  /** How much of large answers may wait for their clients, over all connections. */
  untakenMaxBytes?: number;
  /** Hears of every request that is over. */
  onAnswer?: ((request: AnsweredRequest) => void) | undefined;
  /** Aborted once davit stops: each connection ends with its next answer. */
  stopping?: AbortSignal | undefined;
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

interface HttpTimeouts {
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

export const IDLE_MS = 120_000;

const DEFAULT_TIMEOUTS: HttpTimeouts = {
  headersMs: 10_000,
  requestMs: 20_000,
  checkMs: 500,
  keepAliveMs: 65_000,
  idleMs: IDLE_MS,
};

const HEADERS_MAX_BYTES = 16 * 1024;

/** Each costs a file descriptor and, idle after its first request, 24 KiB (measured). */
const CONNECTIONS_MAX = 4_096;

/** Of the maximum, so many more still hear that there are too many; the rest is dropped unheard. */
const SPARE_FRACTION = 1 / 16;

/**
 * The HTTP wing. `authentication` brings the default strategy, `resources` the routes. Not listening yet:
 * `await server.start()`, and `server.stop({ timeout })` in the end.
 */
export async function createHttpServer(
  options: HttpServerOptions,
  plugins: { authentication: Plugin<void>; resources: readonly Plugin<void>[] },
  effects: Effects,
  logger: Logger,
): Promise<Server> {
  const { tls, maxConnections = defaultMaxConnections(), behindOthersMax } = options;
  const listener = createListener(options, maxConnections);
  const server = createHapiServer(listener, options);
  const admission = createAdmission(listener, { tls: tls !== null, maxConnections, behindOthersMax });
  answerParserErrors(listener, admission.latestResponse, effects, logger);
  addSteps(server, admission, options, effects, logger);
  await server.register([
    acceptors(listener, options.listen, effects, logger),
    plugins.authentication,
    ...plugins.resources,
  ]);
  return server;
}

/**
 * What a request meets, in this order. All that is to be done at a point is one extension of hapi's: with one for each
 * step, seven more, the event loop's thread took 80 µs in place of 76 for each deployment that was created.
 */
function addSteps(
  server: Server,
  admission: Admission,
  { tls, rateLimit, untakenMaxBytes, onAnswer, stopping }: HttpServerOptions,
  effects: Effects,
  logger: Logger,
): void {
  const gather = tls === null ? createGathering() : undefined;
  const refuseUnknown = unknownRoutes(server);
  const rateLimiter = createRateLimiter(rateLimit, effects);
  const holdUntaken = createUntakenAnswers(logger, untakenMaxBytes);

  server.ext('onRequest', async (request, h) => {
    begin(request, effects); // its id, and what every response carries
    // What came in one piece behind a request to upgrade Node reads past: nobody may wait for its answer.
    const isLast = stopping?.aborted === true || request.headers['upgrade'] !== undefined;
    if (isLast) request.raw.res.setHeader('Connection', 'close');
    if (gather !== undefined) await gather(); // those that arrived at once go on side by side
    admission.admit(request); // 503
    checkHead(request); // headers that are sent once, path, query syntax: 400
    return h.continue;
  });
  server.ext('onPreAuth', async (request, h) => {
    refuseUnknown(request); // 404 and 405
    await takeBody(request); // size, type, syntax: 413, 415, 400
    return h.continue;
  });
  // Then `authentication`: 401.
  server.ext('onCredentials', (request, h) => {
    applyRateDecision(rateLimiter.take(callerOf(request).keyId), request); // 429
    return h.continue;
  });
  // Then hapi itself: the route's scope, 403, and what it validates, 400.
  server.ext('onPreHandler', (request, h) => {
    checkIdempotencyKey(request); // 400
    return h.continue;
  });
  server.ext('onPreResponse', (request, h) => {
    const answer = present(request, h, effects, logger); // text, and one body for every error
    holdUntaken(request);
    return answer;
  });
  server.events.on('response', (request) => noteAnswered(request, effects, logger, onAnswer));
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
function createHapiServer(listener: Listener, { tls }: HttpServerOptions): Server {
  return new Server({
    listener,
    tls: tls !== null,
    autoListen: false, // acceptors.ts
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

function begin(request: Request, effects: Effects): void {
  const requestId = newId('req', effects);
  request.app = { requestId, receivedAtMs: effects.monotonicMs() };
  // Straight onto Node's response, so that they are there however hapi comes to end it.
  for (const [name, value] of Object.entries(commonHeaders(requestId)))
    request.raw.res.setHeader(name, value);
}

/** For a request that is over, however it ended. */
function noteAnswered(
  request: Request,
  effects: Effects,
  logger: Logger,
  onAnswer: HttpServerOptions['onAnswer'],
): void {
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
