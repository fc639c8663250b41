import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Dispatcher } from 'undici';
import { parseRetryAfter } from '../deliver/retry.ts';
import { type Deployment, type Project, parseId } from '../domain.ts';
import { DURATION_MAX_MS } from '../durations.ts';
import { printable } from '../printable.ts';

/* What the answers to davit deploy say, and whether they are those of a davit. */

/** An answer that a retry would not change. */
export interface ApiRefusal {
  ok: false;
  status: number;
  /** Otherwise a proxy answered, or another program at that address. */
  isDavits: boolean;
  /** Whether the request, or an earlier try of it, may have been carried out nevertheless. */
  mayBeDone: boolean;
  /** With the request id, to find it in the service's log. */
  message: string;
}

/** Those of davit have less. */
const REFUSAL_MAX_BYTES = 16 * 1024;
/** Those of davit have less: 100 outputs of 4 KiB, six times as much in JSON at worst, and a few more fields. */
const ANSWER_MAX_BYTES = 4 * 1024 * 1024;

/** Reads an answer up to a limit, as one that is not davit's may be huge. */
export async function beginningOf(response: Dispatcher.ResponseData): Promise<string> {
  const maxBytes = isSuccess(response) ? ANSWER_MAX_BYTES : REFUSAL_MAX_BYTES;
  const pieces: Uint8Array[] = [];
  let bytes = 0;
  for await (const piece of response.body) {
    pieces.push(piece);
    bytes += piece.length;
    if (bytes > maxBytes) break;
  }
  await nextTurn(); // undici uses the connection again only then: a request right now would open another one
  return Buffer.concat(pieces).toString();
}

/** Whether the status is 2xx. */
export function isSuccess({ statusCode }: Dispatcher.ResponseData): boolean {
  return statusCode >= 200 && statusCode <= 299;
}

/** The service is away, stopping or overloaded, or a proxy before it says so; Cloudflare with 520 to 527 and 530. */
const PASSING_STATUSES = new Set([
  ...[408, 425, 429, 502, 503, 504],
  ...[520, 521, 522, 523, 524, 525, 526, 527, 530],
]);

/** Whether a retry may help. */
export function isPassing({ statusCode }: Dispatcher.ResponseData): boolean {
  return PASSING_STATUSES.has(statusCode);
}

/**
 * Those of them with which a request was surely not carried out, 503 only if davit itself says it: a proxy answers 502,
 * 503 and 504 also if the request was passed on.
 */
const NOT_DONE_STATUSES = new Set([425, 429, 503]);

/** Whether the request was surely not carried out. */
export function isSurelyNotDone({ statusCode }: Dispatcher.ResponseData, text: string): boolean {
  return NOT_DONE_STATUSES.has(statusCode) && (statusCode !== 503 || isDavits(text));
}

/** What a passing answer says, with davit's own message, if any: 429 may mean a full queue or too many requests. */
export function refusedForNow({ statusCode }: Dispatcher.ResponseData, text: string, place: string): string {
  const message = errorIn(text)?.message;
  return `${place} answers ${statusCode}${message === undefined ? '' : ` (${printable(message)})`}`;
}

/** How long to wait before the next try, in milliseconds; undefined: the answer does not say. */
export function retryAfterOf({ headers }: Dispatcher.ResponseData, nowMs: number): number | undefined {
  const [value] = [headers['retry-after']].flat();
  const waitMs = value === undefined ? undefined : parseRetryAfter(value, nowMs);
  return waitMs && Math.min(waitMs, DURATION_MAX_MS);
}

/** The refusal of a request for this path by davit, or by a proxy before it. */
export function refusalOf(response: Dispatcher.ResponseData, text: string, path: string): ApiRefusal {
  const { statusCode, headers } = response;
  const [location] = [headers.location].flat();
  if (statusCode >= 300 && statusCode <= 399) {
    return {
      ok: false,
      status: statusCode,
      isDavits: false,
      mayBeDone: false,
      message: `the service has moved (${statusCode}): ${printable(location ?? 'it does not say where')}`,
    };
  }
  const error = errorIn(text);
  if (error === undefined) return notDavit(response, path);
  const { code, message, request_id } = error;
  return {
    ok: false,
    status: statusCode,
    isDavits: true,
    mayBeDone: statusCode >= 500,
    message: printable(`${message} (${statusCode} ${code}, ${request_id})`),
  };
}

/** For an answer of a proxy, or of another program at that address. */
export function notDavit(response: Dispatcher.ResponseData, path: string): ApiRefusal {
  const { statusCode } = response;
  return {
    ok: false,
    status: statusCode,
    isDavits: false,
    // Something between may have changed the answer to what was done, or have failed after that.
    mayBeDone: isSuccess(response) || statusCode >= 500,
    message: `${path} was answered with ${statusCode}, and not by davit: is the URL right?`,
  };
}

/** Whether this is an error that davit answers with: others are of a proxy, or of another program at that address. */
export function isDavits(text: string): boolean {
  return errorIn(text) !== undefined;
}

/** Undefined: the answer is not davit's. */
function errorIn(text: string): { code: string; message: string; request_id: string } | undefined {
  const { code, message, request_id } = Object(Object(parsed(text)).error) as Record<string, unknown>;
  if (typeof code !== 'string' || typeof message !== 'string' || typeof request_id !== 'string')
    return undefined;
  return { code, message, request_id };
}

/**
 * Whether a JSON value is a deployment. Checks only the fields that are used, and not their values, which a later davit
 * may add to.
 */
export function isDeployment(value: unknown): value is Deployment {
  const told = Object(value) as Record<keyof Deployment, unknown>;
  return (
    parseId('dpl', told.id) !== undefined &&
    parseId('prj', told.project_id) !== undefined &&
    [told.ref, told.status, told.created_at].every((one) => typeof one === 'string') &&
    [told.reason, told.message, told.signal, told.superseded_by].every(
      (one) => one === null || typeof one === 'string',
    ) &&
    [told.duration_ms, told.exit_code, told.queue_position].every(
      (one) => one === null || Number.isFinite(one),
    )
  );
}

/** The same for a project. */
export function isProject(value: unknown): value is Pick<Project, 'status'> {
  return typeof Object(value).status === 'string';
}

/** Undefined: the text is no JSON, or null. */
export function parsed(text: string): unknown {
  try {
    return JSON.parse(text) ?? undefined;
  } catch {
    return undefined;
  }
}
