import {
  createServer as createPlainServer,
  type IncomingHttpHeaders,
  type Server as Listener,
  type ServerResponse,
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
import { type Admission, createAdmission } from './admission.ts';
import { callerOf } from './auth.ts';
import { createBatching } from './batching.ts';
import { parseBody } from './body.ts';
import { createConnectionPlaces, placesFor } from './connection-places.ts';
import { commonHeaders, finishResponse } from './errors.ts';
import { answerParserErrors } from './parser-errors.ts';
import { applyRateDecision, createRateLimiter, type RateLimit } from './rate-limits.ts';
import { createReceiveBuffers } from './receive-buffers.ts';
import { type AnsweredRequest, noteAnswered } from './request-log.ts';
import { checkHead, registerCatchAll } from './routing.ts';
import { createSendBufferLimit } from './send-buffers.ts';
import { type Certificate, tlsOptions } from './tls.ts';
import { limitHandshakes, limitRekeying, parseAllOfRead } from './tls-connections.ts';
import { checkIdempotencyKey, validateInput } from './validation.ts';

declare module '@hapi/hapi' {
  /** `request.app`: set as soon as a request arrives. */
  interface RequestApplicationState {
    requestId: RequestId;
    /** On the monotonic clock. */
    receivedAtMs: number;
  }
  /** `request.auth.credentials.app` */
  interface AppCredentials extends Caller {}
  /** `request.headers`, typed as Node types them. */
  interface ReqRefDefaults {
    Headers: IncomingHttpHeaders;
  }
}

export interface HttpServerOptions {
  /** With port 0, `server.info` has the actual port once the server has started. */
  listen: ListenAddress;
  /** Null serves plain HTTP. */
  tls: Pick<Certificate, 'chain' | 'key'> | null;
  /** Null: unlimited. */
  rateLimit: RateLimit | null;
  /** How many connections may have requests under way, or be idle. */
  maxConnections?: number;
  /** How many pipelined requests, those sent before the previous one was answered, there may be over all connections. */
  pipelinedMax?: number | undefined;
  /** How many bytes bodies may have that are not complete, over all connections. */
  receiveBufferMaxBytes?: number;
  /** How many bytes of large responses may wait for their clients to read them, over all connections. */
  sendBufferMaxBytes?: number;
  /** Called when a request is over, however it ended. */
  onAnswer?: ((request: AnsweredRequest) => void) | undefined;
  /** Aborted once davit stops: each connection is closed after its next response. */
  stopping?: AbortSignal | undefined;
  timeouts?: Partial<HttpTimeouts>;
}

interface HttpTimeouts {
  /** For the head of a request, from its first byte or, for the first request, from the start of the connection. */
  headersMs: number;
  /** For a whole request, body included. */
  requestMs: number;
  /** How often Node checks both, so also how late it may notice. */
  checkMs: number;
  /** Until the next request on a keep-alive connection. Longer than the minute for which common proxies reuse one. */
  keepAliveMs: number;
  /** For a connection without traffic in either direction, for instance because the client does not read. */
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

/**
 * Creates the HTTP server without listening: call `server.start()`, and `server.stop({ timeout })` at the end.
 * `authentication` registers the default auth strategy, `resources` the routes.
 */
export async function createHttpServer(
  options: HttpServerOptions,
  plugins: { authentication: Plugin<void>; resources: readonly Plugin<void>[] },
  effects: Effects,
  logger: Logger,
): Promise<Server> {
  const { maxConnections = placesFor(openFilesMax()), pipelinedMax } = options;
  const listener = createListener(options);
  if (options.tls !== null) limitHandshakes(listener, effects);
  const server = createHapiServer(listener, options);
  const places = createConnectionPlaces(listener, maxConnections, effects, logger);
  const admission = createAdmission(listener, places, pipelinedMax);
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
 * The steps that a request passes through, in order. Each point of hapi's lifecycle has one extension that does all the
 * steps there: with an extension per step, seven more, creating a deployment took 80 µs on the main thread, not 76.
 */
function addSteps(
  server: Server,
  admission: Admission,
  { tls, rateLimit, receiveBufferMaxBytes, sendBufferMaxBytes, onAnswer, stopping }: HttpServerOptions,
  effects: Effects,
  logger: Logger,
): void {
  const joinBatch = tls === null ? createBatching() : undefined;
  const refuseUnknown = registerCatchAll(server);
  const rateLimiter = createRateLimiter(rateLimit, effects);
  const receiveBuffers = createReceiveBuffers(receiveBufferMaxBytes);
  const limitSendBuffer = createSendBufferLimit(effects, logger, sendBufferMaxBytes);

  server.ext('onRequest', async (request, h) => {
    beginRequest(request, effects); // request id and common response headers
    // Node discards what arrived in one read behind a request with Upgrade: no client may wait for its response.
    if (request.headers['upgrade'] !== undefined) request.raw.res.setHeader('Connection', 'close');
    if (joinBatch !== undefined) await joinBatch();
    admission.admit(request); // 503
    checkHead(request); // repeated headers, path, query syntax: 400
    return h.continue;
  });
  server.ext('onPreAuth', async (request, h) => {
    refuseUnknown(request); // 404 and 405
    await parseBody(request, receiveBuffers); // size, type, syntax: 413, 415, 400; 503
    return h.continue;
  });
  // Then `authentication`: 401.
  server.ext('onCredentials', (request, h) => {
    admission.welcome(request);
    applyRateDecision(rateLimiter.take(callerOf(request).keyId), request); // 429
    return h.continue;
  });
  // Then hapi itself: the route's scope, 403.
  server.ext('onPreHandler', (request, h) => {
    validateInput(request); // 400
    checkIdempotencyKey(request); // 400
    return h.continue;
  });
  server.ext('onPreResponse', (request, h) => {
    const answer = finishResponse(request, h, effects, logger); // serialises, and gives every error the same body
    limitSendBuffer(request);
    if (stopping?.aborted === true) admission.closeAfter(request);
    return answer;
  });
  server.events.on('response', (request) => noteAnswered(request, effects, logger, onAnswer));
}

/** Created here because hapi passes none of these options on to the listener that it would create. */
function createListener({ tls, timeouts }: HttpServerOptions): Listener {
  const { headersMs, requestMs, checkMs, keepAliveMs, idleMs } = { ...DEFAULT_TIMEOUTS, ...timeouts };
  const httpOptions = {
    headersTimeout: headersMs,
    requestTimeout: requestMs,
    connectionsCheckingInterval: checkMs,
    keepAliveTimeout: keepAliveMs,
    maxHeaderSize: HEADERS_MAX_BYTES,
    // Otherwise Node itself answers a missing Host, without a body. See checkHead.
    requireHostHeader: false,
  };
  const listener =
    tls === null
      ? Object.assign(createPlainServer(httpOptions), ANSWERS_HALF_CLOSED)
      : createTlsServer({ ...httpOptions, ...tlsOptions(tls), handshakeTimeout: headersMs });
  listener.timeout = idleMs;
  listener.on('secureConnection', limitRekeying);
  listener.on('secureConnection', parseAllOfRead);
  // Any other expectation than 100-continue may be ignored (RFC 9110, 10.1.1); Node would answer a bare 417.
  listener.on('checkExpectation', (request, response) => listener.emit('request', request, response));
  return listener;
}

/**
 * Not documented by Node: a client that has ended its side, as `nc -N` does, still gets its answers. Not over TLS, where
 * a connection ends with either side, see acceptors.ts. What waits for long must end then, see watches.ts.
 */
const ANSWERS_HALF_CLOSED = { httpAllowHalfOpen: true };

/** Everything that hapi would add to a response on its own is switched off. */
function createHapiServer(listener: Listener, { tls }: HttpServerOptions): Server {
  const server = new Server({
    listener,
    tls: tls !== null,
    autoListen: false, // acceptors.ts listens
    compression: false,
    debug: false,
    routes: {
      cache: false,
      cors: false,
      security: false,
      response: { ranges: false },
      state: { parse: false, failAction: 'ignore' },
    },
  });
  sendBodiesAtOnce(server);
  return server;
}

/**
 * hapi writes a body and then ends the response, which Node hands to the kernel as two pieces, in a slower call. Ended
 * with the body, it is one: creating a deployment takes 73.1 µs in this thread, not 74.5. These are internals of hapi.
 */
function sendBodiesAtOnce(server: Server): void {
  const { Payload } = (server as unknown as HapiInternals)._core.Response;
  Payload.prototype.writeToStream = function (response) {
    response.end(this._data, this._encoding);
  };
}

interface HapiInternals {
  _core: { Response: { Payload: { prototype: HapiPayload } } };
}

interface HapiPayload {
  _data: string | Buffer | null;
  _encoding: BufferEncoding;
  writeToStream(response: ServerResponse): void;
}

function beginRequest(request: Request, effects: Effects): void {
  const requestId = newId('req', effects);
  request.app = { requestId, receivedAtMs: effects.monotonicMs() };
  // Set on Node's response rather than hapi's, so that they are sent whichever way hapi ends it.
  for (const [name, value] of Object.entries(commonHeaders(requestId)))
    request.raw.res.setHeader(name, value);
}
