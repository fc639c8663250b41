import { writeSync } from 'node:fs';
import { type IncomingMessage, type Server as Listener, type ServerResponse, STATUS_CODES } from 'node:http';
import type { Duplex } from 'node:stream';
import { methodNotAllowed } from '@hapi/boom';
import { newId, type RequestId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, codeOf } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { interruptBody } from './body.ts';
import { commonHeaders, type ErrorResponse, toErrorResponse } from './errors.ts';

const BARE_RESPONSE_LINGER_MS = 2_000;

/**
 * Answers what never becomes a request: bytes that are not HTTP, headers that are too large, a request that does not
 * arrive in time. Node and hapi would answer with a bare status line, hapi even in place of the response to an earlier
 * request of the connection that is still being handled.
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
    else if (codeOf(error) === PLAIN_HTTP) refuseUnencrypted(socket, problem);
    else if (response !== undefined && !response.req.complete) interruptRequest(response, problem);
    // After an error, the parser reports one for each further chunk of that connection.
    else if (!refused.has(socket)) refuseAfter(response, socket, problem);
  });

  listener.on('connect', (_request: IncomingMessage, socket: Duplex) => {
    socket.on('error', () => socket.destroy());
    socket.resume();
    refuse(socket, methodNotAllowed('', null, []));
  });

  /** Refuses what comes next on the connection, once the earlier requests have been answered. */
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
    socket.end(refusal(problem));
    // Closing it at once would reset the connection of a client that is still sending, which then loses the response.
    socket.once(
      'close',
      effects.after(BARE_RESPONSE_LINGER_MS, () => socket.destroy()),
    );
  }

  /** By the descriptor, which is open until the next turn of the event loop: Node has destroyed `socket` already. */
  function refuseUnencrypted(socket: Duplex, problem: AppError): void {
    const { _handle: handle } = socket as unknown as { _handle?: { _parent?: { fd: number } } };
    try {
      writeSync(handle?._parent?.fd ?? -1, refusal(problem));
    } catch {
      // The client has closed the connection, or Node has.
    }
  }

  function refusal(problem: Error): string {
    const requestId = newId('req', effects);
    const response = toErrorResponse(problem, requestId);
    logger.info(
      { request_id: requestId, status: response.statusCode, error: response.code },
      'not a request',
    );
    return bareResponse(response, requestId, effects.now());
  }
}

/** Node's code for a TLS handshake that begins with `GET `, `HEAD `, `POST ` or `PUT `. */
const PLAIN_HTTP = 'ERR_SSL_HTTP_REQUEST';

/** The body of a request fails: that request's own response says so, if it was not sent yet. */
function interruptRequest(response: ServerResponse, problem: AppError): void {
  if (response.writableFinished) response.req.socket.destroy();
  else interruptBody(response.req, problem);
}

/** What the parser's error means to the client; undefined if the connection itself has failed. */
function parserProblem(error: Error): AppError | undefined {
  const code = codeOf(error);
  switch (code) {
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return new AppError('request_timeout', 'the request did not arrive in time: send it again');
    // Also for more than 1,000 headers, a bound of Node's own.
    case 'HPE_HEADER_OVERFLOW':
      return new AppError(
        'headers_too_large',
        'the headers and the path are too large: at most 16 KiB together, and at most 1,000 headers',
      );
    case 'HPE_CHUNK_EXTENSIONS_OVERFLOW':
      return new AppError('payload_too_large', 'the chunk extensions are too large');
    case PLAIN_HTTP:
      return new AppError('invalid_request', 'this port speaks HTTPS: use https:// in the URL, not http://');
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
