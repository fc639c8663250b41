import { type IncomingMessage, type Server as Listener, type ServerResponse, STATUS_CODES } from 'node:http';
import type { Duplex } from 'node:stream';
import { type Boom, isBoom, methodNotAllowed } from '@hapi/boom';
import type { Lifecycle, Request, ResponseToolkit } from '@hapi/hapi';
import { newId, type RequestId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, type ErrorCode, type ErrorDetail, isStorageProblem, STATUS_OF_CODE } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { interruptBody, isBodyPending, lingeringResponse } from './body.ts';

/** An answer as text, so that a handler, hapi itself and a bare socket can all send the same one. */
interface ErrorResponse {
  code: ErrorCode;
  statusCode: number;
  headers: Record<string, string>;
  body: string;
}

/**
 * The one error body, for whatever was thrown: an AppError as it is, what hapi throws in our words, and
 * anything else as an `internal_error` that says nothing of the inside.
 */
export function toErrorResponse(error: unknown, requestId: RequestId): ErrorResponse {
  const { code, message, details, headers } = refusalOf(error);
  return {
    code,
    statusCode: STATUS_OF_CODE[code],
    headers,
    body: JSON.stringify({
      error: { code, message, request_id: requestId, ...(details.length === 0 ? {} : { details }) },
    }),
  };
}

/** What every response carries, whoever wrote it. */
export function commonHeaders(requestId: RequestId): Record<string, string> {
  return { 'X-Request-Id': requestId, 'X-Content-Type-Options': 'nosniff', 'Cache-Control': 'no-store' };
}

/** For what is not there, and just the same for what this key may not see. */
export function notFound(): AppError {
  return new AppError('not_found', NOT_FOUND_MESSAGE);
}

/**
 * Answers what never becomes a request: bytes that are not HTTP, headers too large, a request that does
 * not arrive in time. Node and hapi answer these with a bare status line, hapi even in the name of an
 * earlier request of the same connection that is still being carried out.
 */
export function answerParserErrors(
  listener: Listener,
  latestResponse: (socket: Duplex) => ServerResponse | undefined,
  effects: Effects,
  logger: Logger,
): void {
  const refused = new WeakSet<Duplex>();

  listener.removeAllListeners('clientError');
  listener.on('clientError', (error, socket) => {
    const problem = parserProblem(error);
    const response = latestResponse(socket);
    if (problem === undefined) socket.destroy();
    else if (response !== undefined && !response.req.complete) interruptRequest(response, problem);
    // The parser reports every later piece of a connection that it has given up on.
    else if (!refused.has(socket)) refuseAfter(response, socket, problem);
  });

  listener.on('connect', (_request: IncomingMessage, socket: Duplex) => {
    socket.on('error', () => socket.destroy());
    socket.resume();
    refuse(socket, methodNotAllowed('', null, []));
  });

  /** What comes next on this connection is no request; the answers before it come first. */
  function refuseAfter(response: ServerResponse | undefined, socket: Duplex, problem: AppError): void {
    refused.add(socket);
    if (response === undefined || response.writableFinished) refuse(socket, problem);
    else response.once('close', () => refuse(socket, problem));
  }

  function refuse(socket: Duplex, problem: Error): void {
    if (!socket.writable) {
      socket.destroy();
      return;
    }
    const requestId = newId('req', effects);
    const response = toErrorResponse(problem, requestId);
    logger.info(
      { request_id: requestId, status: response.statusCode, error: response.code },
      'not a request',
    );
    socket.end(bareResponse(response, requestId, effects.now()));
    // Closed at once, a client that is still sending would be reset and never read its answer.
    socket.once(
      'close',
      effects.after(BARE_RESPONSE_LINGER_MS, () => socket.destroy()),
    );
  }
}

/** A request had begun and its body fails: its own answer says so, if it has none yet. */
function interruptRequest(response: ServerResponse, problem: AppError): void {
  if (response.writableFinished) response.req.socket.destroy();
  else interruptBody(response.req, problem);
}

const NOT_FOUND_MESSAGE = 'there is no such resource, or this key does not see it';

const BARE_RESPONSE_LINGER_MS = 2_000;

interface Refusal {
  code: ErrorCode;
  message: string;
  details: ErrorDetail[];
  headers: Record<string, string>;
}

function refusalOf(error: unknown): Refusal {
  if (error instanceof AppError) return ofAppError(error);
  if (isStorageProblem(error)) return UNREADABLE;
  if (isBoom(error)) return ofBoom(error);
  return BUG;
}

/** What fails of SQLite's outside the writer is a read. */
const UNREADABLE: Refusal = {
  code: 'unavailable',
  message: 'the database cannot be read at the moment: try again shortly',
  details: [],
  headers: { 'Retry-After': '5' },
};

const BUG: Refusal = {
  code: 'internal_error',
  message:
    'something went wrong inside; whoever runs this service finds more under the request id in its log',
  details: [],
  headers: {},
};

function ofAppError({ code, message, details, retryAfterSeconds }: AppError): Refusal {
  switch (code) {
    case 'internal_error':
      return BUG;
    case 'not_found':
      return { code, message: NOT_FOUND_MESSAGE, details: [], headers: {} };
    case 'unauthorized':
      return { code, message, details, headers: { 'WWW-Authenticate': 'Bearer' } };
    case 'rate_limited':
    case 'unavailable':
      return { code, message, details, headers: { 'Retry-After': String(retryAfterSeconds ?? 1) } };
    default:
      return { code, message, details, headers: {} };
  }
}

/** hapi's own errors. Their texts are written for other readers, so none of them is passed on. */
function ofBoom({ output, data }: Boom): Refusal {
  switch (output.statusCode) {
    case 400:
      return { code: 'invalid_request', message: 'the request is malformed', details: [], headers: {} };
    case 401:
      return ofAppError(new AppError('unauthorized', 'send an API key: Authorization: Bearer <API_KEY>'));
    case 403:
      return { code: 'forbidden', message: missingScope(data), details: [], headers: {} };
    case 404:
      return ofAppError(notFound());
    case 405:
      return {
        code: 'method_not_allowed',
        message: 'this method is not allowed here; the Allow header tells which are',
        details: [],
        headers: { Allow: String(output.headers['Allow'] ?? '') },
      };
    case 503:
      return ofAppError(new AppError('unavailable', 'the service is overloaded or stopping: try again'));
    default:
      return BUG;
  }
}

/** hapi leaves in `data.need` which scopes its access rule asked for. */
function missingScope(data: unknown): string {
  const need = (data as { need?: { selection?: string[]; required?: string[] }[] } | null)?.need ?? [];
  const scopes = need.flatMap(({ selection = [], required = [] }) => [...selection, ...required]);
  return scopes.length === 0
    ? 'this key may not do that'
    : `this key lacks the scope ${scopes.join(' or ')}: use a key that has it, or have one made`;
}

/**
 * What a request is answered with: whatever it ended with, if that is no answer, becomes the one error body, and what was
 * a bug is logged with its stack.
 */
export function present(
  request: Request,
  h: ResponseToolkit,
  effects: Effects,
  logger: Logger,
): Lifecycle.ReturnValue {
  const { response } = request;
  if ('isBoom' in response) return presentError(response, request, h, effects, logger);
  // Made into text here, because what JSON.stringify throws later hapi would answer in its own shape.
  if (response.variety === 'plain' && typeof response.source === 'object' && response.source !== null) {
    try {
      Object.assign(response, { source: JSON.stringify(response.source) });
      response.type('application/json');
    } catch (error) {
      return presentError(error, request, h, effects, logger);
    }
  }
  return h.continue;
}

function presentError(
  error: unknown,
  request: Request,
  h: ResponseToolkit,
  effects: Effects,
  logger: Logger,
): Lifecycle.ReturnValue {
  const { requestId } = request.app;
  const { code, statusCode, headers, body } = toErrorResponse(error, requestId);
  if (code === 'internal_error') {
    logger.error({ request_id: requestId, route: request.route.path, err: error }, 'bug');
  } else if (code === 'unavailable') {
    logger.warn({ request_id: requestId, route: request.route.path, err: error }, 'unavailable');
  }
  // A body that nobody read may still be on its way: the connection must outlive it for the answer to arrive,
  // and ends then, however much of it had come by now.
  const isPending = isBodyPending(request);
  const source = isPending ? lingeringResponse(body, request, effects) : body;
  const response = h
    .response(source)
    .code(statusCode)
    .type('application/json')
    .bytes(Buffer.byteLength(body));
  if (isPending) response.header('Connection', 'close');
  for (const [name, value] of Object.entries(headers)) response.header(name, value);
  return response;
}

/** What the parser's error means to the client; undefined when there is nobody left to tell. */
function parserProblem(error: Error & { code?: string }): AppError | undefined {
  const code = error.code ?? '';
  switch (code) {
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return new AppError('request_timeout', 'the request did not arrive in time: send it again');
    case 'HPE_HEADER_OVERFLOW':
      return new AppError(
        'headers_too_large',
        'the headers and the path are too large: at most 16 KiB together',
      );
    case 'HPE_CHUNK_EXTENSIONS_OVERFLOW':
      return new AppError('payload_too_large', 'the chunk extensions are too large');
    default:
      return code.startsWith('HPE_')
        ? new AppError('invalid_request', 'this is not a valid HTTP/1.1 request')
        : undefined;
  }
}

function bareResponse(
  { statusCode, headers, body }: ErrorResponse,
  requestId: RequestId,
  nowMs: number,
): string {
  const lines = Object.entries({
    Date: new Date(nowMs).toUTCString(),
    ...commonHeaders(requestId),
    ...headers,
    'Content-Type': 'application/json; charset=utf-8',
    'Content-Length': Buffer.byteLength(body),
    Connection: 'close',
  }).map(([name, value]) => `${name}: ${value}\r\n`);
  return `HTTP/1.1 ${statusCode} ${STATUS_CODES[statusCode] ?? ''}\r\n${lines.join('')}\r\n${body}`;
}
