import { once } from 'node:events';
import { getCACertificates } from 'node:tls';
import { type Dispatcher, EnvHttpProxyAgent, errors, request } from 'undici';
import { parseRetryAfter } from '../deliver/retry.ts';
import { type Deployment, type DeploymentId, type Project, type ProjectId, parseId } from '../domain.ts';
import { DURATION_MAX_MS } from '../durations.ts';
import { delay, realEffects } from '../effects.ts';
import { printable } from '../printable.ts';
import type { CommandContext } from './command.ts';
import {
  explained,
  failureText,
  firstCodeOf,
  isDropped,
  isGarbled,
  proxyStatusOf,
  watchConnections,
} from './connections.ts';
import { tookText } from './deployment-status.ts';
import { createPatience, type Patience } from './patience.ts';
import { proxiesOf } from './proxies.ts';

export interface ApiOptions {
  /** Where the service is, with the path under which a proxy may serve it. */
  baseUrl: URL;
  key: string;
  /** Certificates in PEM to trust besides the default ones. */
  caPem: string | null;
  /** How long to retry while the service cannot be reached or is overloaded. */
  retryForMs: number;
  version: string;
  timeouts: Timeouts;
}

interface Timeouts {
  /** Of a try, besides the time for which it asks the service to delay its answer. */
  answerMs: number;
  /** When it is said that no answer has come yet. */
  answerNoteMs: number;
  /** Of a streamed answer from which nothing comes. */
  silenceMs: number;
  /** When that is said. */
  silenceNoteMs: number;
}

export const TIMEOUTS: Timeouts = {
  // A busy service may take long, and a proxy before it gives up after about so long.
  answerMs: 30_000,
  answerNoteMs: 5_000,
  // The service sends a heartbeat every 15 s.
  silenceMs: 45_000,
  silenceNoteMs: 20_000,
};

interface ApiRequest {
  method: 'GET' | 'POST';
  /** From /v2 on. */
  path: string;
  headers?: Record<string, string>;
  body?: unknown;
  /** For how long it asks the service to delay its answer, at most. */
  delayMs?: number;
  /** Told before and after each try whether the request may have been carried out by now. */
  onTry?(mayBeDone: boolean): void;
}

type ApiAnswer<Body> = ApiSuccess<Body> | ApiRefusal;

interface ApiSuccess<Body> {
  ok: true;
  body: Body;
  /** Whether it answers a request before this call, with the same Idempotency-Key: nothing was done now. */
  replayed?: boolean;
}

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

export interface ApiClient {
  /** A request that is answered with a deployment. Throws GaveUp if all retries fail. */
  call(request: ApiRequest): Promise<ApiAnswer<Deployment>>;
  /**
   * For what only adds to a message: without a word, and undefined if it fails or takes long; null if davit refuses it.
   * Within 3 s, `repeatedly` waits and tries again as often as there is time for what davit asks to wait.
   */
  deployment(id: DeploymentId, howOften?: 'once' | 'repeatedly'): Promise<Deployment | null | undefined>;
  project(id: ProjectId): Promise<Pick<Project, 'status'> | null | undefined>;
  /** As `call`, for a streamed answer. If the connection breaks, reading it throws: see `isDropped` and `isGarbled`. */
  stream(request: ApiRequest): Promise<ApiAnswer<AsyncIterable<Uint8Array>>>;
  patience(): Patience;
  /** Pending calls throw GaveUp. */
  close(): Promise<void>;
}

const CONNECT_TIMEOUT_MS = 10_000;
const GLANCE_TIMEOUT_MS = 3_000;
const GLANCE_EVERY_MS = 1_000;

/** Those of davit have less. */
const REFUSAL_MAX_BYTES = 16 * 1024;
/** Those of davit have less: 100 outputs of 4 KiB, six times as much in JSON at worst, and a few more fields. */
const ANSWER_MAX_BYTES = 4 * 1024 * 1024;

/** The service is away, stopping or overloaded, or a proxy before it says so; Cloudflare with 520 to 527 and 530. */
const PASSING_STATUSES = new Set([
  ...[408, 425, 429, 502, 503, 504],
  ...[520, 521, 522, 523, 524, 525, 526, 527, 530],
]);

/**
 * Those of them with which a request was surely not carried out, 503 only if davit itself says it: a proxy answers 502,
 * 503 and 504 also if the request was passed on.
 */
const NOT_DONE_STATUSES = new Set([425, 429, 503]);

/** Calls the API of a davit. Any request may be repeated: give those that write an Idempotency-Key. */
export function createApiClient(options: ApiOptions, context: CommandContext): ApiClient {
  const { baseUrl, key, caPem, version, timeouts } = options;
  const ca = caPem === null ? undefined : [...getCACertificates('default'), caPem];
  // Whatever NODE_TLS_REJECT_UNAUTHORIZED says: the key goes through these connections.
  const tls = { rejectUnauthorized: true, ...(ca === undefined ? {} : { ca }) };
  const proxies = proxiesOf(context.environment, baseUrl);
  const agent = new EnvHttpProxyAgent({
    ...proxies,
    connect: { timeout: CONNECT_TIMEOUT_MS, ...tls },
    requestTls: tls,
    proxyTls: tls,
    headersTimeout: 0, // each request has a limit of its own
    bodyTimeout: timeouts.silenceMs,
  });
  const watched = watchConnections(proxies);
  const patience = () => createPatience(options.retryForMs, context);
  let hadAddress = false;
  let wasReached = false;

  return {
    patience,

    async call(asked) {
      return await persistently(asked, async (response) => {
        const text = await beginningOf(response);
        if (!isSuccess(response)) return refusalOf(response, text, asked);
        const body = parsed(text);
        return isDeployment(body) ? { ok: true, body } : notDavit(response, asked);
      });
    },

    deployment: (id, howOften) => glance(`/v2/deployments/${id}`, isDeployment, howOften),

    project: (id) => glance(`/v2/projects/${id}`, isProject),

    async stream(asked) {
      return await persistently(asked, async (response) => {
        if (!isSuccess(response)) return refusalOf(response, await beginningOf(response), asked);
        const { headers, body } = response;
        if (/^\s*text\/event-stream\b/i.test(String(headers['content-type'])))
          return { ok: true, body: audible(body) };
        body.on('error', () => undefined).destroy(); // not to its end, which may be far away
        return notDavit(response, asked);
      });
    },

    async close() {
      watched.stop();
      await agent.destroy();
    },
  };

  async function glance<Body>(
    path: string,
    isExpected: (value: unknown) => value is Body,
    howOften: 'once' | 'repeatedly' = 'once',
  ): Promise<Body | null | undefined> {
    const { effects } = context;
    const untilMs = effects.monotonicMs() + GLANCE_TIMEOUT_MS;
    let leftMs = GLANCE_TIMEOUT_MS;
    for (;;) {
      const { seen, retryAfterMs = 0 } = await look(path, isExpected, leftMs);
      const delayMs = Math.max(GLANCE_EVERY_MS, retryAfterMs);
      leftMs = untilMs - effects.monotonicMs() - delayMs;
      if (seen !== undefined || howOften === 'once' || leftMs <= 0) return seen;
      await delay(delayMs, effects);
    }
  }

  async function look<Body>(
    path: string,
    isExpected: (value: unknown) => value is Body,
    timeoutMs: number,
  ): Promise<{ seen: Body | null | undefined; retryAfterMs?: number | undefined }> {
    const timeout = new AbortController();
    // In real time: how long the network takes is no matter of the client's own clock.
    const cancelTimeout = realEffects.after(timeoutMs, () => timeout.abort());
    try {
      const response = await send({ method: 'GET', path }, timeout.signal);
      const text = await beginningOf(response);
      if (isSuccess(response)) {
        const body = parsed(text);
        return { seen: isExpected(body) ? body : undefined };
      }
      const mayPass = errorIn(text) === undefined || PASSING_STATUSES.has(response.statusCode);
      return {
        seen: mayPass ? undefined : null,
        retryAfterMs: retryAfterOf(response, context.effects.now()),
      };
    } catch {
      return { seen: undefined };
    } finally {
      cancelTimeout();
    }
  }

  async function persistently<Body>(
    asked: ApiRequest,
    read: (response: Dispatcher.ResponseData) => Promise<ApiAnswer<Body>>,
  ): Promise<ApiAnswer<Body>> {
    const { effects } = context;
    const waiting = patience();
    let mayBeDone = false;
    for (;;) {
      let why: string;
      let retryAfterMs: number | undefined;
      let unansweredSinceMs: number | undefined;
      const askedAtMs = effects.monotonicMs();
      asked.onTry?.(true);
      try {
        using limit = limitOf(asked);
        const response = await send(asked, limit.signal);
        hadAddress = true;
        const place = watched.placeOf(baseUrl.host);
        if (PASSING_STATUSES.has(response.statusCode)) {
          const text = await beginningOf(response);
          why = refusedForNow(response, text, place);
          mayBeDone ||= !isSurelyNotDone(response, text);
          wasReached ||= errorIn(text) !== undefined;
        } else {
          const answer = await read(response);
          wasReached ||= answer.ok || answer.isDavits;
          // After a try that may have been carried out, the request that is answered again is our own.
          if (answer.ok) return { ...answer, replayed: isReplay(response) && !mayBeDone };
          mayBeDone ||= answer.mayBeDone;
          // While the service restarts, Traefik has no route to it and answers 404, others show a page.
          if (answer.isDavits || !wasReached) return { ...answer, mayBeDone };
          why = `${place} answers ${response.statusCode} (not from davit)`;
        }
        retryAfterMs = retryAfterOf(response, effects.now());
      } catch (error) {
        const place = watched.placeOf(baseUrl.host, error);
        const status = proxyStatusOf(error);
        const mayPass =
          isDropped(error) ||
          // A name that had an address is right: its DNS server is at fault for the moment.
          (hadAddress && firstCodeOf(error) === 'ENOTFOUND') ||
          // While the service restarts, a proxy may show a certificate of its own, refuse TLS or answer in plain text.
          (wasReached && (isGarbled(error) || watched.isUnsent(error)));
        mayBeDone ||= status === undefined && !watched.isUnsent(error);
        if (status === 407 || !mayPass) {
          asked.onTry?.(mayBeDone);
          throw explained(error, place);
        }
        why = isGarbled(error) ? `${place} does not answer in HTTP` : failureText(error, place);
        unansweredSinceMs = askedAtMs + (asked.delayMs ?? 0);
      }
      asked.onTry?.(mayBeDone);
      await waiting.wait(why, retryAfterMs, unansweredSinceMs);
    }
  }

  /**
   * Ends a try that is not answered in time, and says before that that it is not answered yet. In real time: how long the
   * network takes is no matter of the client's own clock.
   */
  function limitOf({ delayMs = 0 }: ApiRequest): Disposable & { signal: AbortSignal } {
    const timeout = new AbortController();
    const cancelNote = realEffects.after(delayMs + timeouts.answerNoteMs, () =>
      context.terminal.note(`no answer yet from ${watched.placeOf(baseUrl.host)}`),
    );
    const cancelTimeout = realEffects.after(delayMs + timeouts.answerMs, () =>
      timeout.abort(new errors.HeadersTimeoutError()),
    );
    return {
      signal: timeout.signal,
      [Symbol.dispose]() {
        cancelNote();
        cancelTimeout();
      },
    };
  }

  /** Passes the bytes on, and says when none come. */
  async function* audible(bytes: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array, void, undefined> {
    const { silenceNoteMs } = timeouts;
    const listen = () =>
      realEffects.after(silenceNoteMs, () =>
        context.terminal.note(
          `nothing has come from ${watched.placeOf(baseUrl.host)} for ${tookText(silenceNoteMs)}`,
        ),
      );
    let cancelNote = listen();
    try {
      for await (const piece of bytes) {
        cancelNote();
        yield piece;
        cancelNote = listen();
      }
    } finally {
      cancelNote();
    }
  }

  function send(
    { method, path, headers = {}, body }: ApiRequest,
    signal: AbortSignal,
  ): Promise<Dispatcher.ResponseData> {
    const answered = request(urlOf(path), {
      dispatcher: agent,
      signal,
      method,
      headers: {
        Authorization: `Bearer ${key}`,
        'User-Agent': `davit/${version}`,
        ...(body === undefined ? {} : { 'Content-Type': 'application/json' }),
        ...headers,
      },
      body: body === undefined ? null : JSON.stringify(body),
    });
    // undici heeds the signal only once it is connected, and a proxy may never connect it. It sends nothing then.
    const aborted = once(signal, 'abort').then(() => Promise.reject(signal.reason));
    return Promise.race([answered, aborted]);
  }

  function urlOf(path: string): URL {
    return new URL(baseUrl.href.replace(/\/*$/, '') + path);
  }
}

function isSurelyNotDone({ statusCode }: Dispatcher.ResponseData, text: string): boolean {
  return NOT_DONE_STATUSES.has(statusCode) && (statusCode !== 503 || errorIn(text) !== undefined);
}

/** Reads an answer up to a limit, as one that is not davit's may be huge. */
async function beginningOf(response: Dispatcher.ResponseData): Promise<string> {
  const maxBytes = isSuccess(response) ? ANSWER_MAX_BYTES : REFUSAL_MAX_BYTES;
  const pieces: Uint8Array[] = [];
  let bytes = 0;
  for await (const piece of response.body) {
    pieces.push(piece);
    bytes += piece.length;
    if (bytes > maxBytes) break;
  }
  return Buffer.concat(pieces).toString();
}

/** With davit's own message, if there is one, as 429 may mean a full queue as well as too many requests. */
function refusedForNow({ statusCode }: Dispatcher.ResponseData, text: string, place: string): string {
  const message = errorIn(text)?.message;
  return `${place} answers ${statusCode}${message === undefined ? '' : ` (${printable(message)})`}`;
}

function isSuccess({ statusCode }: Dispatcher.ResponseData): boolean {
  return statusCode >= 200 && statusCode <= 299;
}

function isReplay({ headers }: Dispatcher.ResponseData): boolean {
  return headers['idempotent-replayed'] === 'true';
}

function refusalOf(response: Dispatcher.ResponseData, text: string, asked: ApiRequest): ApiRefusal {
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
  if (error === undefined) return notDavit(response, asked);
  const { code, message, request_id } = error;
  return {
    ok: false,
    status: statusCode,
    isDavits: true,
    mayBeDone: statusCode >= 500,
    message: printable(`${message} (${statusCode} ${code}, ${request_id})`),
  };
}

/** Undefined: the answer is not davit's. */
function errorIn(text: string): { code: string; message: string; request_id: string } | undefined {
  const { code, message, request_id } = Object(Object(parsed(text)).error) as Record<string, unknown>;
  if (typeof code !== 'string' || typeof message !== 'string' || typeof request_id !== 'string')
    return undefined;
  return { code, message, request_id };
}

/** For an answer of a proxy, or of another program at that address. */
function notDavit(response: Dispatcher.ResponseData, { path }: ApiRequest): ApiRefusal {
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

/** Checks only the fields that are used, and not their values, which a later davit may add to. */
function isDeployment(value: unknown): value is Deployment {
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

function isProject(value: unknown): value is Pick<Project, 'status'> {
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

function retryAfterOf({ headers }: Dispatcher.ResponseData, nowMs: number): number | undefined {
  const [value] = [headers['retry-after']].flat();
  const waitMs = value === undefined ? undefined : parseRetryAfter(value, nowMs);
  return waitMs && Math.min(waitMs, DURATION_MAX_MS);
}
