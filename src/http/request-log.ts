import type { Request } from '@hapi/hapi';
import { ID_SUFFIX_LENGTH } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import type { Logger } from '../logger.ts';

/** A request that is over. */
export interface AnsweredRequest {
  /** The route's pattern, as a path could hold anything; null if no route matched. */
  route: string | null;
  method: string;
  /** 499: the client disconnected before there was a response. */
  status: number;
  durationMs: number;
}

/** Logs a request that is over, however it ended, and hands it to `onAnswer`. */
export function noteAnswered(
  request: Request,
  effects: Effects,
  logger: Logger,
  onAnswer: ((request: AnsweredRequest) => void) | undefined,
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
      ...idsIn(request),
      duration_ms: Math.round(durationMs * 1000) / 1000,
    },
    'request',
  );
  onAnswer?.({ ...answered, durationMs });
}

/** What davit has made has exactly this form; anything else in a path may be a secret. */
const ID = new RegExp(`^(?:dlv|dpl|evt|prj|whk)_[0-9A-Za-z]{${ID_SUFFIX_LENGTH}}$`);

/** The ids in the path, by their names in the route: they tell what a leaked key changed. */
function idsIn({ params }: Request): Record<string, unknown> {
  // hapi leaves null for a path that it cannot decode.
  return Object.fromEntries(Object.entries(params ?? {}).filter(([, value]) => ID.test(String(value))));
}

function routeOf({ route }: Request): string | null {
  return route.path.endsWith('*}') ? null : route.path;
}

/** A response that was not sent has no status yet: an AppError that a handler threw would seem to be a 500. */
function statusOf({ response, raw: { res } }: Request): number {
  if (!res.headersSent) return CLIENT_LEFT;
  return 'isBoom' in response ? response.output.statusCode : response.statusCode;
}

/** hapi's status for a client that disconnected before there was a response. */
const CLIENT_LEFT = 499;

/**
 * An error at this point occurred while sending: the client got a part of the response, then the connection closed. Or
 * the client had left before: then a refusal is no problem, but a bug is.
 */
function logBrokenOff(request: Request, logger: Logger): void {
  const { response: error } = request;
  if (!('isBoom' in error) || error.output.statusCode === CLIENT_LEFT) return;
  if (error instanceof AppError && !request.raw.res.headersSent) return;
  logger.error(
    { request_id: request.app.requestId, route: routeOf(request), err: error },
    'a response broke off',
  );
}
