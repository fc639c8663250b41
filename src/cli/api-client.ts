import { once } from 'node:events';
import { getCACertificates } from 'node:tls';
import { type Dispatcher, EnvHttpProxyAgent, errors, Pool, request } from 'undici';
import type { Deployment, DeploymentId, Project, ProjectId } from '../domain.ts';
import { delay, realEffects } from '../effects.ts';
import {
  type ApiRefusal,
  beginningOf,
  isDavits,
  isDeployment,
  isPassing,
  isProject,
  isSuccess,
  isSurelyNotDone,
  notDavit,
  parsed,
  refusalOf,
  refusedForNow,
  retryAfterOf,
} from './api-answers.ts';
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
import { createPatience, type Patience } from './patience.ts';
import { type Proxies, proxiesOf } from './proxies.ts';

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
  /** Of a connection that a proxy makes, which several tries may wait for. */
  tunnelMs: number;
  /** When it is said that no answer has come yet. */
  answerNoteMs: number;
  /** Of a streamed answer from which nothing comes. */
  silenceMs: number;
  /** For how long a connection may be idle and then used again. */
  idleMs: number;
}

export const TIMEOUTS: Timeouts = {
  // A busy service may take long, and a proxy before it gives up after about so long.
  answerMs: 30_000,
  // Squid tries an address for a minute, and only then says why there is no connection, or tries the next one.
  tunnelMs: 75_000,
  answerNoteMs: 5_000,
  // The service sends a heartbeat every 15 s.
  silenceMs: 45_000,
  // The service allows a minute, but routers may have forgotten it by then: no answer comes over such a one.
  idleMs: 4_000,
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

/** Calls the API of a davit. Any request may be repeated: give those that write an Idempotency-Key. */
export function createApiClient(options: ApiOptions, context: CommandContext): ApiClient {
  const { baseUrl, key, version, timeouts } = options;
  const proxies = proxiesOf(context.environment, baseUrl);
  const agent = createAgent(options, proxies);
  const watched = watchConnections(proxies);
  const patience = () => createPatience(options.retryForMs, context);
  let hadAddress = false;
  let wasReached = false;

  return {
    patience,

    async call(asked) {
      return await persistently(asked, async (response) => {
        const text = await beginningOf(response);
        if (!isSuccess(response)) return refusalOf(response, text, asked.path);
        const body = parsed(text);
        return isDeployment(body) ? { ok: true, body } : notDavit(response, asked.path);
      });
    },

    deployment: (id, howOften) => glance(`/v2/deployments/${id}`, isDeployment, howOften),

    project: (id) => glance(`/v2/projects/${id}`, isProject),

    async stream(asked) {
      return await persistently(asked, async (response) => {
        if (!isSuccess(response)) return refusalOf(response, await beginningOf(response), asked.path);
        const { headers, body } = response;
        if (/^\s*text\/event-stream\b/i.test(String(headers['content-type']))) return { ok: true, body };
        body.on('error', () => undefined).destroy(); // not to its end, which may be far away
        return notDavit(response, asked.path);
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
      return {
        seen: isDavits(text) && !isPassing(response) ? null : undefined,
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
        if (isPassing(response)) {
          const text = await beginningOf(response);
          why = refusedForNow(response, text, place);
          mayBeDone ||= !isSurelyNotDone(response, text);
          wasReached ||= isDavits(text);
        } else {
          const answer = await read(response);
          wasReached ||= answer.ok || answer.isDavits;
          const isReplay = response.headers['idempotent-replayed'] === 'true';
          // After a try that may have been carried out, the request that is answered again is our own.
          if (answer.ok) return { ...answer, replayed: isReplay && !mayBeDone };
          mayBeDone ||= answer.mayBeDone;
          // While the service restarts, Traefik has no route to it and answers 404, others show a page.
          if (answer.isDavits || !wasReached) return { ...answer, mayBeDone };
          why = `${place} answers ${response.statusCode} (not from davit)`;
        }
        retryAfterMs = retryAfterOf(response, effects.now());
      } catch (error) {
        const place = watched.placeOf(baseUrl.host, error);
        mayBeDone ||= proxyStatusOf(error) === undefined && !watched.isUnsent(error);
        if (!mayPass(error)) {
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

  /** Whether another try may be answered after one that failed so. */
  function mayPass(error: unknown): boolean {
    if (proxyStatusOf(error) === 407) return false;
    return (
      isDropped(error) ||
      // A name that had an address is right: its DNS server is at fault for the moment.
      (hadAddress && firstCodeOf(error) === 'ENOTFOUND') ||
      // While the service restarts, a proxy may show a certificate of its own, refuse TLS or answer in plain text.
      (wasReached && (isGarbled(error) || watched.isUnsent(error)))
    );
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

/** What connects to the service, or to the proxy that leads there. */
function createAgent({ caPem, timeouts }: ApiOptions, proxies: Proxies): EnvHttpProxyAgent {
  const tls = {
    // Whatever NODE_TLS_REJECT_UNAUTHORIZED says: the key goes through these connections.
    rejectUnauthorized: true,
    // Over HTTP/2, undici keeps the connection when a request gets no answer, and the next try would wait for one in
    // vain, too. Nor would an answer that a proxy cuts off fail as a lost connection.
    allowH2: false,
    ...(caPem !== null && { ca: [...getCACertificates('default'), caPem] }),
  };
  const limits = {
    headersTimeout: 0, // each request has a limit of its own
    bodyTimeout: timeouts.silenceMs,
    keepAliveMaxTimeout: timeouts.idleMs,
  };
  return new EnvHttpProxyAgent({
    ...proxies,
    connect: { timeout: CONNECT_TIMEOUT_MS, ...tls },
    requestTls: tls,
    proxyTls: tls,
    // As options of the agent they would not hold for plain HTTP through a proxy.
    factory: (origin, poolOptions) => new Pool(origin, { ...limits, ...poolOptions }),
    // To give up a try does not end the CONNECT that it waits for, and the next try would wait for the same one.
    clientFactory: (proxy, poolOptions) =>
      new Pool(proxy, { headersTimeout: timeouts.tunnelMs, ...poolOptions }),
  });
}
