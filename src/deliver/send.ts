import { type Dispatcher, errors } from 'undici';
import type { Effects } from '../effects.ts';
import { AttemptError, type ConnectorOptions, createConnector } from './connect.ts';
import { type Connection, createConnections } from './connections.ts';

export interface SenderOptions extends Omit<ConnectorOptions, 'timeoutMs'> {
  /** Stands in the User-Agent. */
  version: string;
  /** From the attempt's start to the end of the answer's headers, names and handshakes included. */
  timeoutMs?: number;
  /** Whether `http:` is sent to at all. */
  allowHttp: boolean;
  /** How many idle connections are kept, over all receivers. */
  idleConnectionsMax?: number;
}

export interface SendRequest {
  /** As `parseWebhookUrl` made it. */
  url: string;
  /** Besides those that every delivery has. */
  headers: Readonly<Record<string, string>>;
  body: string | Uint8Array;
}

/** What came of one attempt, in the fields in which it is recorded. */
export interface SendOutcome {
  /** A status from 200 to 299 came in time. */
  ok: boolean;
  /** Null if none came in time. */
  statusCode: number | null;
  /**
   * Null exactly if a status came. Else `timeout`, `dns`, `address_refused`, `url_refused`, `connection_refused`,
   * `connection_reset`, `connection_closed`, `unreachable`, `invalid_response`, `tls: <what>`,
   * `connection_failed: <code>`; or `stopped`, when davit itself gave up and the receiver did nothing wrong.
   */
  error: string | null;
  /** Whole milliseconds until the status, or until the failure. */
  durationMs: number;
  /** Null if no connection was made. */
  remoteAddress: string | null;
  /** The beginning of the answer as text; null without a status. */
  responseBody: string | null;
  /** The Retry-After header as it came. */
  retryAfter: string | null;
}

export interface Sender {
  /** Makes one attempt. Never rejects. */
  send(request: SendRequest): Promise<SendOutcome>;
  /** These certificates in PEM are trusted besides the usual ones, in place of `caPem`, by connections from now on. */
  trust(caPem: string): void;
  /** Ends what is under way as `stopped`; resolves when every connection is closed. */
  close(): Promise<void>;
}

const TIMEOUT_MS = 10_000;
/** About 50 KB each while they last. With 1,000 busy receivers over TLS, 256 sent 970 a second, 1,024 sent 9,900. */
const IDLE_CONNECTIONS_MAX = 1_000;
const BODY_READ_MAX_BYTES = 16 * 1024;
const BODY_KEPT_MAX_BYTES = 4 * 1024;

/**
 * Sends deliveries: one POST each, to allowed addresses only, over HTTP/1.1 connections that are kept for the
 * next. Redirects are answers like any other. One deadline stands over the attempt; an answer's body that
 * goes on beyond it, or beyond 16 KiB, is cut off, and the status counts all the same.
 */
export function createSender(options: SenderOptions, effects: Effects): Sender {
  const { version, timeoutMs = TIMEOUT_MS, allowHttp, idleConnectionsMax = IDLE_CONNECTIONS_MAX } = options;
  const { connect, trust } = createConnector({ ...options, timeoutMs });
  const connections = createConnections(connect, idleConnectionsMax, effects);
  const underWay = new Set<(error: Error) => void>();
  let isClosed = false;

  return { send, trust, close };

  function send(request: SendRequest): Promise<SendOutcome> {
    const startedAtMs = effects.monotonicMs();
    const url = URL.parse(request.url);
    if (url === null || !(url.protocol === 'https:' || (url.protocol === 'http:' && allowHttp))) {
      return Promise.resolve(failure('url_refused', null, 0));
    }
    if (isClosed) return Promise.resolve(failure('stopped', null, 0));
    const { origin } = url;
    const post = postTo(url, request);
    const elapsedMs = () => Math.round(effects.monotonicMs() - startedAtMs);

    return new Promise((resolve) => {
      let cut = exchangeOver(connections.take(origin));
      const cancelDeadline = effects.after(timeoutMs, () => cut(new AttemptError('timeout')));
      const stop = (error: Error) => cut(error);
      underWay.add(stop);

      function exchangeOver(connection: Connection): (error: Error) => void {
        return exchange(connection.client, post, elapsedMs, (end) => {
          if (end.error === null) connections.giveBack(connection);
          else connections.drop(connection);
          if (wasStale(end, connection)) {
            cut = exchangeOver(connections.open(origin));
            return;
          }
          cancelDeadline();
          underWay.delete(stop);
          resolve(outcomeOf(end, connection, elapsedMs));
        });
      }
    });
  }

  function postTo(url: URL, { headers, body }: SendRequest): Dispatcher.DispatchOptions {
    return {
      method: 'POST',
      path: url.pathname + url.search,
      headers: { 'Content-Type': 'application/json', 'User-Agent': `davit/${version}`, ...headers },
      body,
    };
  }

  async function close(): Promise<void> {
    isClosed = true;
    for (const stop of underWay) stop(new AttemptError('stopped'));
    await connections.close();
  }
}

interface Answer {
  statusCode: number;
  retryAfter: string | null;
  durationMs: number;
  kept: Buffer[];
  readBytes: number;
}

/** How an exchange ended: with `error` null after a whole answer; an answer that was cut off has both. */
interface End {
  answer: Answer | undefined;
  error: Error | null;
  /** Whether any byte of an answer came. */
  began: boolean;
}

/** One request on one connection. Calls `onEnd` once, never before it returned; what it returns ends it early. */
function exchange(
  client: Dispatcher,
  post: Dispatcher.DispatchOptions,
  elapsedMs: () => number,
  onEnd: (end: End) => void,
): (error: Error) => void {
  let answer: Answer | undefined;
  let began = false;
  let ended = false;

  function end(error: Error | null): void {
    if (ended) return;
    ended = true;
    onEnd({ answer, error, began });
  }

  client.dispatch(post, {
    onRequestStart() {},
    onResponseStarted() {
      began = true;
    },
    onResponseStart(_controller, statusCode, headers) {
      // 102 Processing and 103 Early Hints announce an answer, they are none.
      if (statusCode < 200) return;
      const [retryAfter = null] = [headers['retry-after']].flat();
      answer = { statusCode, retryAfter, durationMs: elapsedMs(), kept: [], readBytes: 0 };
    },
    onResponseData(_controller, chunk) {
      if (ended || answer === undefined) return;
      const missingBytes = BODY_KEPT_MAX_BYTES - answer.readBytes;
      // A copy: the chunk is a window on a buffer of 64 KiB, which it would keep alive.
      if (missingBytes > 0) answer.kept.push(Buffer.from(chunk.subarray(0, missingBytes)));
      answer.readBytes += chunk.length;
      if (answer.readBytes > BODY_READ_MAX_BYTES) end(new AttemptError('the body is too long'));
    },
    onResponseEnd() {
      end(null);
    },
    onResponseError(_controller, error) {
      queueMicrotask(() => end(error));
    },
  });
  return end;
}

/**
 * Whether the receiver closed an idle connection at the moment when it was used again. That says nothing of the
 * receiver: a new connection is tried once, as every browser does. It may get the request twice; deliveries
 * may come twice anyway, and carry the event's id.
 */
function wasStale({ error, began }: End, connection: Connection): boolean {
  if (error === null || began || !connection.reused) return false;
  return ['connection_reset', 'connection_closed'].includes(errorName(error));
}

function outcomeOf(
  { answer, error }: End,
  { remoteAddress }: Connection,
  elapsedMs: () => number,
): SendOutcome {
  if (answer === undefined) return failure(errorName(error), remoteAddress, elapsedMs());
  const { statusCode, retryAfter, durationMs } = answer;
  return {
    ok: statusCode >= 200 && statusCode <= 299,
    statusCode,
    error: null,
    durationMs,
    remoteAddress,
    responseBody: textOf(answer),
    retryAfter,
  };
}

function failure(error: string, remoteAddress: string | null, durationMs: number): SendOutcome {
  return {
    ok: false,
    statusCode: null,
    error,
    durationMs,
    remoteAddress,
    responseBody: null,
    retryAfter: null,
  };
}

/** Invalid UTF-8 becomes U+FFFD, and so does NUL, at which SQLite's text functions stop. */
function textOf({ kept, readBytes }: Answer): string {
  if (readBytes === 0) return '';
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  // What was cut off may end within a character, which is then left out.
  const text = decoder.decode(Buffer.concat(kept), { stream: readBytes > BODY_KEPT_MAX_BYTES });
  return text.replaceAll('\0', '\ufffd');
}

/** The few words that stand for an error, the same for whatever the libraries below call it. */
function errorName(error: (Error & { code?: string }) | null): string {
  if (error === null) return 'invalid_response';
  if (error instanceof AttemptError) return error.message;
  const { code = 'unknown' } = error;
  switch (code) {
    case 'ECONNREFUSED':
      return 'connection_refused';
    case 'ECONNRESET':
    case 'EPIPE':
      return 'connection_reset';
    case 'ETIMEDOUT':
      return 'timeout';
    case 'EHOSTUNREACH':
    case 'EHOSTDOWN':
    case 'ENETUNREACH':
    case 'ENETDOWN':
      return 'unreachable';
    case 'UND_ERR_SOCKET':
      // What came in place of an answer ("bad response", "bad upgrade"), or that nothing came.
      return error.message.startsWith('bad ') ? 'invalid_response' : 'connection_closed';
    case 'UND_ERR_HEADERS_OVERFLOW':
    case 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH':
      return 'invalid_response';
    default:
      return error instanceof errors.HTTPParserError ? 'invalid_response' : `connection_failed: ${code}`;
  }
}
