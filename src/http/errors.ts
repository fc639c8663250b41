import { type Boom, isBoom } from '@hapi/boom';
import type { Lifecycle, Request, ResponseToolkit } from '@hapi/hapi';
import type { RequestId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import {
  AppError,
  type ErrorCode,
  type ErrorDetail,
  isStorageProblem,
  STATUS_OF_CODE,
  unreadable,
} from '../errors.ts';
import type { Logger } from '../logger.ts';
import { isBodyPending } from './body.ts';
import { lingeringResponse } from './lingering.ts';

/** An error response as plain data, so that hapi and a bare socket can send the same one. */
export interface ErrorResponse {
  code: ErrorCode;
  statusCode: number;
  headers: Record<string, string>;
  body: string;
}

/**
 * The response to whatever was thrown, always with the same error body: an AppError as it is, hapi's own errors with our
 * messages, and anything else as an `internal_error` that reveals nothing about it.
 */
export function toErrorResponse(error: unknown, requestId: RequestId): ErrorResponse {
  const { code, message, details = [], headers = {} } = refusalOf(error);
  return {
    code,
    statusCode: STATUS_OF_CODE[code],
    headers,
    body: JSON.stringify({
      error: { code, message, request_id: requestId, ...(details.length === 0 ? {} : { details }) },
    }),
  };
}

/** The headers of every response, whether hapi or a bare socket sends it. */
export function commonHeaders(requestId: RequestId): Record<string, string> {
  return { 'X-Request-Id': requestId, 'X-Content-Type-Options': 'nosniff', 'Cache-Control': 'no-store' };
}

/** For what does not exist and, indistinguishably, for what the key may not see. */
export function notFound(): AppError {
  return new AppError('not_found', NOT_FOUND.message);
}

interface Refusal {
  code: ErrorCode;
  message: string;
  details?: ErrorDetail[];
  headers?: Record<string, string>;
}

function refusalOf(error: unknown): Refusal {
  if (error instanceof AppError) return ofAppError(error);
  if (isStorageProblem(error)) return ofAppError(unreadable()); // the writer's own are AppErrors: a read failed
  if (isBoom(error)) return ofBoom(error);
  return BUG;
}

const NOT_FOUND: Refusal = {
  code: 'not_found',
  message: 'there is no such resource, or this key does not see it; /docs describes those that there are',
};

const BUG: Refusal = {
  code: 'internal_error',
  message: 'something went wrong inside the service; its log tells more under the id of this request',
};

function ofAppError({ code, message, details, retryAfterSeconds }: AppError): Refusal {
  switch (code) {
    case 'internal_error':
      return BUG;
    case 'not_found':
      return NOT_FOUND;
    case 'unauthorized':
      return { code, message, details, headers: { 'WWW-Authenticate': 'Bearer' } };
    case 'rate_limited':
    case 'unavailable':
      return { code, message, details, headers: { 'Retry-After': String(retryAfterSeconds ?? 1) } };
    default:
      return { code, message, details };
  }
}

/** hapi's own errors. Their messages are not written for clients of this API, so none is passed on. */
function ofBoom({ output, data }: Boom): Refusal {
  switch (output.statusCode) {
    case 400:
      return { code: 'invalid_request', message: 'the request is malformed' };
    case 403:
      return { code: 'forbidden', message: missingScope(data) };
    case 404:
      return NOT_FOUND;
    case 405:
      return {
        code: 'method_not_allowed',
        message: 'this method is not allowed here: the Allow header lists those that are',
        headers: { Allow: String(output.headers['Allow'] ?? '') },
      };
    default:
      return BUG;
  }
}

/** hapi lists in `data.need` the scopes that the route requires. */
function missingScope(data: unknown): string {
  const need = (data as { need?: { selection?: string[]; required?: string[] }[] } | null)?.need ?? [];
  const scopes = need.flatMap(({ selection = [], required = [] }) => [...selection, ...required]);
  return scopes.length === 0
    ? 'this key may not do that'
    : `this key lacks the scope ${scopes.join(' or ')}: use a key that has it, or ask for one`;
}

/**
 * Makes the final response of a request: serialises what its handler returned, and gives whatever was thrown the common
 * error body. Logs bugs with their stack.
 */
export function finishResponse(
  request: Request,
  h: ResponseToolkit,
  effects: Effects,
  logger: Logger,
): Lifecycle.ReturnValue {
  const { response } = request;
  if ('isBoom' in response) return respondWithError(response, request, h, effects, logger);
  // Serialised here: if JSON.stringify threw later, hapi would answer with an error body of its own.
  if (response.variety === 'plain' && typeof response.source === 'object' && response.source !== null) {
    try {
      Object.assign(response, { source: JSON.stringify(response.source) });
      response.type('application/json');
    } catch (error) {
      return respondWithError(error, request, h, effects, logger);
    }
  }
  return h.continue;
}

function respondWithError(
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
    // What davit itself decided says all in its message: where it did so tells nothing.
    const isDecision = error instanceof AppError && error.cause === undefined;
    const why = isDecision ? { reason: error.message } : { err: error };
    logger.warn({ request_id: requestId, route: request.route.path, ...why }, 'unavailable');
  }
  // The rest of an unread body may still be arriving: unless it is drained first, closing the connection would keep the
  // response from the client. It is closed in any case, even if all of the body has arrived by then.
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
