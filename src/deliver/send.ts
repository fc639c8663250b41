import type { Effects } from '../effects.ts';
import { putLatest } from '../latest.ts';
import { createSlots } from '../slots.ts';
import { type Answer, type AnswerReader, BODY_KEPT_MAX_BYTES, createAnswerReader } from './answer.ts';
import { AttemptError, type ConnectorOptions, createConnector } from './connect.ts';
import { type Connection, createConnections, type Place } from './connections.ts';
import type { Reputation } from './resolver.ts';

export interface SenderOptions extends ConnectorOptions {
  /** Stands in the User-Agent. */
  version: string;
  /** From the attempt's start to the end of the answer's headers, names and handshakes included. */
  timeoutMs: number;
  /** Whether `http:` is sent to at all. */
  allowHttp: boolean;
  /** How many idle connections may be kept, over all receivers; never more than IDLE_CONNECTIONS_MAX. */
  idleConnectionsMax?: number;
}

interface SendRequest {
  /** As `parseWebhookUrl` made it. */
  url: string;
  /** Besides those that every delivery has. */
  headers: Readonly<Record<string, string>>;
  body: string;
  /** Its receiver's; if nothing is said, `unproven`. */
  reputation?: Reputation;
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
   * `connection_failed: <code>`, `request_refused`; or `stopped`, when davit itself gave up and the receiver did nothing wrong.
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
  /** Ends what is under way as `stopped`, and every connection. */
  close(): void;
}

/** About 50 KB each while they last. With 1,000 busy receivers over TLS, 256 sent 970 a second, 1,024 sent 9,900. */
const IDLE_CONNECTIONS_MAX = 1_000;
const BODY_READ_MAX_BYTES = 16 * 1024;

/**
 * Sends deliveries: one POST each, to allowed addresses only, over HTTP/1.1 connections that are kept for the
 * next. Redirects are answers like any other. One deadline stands over the attempt; an answer's body that
 * goes on beyond it, or beyond 16 KiB, is cut off, and the status counts all the same.
 *
 * HTTP is spoken here, as this is most of what a delivery costs: undici took 20 µs for each, this takes 10, and
 * davit delivers a fifth more.
 */
export function createSender(options: SenderOptions, effects: Effects): Sender {
  const { version, timeoutMs, allowHttp, idleConnectionsMax = IDLE_CONNECTIONS_MAX } = options;
  const { connect, trust } = createConnector(options, effects);
  const connections = createConnections(connect, Math.min(idleConnectionsMax, IDLE_CONNECTIONS_MAX), effects);
  const targets = new Map<string, Target>();
  const underWay = createSlots<Cut>();
  let isClosed = false;

  return { send, trust, close };

  function send({ url, headers, body, reputation = 'unproven' }: SendRequest): Promise<SendOutcome> {
    const startedAtMs = effects.monotonicMs();
    const target = targetOf(url);
    if (target === undefined) return Promise.resolve(failure('url_refused', null, 0));
    if (isClosed) return Promise.resolve(failure('stopped', null, 0));
    if (!Object.values(headers).every((value) => HEADER_VALUE.test(value))) {
      return Promise.resolve(failure('request_refused', null, 0));
    }
    const elapsedMs = () => Math.round(effects.monotonicMs() - startedAtMs);

    return new Promise((resolve) => {
      // Made anew for a second connection, and not kept for it: see `exchange`.
      const exchangeOver = (connection: Connection): Cut =>
        exchange(connection, requestTo(target, headers, body), elapsedMs, (end) => {
          if (end.error === null && end.answer?.keepsConnection === true) {
            connections.giveBack(connection, end.answer.idleMs);
          } else {
            connections.drop(connection);
          }
          if (wasStale(end, connection)) {
            cut = exchangeOver(connections.open(target, reputation));
            return;
          }
          cancelDeadline();
          underWay.take(place);
          resolve(outcomeOf(end, connection.remoteAddress()));
        });
      let cut = exchangeOver(connections.take(target, reputation));
      const cancelDeadline = effects.after(timeoutMs, () => cut(new AttemptError('timeout')));
      const place = underWay.put((error) => cut(error));
    });
  }

  /** Undefined for what nothing is sent to. The latest are kept: taking a URL apart costs as much as signing. */
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

  /** As it stands on the wire: RFC 9112, section 3. */
  function requestTo({ head }: Target, headers: SendRequest['headers'], body: string): string {
    let text = head;
    for (const [name, value] of Object.entries(headers)) text += `${name}: ${value}\r\n`;
    return `${text}Content-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;
  }

  function close(): void {
    isClosed = true;
    for (const stop of underWay) stop(new AttemptError('stopped'));
    connections.close();
  }
}

const TARGETS_MAX = 1_000;

/** Where a URL leads. */
interface Target extends Place {
  /** How requests to it begin. */
  head: string;
}

/** Anything else could end a line, and begin one that nobody wrote. */
const HEADER_VALUE = /^[\t\x20-\x7e]*$/;

/** How an exchange ended: with `error` null after a whole answer; an answer that was cut off has both. */
interface End {
  answer: Answer | undefined;
  /** Until the answer's head. */
  durationMs: number;
  error: Error | null;
  /** Whether any byte of an answer came. */
  began: boolean;
}

/** Ends an exchange before its time. */
type Cut = (error: Error) => void;

/**
 * One request on one connection. Calls `onEnd` once, never before it returned; what it returns ends it early. While it
 * waits it keeps neither the request nor a reader: V8 copies all that is kept of 256 attempts every 16 ms.
 */
function exchange(
  connection: Connection,
  request: string,
  elapsedMs: () => number,
  onEnd: (end: End) => void,
): Cut {
  let reader: AnswerReader | undefined;
  let durationMs: number | undefined;
  let ended = false;

  connection.send(request, {
    received(bytes) {
      reader ??= createAnswerReader();
      const isWhole = taken(reader, bytes);
      const answer = reader.answer();
      if (answer !== undefined) durationMs ??= elapsedMs();
      if (isWhole instanceof Error) end(isWhole);
      else if (isWhole) end(null);
      else if (answer !== undefined && answer.bodyBytes > BODY_READ_MAX_BYTES) {
        end(new AttemptError('the body is too long'));
      }
    },
    closed(error) {
      end(
        error === null && reader?.close() === true ? null : (error ?? new AttemptError('connection_closed')),
      );
    },
  });
  return end;

  /** Whether the answer is whole, or what is wrong with it. */
  function taken(reader: AnswerReader, bytes: Buffer): boolean | Error {
    try {
      return reader.take(bytes);
    } catch (error) {
      return error as Error;
    }
  }

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
 * Whether the receiver closed an idle connection at the moment when it was used again. That says nothing of the
 * receiver: a new connection is tried once, as every browser does. It may get the request twice; deliveries
 * may come twice anyway, and carry the event's id.
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

/** Invalid UTF-8 becomes U+FFFD, and so does NUL, at which SQLite's text functions stop. */
function textOf({ kept, bodyBytes }: Answer): string {
  if (bodyBytes === 0) return '';
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  // What was cut off may end within a character, which is then left out.
  const text = decoder.decode(Buffer.concat(kept), { stream: bodyBytes > BODY_KEPT_MAX_BYTES });
  return text.replaceAll('\0', '\ufffd');
}

/** The few words that stand for an error, the same for whatever the system calls it. */
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
    default:
      return `connection_failed: ${code}`;
  }
}
