import { version } from '../assets.ts';
import type { Effects } from '../effects.ts';
import { putLatest } from '../latest.ts';
import { createSlots } from '../slots.ts';
import { type Answer, type AnswerReader, BODY_KEPT_MAX_BYTES, createAnswerReader } from './answer.ts';
import { AttemptError, errorName } from './attempt-error.ts';
import { type ConnectorOptions, createConnector } from './connect.ts';
import { type Connection, createConnectionPool, type Destination } from './connection-pool.ts';
import type { Owner } from './key-shares.ts';

export interface SenderOptions extends ConnectorOptions {
  /** From the attempt's start to the end of the answer's headers, including name lookup and handshakes. */
  timeoutMs: number;
  /** Whether `http:` URLs are allowed. */
  allowHttp: boolean;
  /** How many idle connections may be kept, over all receivers; never more than IDLE_CONNECTIONS_MAX. */
  idleConnectionsMax?: number;
}

interface SendRequest {
  /** As `parseWebhookUrl` returned it. */
  url: string;
  /** In addition to those of every delivery; of visible ASCII, as `signedHeaders` makes them. */
  headers: Readonly<Record<string, string>>;
  /**
   * Makes them anew once a connection is established for the request, which the receiver can delay until the deadline;
   * null: it is not to be sent any more, and the attempt ends as `stopped`.
   */
  renewHeaders: () => Readonly<Record<string, string>> | null;
  body: string;
  /** That of the webhook. */
  key: Owner;
}

/** The result of one attempt, in the fields in which it is recorded. */
export interface SendOutcome {
  /** Whether a status from 200 to 299 arrived in time. */
  ok: boolean;
  /** Null if none arrived in time. */
  statusCode: number | null;
  /**
   * Null exactly if there is a status. Else `timeout`, `dns`, `address_refused`, `url_refused`, `connection_refused`,
   * `connection_reset`, `connection_closed`, `unreachable`, `invalid_response`, `tls: <what>`,
   * `connection_failed: <code>`; or `stopped`, if davit itself ended the attempt, which says nothing about the receiver.
   */
  error: string | null;
  /** Whole milliseconds until the status, or until the failure. */
  durationMs: number;
  /** The one that was tried last; null if none was. */
  remoteAddress: string | null;
  /** The beginning of the answer's body as text; null without a status. */
  responseBody: string | null;
  /** The Retry-After header as it came. */
  retryAfter: string | null;
}

export interface Sender {
  /** Makes one attempt. Never rejects. */
  send(request: SendRequest): Promise<SendOutcome>;
  /** Replaces `caPem`, the certificates that are trusted besides the default ones, for new connections. */
  trust(caPem: string): void;
  /** Ends the attempts that are under way as `stopped`, and closes all connections. */
  close(): void;
}

/** Each takes about 50 KB. With 1,000 busy receivers over TLS, 256 gave 970 deliveries a second, 1,024 gave 9,900. */
const IDLE_CONNECTIONS_MAX = 1_000;
const BODY_READ_MAX_BYTES = 16 * 1024;

/**
 * Sends deliveries: one POST each, to allowed addresses only, over HTTP/1.1 keep-alive connections. Redirects are not
 * followed. One deadline holds for the whole attempt: a body that goes on beyond it, or beyond 16 KiB, is cut off, and
 * the status counts all the same.
 *
 * An HTTP client of its own, as that is most of what a delivery costs: undici took 20 µs for each, this takes 10 µs, and
 * davit delivers a fifth more.
 */
export function createSender(options: SenderOptions, effects: Effects): Sender {
  const { timeoutMs, allowHttp, idleConnectionsMax = IDLE_CONNECTIONS_MAX } = options;
  const { connect, trust } = createConnector(options, effects);
  const pool = createConnectionPool(connect, Math.min(idleConnectionsMax, IDLE_CONNECTIONS_MAX), effects);
  const targets = new Map<string, Target>();
  const underWay = createSlots<Abort>();
  let isClosed = false;

  return { send, trust, close };

  function send(request: SendRequest): Promise<SendOutcome> {
    const { url, headers, renewHeaders, body, key } = request;
    const startedAtMs = effects.monotonicMs();
    const target = targetOf(url);
    if (target === undefined) return Promise.resolve(failure('url_refused', null, 0));
    if (isClosed) return Promise.resolve(failure('stopped', null, 0));
    const elapsedMs = () => Math.round(effects.monotonicMs() - startedAtMs);
    const requestFor = (isLate: boolean) => {
      const latest = isLate ? renewHeaders() : headers;
      return latest && requestTo(target, latest, body);
    };

    return new Promise((resolve) => {
      // The request is built again for a second connection, rather than kept: see `exchange`.
      const exchangeOver = (connection: Connection): Abort =>
        exchange(connection, requestFor, elapsedMs, (end) => {
          if (end.error === null && end.answer?.keepsConnection === true) {
            pool.release(connection, end.answer.idleMs);
          } else {
            pool.drop(connection);
          }
          if (wasStale(end, connection)) {
            abort = exchangeOver(pool.open(target, key));
            return;
          }
          cancelDeadline();
          underWay.take(place);
          resolve(outcomeOf(end, connection.remoteAddress()));
        });
      let abort = exchangeOver(pool.acquire(target, key));
      // One turn of the event loop later: if davit itself was held up, an answer may wait that it has not read.
      let cancelDeadline = effects.after(timeoutMs, () => {
        cancelDeadline = effects.after(0, () => abort(new AttemptError('timeout')));
      });
      const place = underWay.put((error) => abort(error));
    });
  }

  /** Undefined for URLs that are not allowed. The latest targets are cached: parsing a URL costs as much as signing. */
  function targetOf(text: string): Target | undefined {
    const known = targets.get(text);
    if (known !== undefined) return known;
    const url = URL.parse(text);
    if (!(url?.protocol === 'https:' || (url?.protocol === 'http:' && allowHttp))) return undefined;
    const target = {
      url,
      origin: url.origin,
      head: [
        `POST ${url.pathname}${url.search} HTTP/1.1`,
        `Host: ${url.host}`,
        'Connection: keep-alive',
        'Content-Type: application/json',
        `User-Agent: davit/${version}`,
        '',
      ].join('\r\n'),
    };
    putLatest(targets, text, target, TARGETS_MAX);
    return target;
  }

  /** The request as it is sent: RFC 9112, section 3. */
  function requestTo({ head }: Target, headers: SendRequest['headers'], body: string): string {
    let text = head;
    for (const [name, value] of Object.entries(headers)) text += `${name}: ${value}\r\n`;
    return `${text}Content-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;
  }

  function close(): void {
    isClosed = true;
    for (const stop of underWay) stop(new AttemptError('stopped'));
    pool.close();
  }
}

const TARGETS_MAX = 1_000;

/** A parsed URL. */
interface Target extends Destination {
  /** What all requests to it begin with. */
  head: string;
}

/** How an exchange ended. `error` is null if its answer was complete before the connection ended; else it may have both. */
interface End {
  answer: Answer | undefined;
  /** Until the answer's head, or else until the end. */
  durationMs: number;
  error: Error | null;
  /** Whether any byte of an answer arrived. */
  began: boolean;
}

/** Ends an exchange early. */
type Abort = (error: Error) => void;

/**
 * Sends one request on one connection: what `requestFor` returns when that is established, perhaps late. Calls `onEnd`
 * once, and not before it has returned; the returned function ends it early. While waiting for the answer it keeps
 * neither the request nor a parser: V8's young-generation collections would copy those of 256 attempts every 16 ms.
 */
function exchange(
  connection: Connection,
  requestFor: (isLate: boolean) => string | null,
  elapsedMs: () => number,
  onEnd: (end: End) => void,
): Abort {
  let reader: AnswerReader | undefined;
  let durationMs: number | undefined;
  let ended = false;

  connection.send({
    request(isLate) {
      const request = requestFor(isLate);
      if (request === null) end(new AttemptError('stopped'));
      return request;
    },
    received(bytes) {
      reader ??= createAnswerReader();
      let isWhole: boolean;
      try {
        isWhole = reader.feed(bytes);
      } catch (error) {
        end(error as Error);
        return;
      }
      const answer = reader.answer();
      if (answer !== undefined) durationMs ??= elapsedMs();
      if (isWhole) end(null);
      else if (answer !== undefined && answer.bodyBytes > BODY_READ_MAX_BYTES) {
        end(new AttemptError('the body is too long'));
      }
    },
    closed(error) {
      end(error ?? new AttemptError('connection_closed'));
    },
  });
  return end;

  function end(error: Error | null): void {
    if (ended) return;
    ended = true;
    onEnd({
      answer: reader?.answer(),
      durationMs: durationMs ?? elapsedMs(),
      error,
      began: reader !== undefined,
    });
  }
}

/**
 * Whether the receiver closed an idle connection just when it was reused. That is not the receiver's failure: the
 * request is sent once more, on a new connection, as browsers do. The receiver may then get it twice, like any delivery,
 * and can tell by the event's id.
 */
function wasStale({ error, began }: End, connection: Connection): boolean {
  if (error === null || began || !connection.reused) return false;
  return ['connection_reset', 'connection_closed'].includes(errorName(error));
}

function outcomeOf({ answer, durationMs, error }: End, remoteAddress: string | null): SendOutcome {
  if (answer === undefined) return failure(errorName(error), remoteAddress, durationMs);
  const { statusCode, retryAfter } = answer;
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

/**
 * Invalid UTF-8 becomes U+FFFD, and so does NUL, at which SQLite's text functions stop. That has three bytes in place of
 * one, so the text is cut off, too: it never has more than BODY_KEPT_MAX_BYTES.
 */
function textOf({ kept, bodyBytes }: Answer): string {
  if (bodyBytes === 0) return '';
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  // A body that was cut off may end within a character, which is then left out.
  const text = decoder.decode(Buffer.concat(kept), { stream: bodyBytes > BODY_KEPT_MAX_BYTES });
  const replaced = text.replaceAll('\0', '\ufffd');
  if (Buffer.byteLength(replaced) <= BODY_KEPT_MAX_BYTES) return replaced;
  // Writes whole characters only.
  const { read } = new TextEncoder().encodeInto(replaced, new Uint8Array(BODY_KEPT_MAX_BYTES));
  return replaced.slice(0, read);
}
