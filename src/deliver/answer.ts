import { AttemptError } from './attempt-error.ts';

/** An answer as far as it has arrived: its head, and the part of its body that is kept. */
export interface Answer {
  readonly statusCode: number;
  /** The Retry-After header as it came. */
  readonly retryAfter: string | null;
  /** The beginning of the body, BODY_KEPT_MAX_BYTES at most. */
  readonly kept: readonly Uint8Array[];
  /** The length of the body so far. */
  readonly bodyBytes: number;
  /** Whether the connection may carry another request after this. */
  readonly keepsConnection: boolean;
  /** The timeout that the receiver announced for idle connections; null: none. */
  readonly idleMs: number | null;
}

/** An incremental parser for the answer to one POST, HTTP/1.0 or 1.1 (RFC 9112). */
export interface AnswerReader {
  /**
   * Parses what was received; it keeps no reference to `bytes`. True: the answer is complete, which one that lasts until
   * its connection closes never is. Throws AttemptError `invalid_response`.
   */
  feed(bytes: Buffer): boolean;
  /** Undefined until the head is complete. */
  answer(): Answer | undefined;
}

export const BODY_KEPT_MAX_BYTES = 4 * 1024;
/** For the heads of 1xx and of the answer. */
const HEADS_MAX_BYTES = 16 * 1024;
/** For the lines of a chunked body: chunk sizes and trailers. One in tiny chunks takes 1.4 ms, with 16 KiB it took 2.5. */
const LINES_MAX_BYTES = 8 * 1024;

/** What is parsed next. `chunkSize`, `chunkEnd` and `trailers` are lines. */
type Part = 'head' | 'counted' | 'untilClosed' | 'chunkSize' | 'chunk' | 'chunkEnd' | 'trailers' | 'nothing';

interface OwnAnswer extends Answer {
  kept: Uint8Array[];
  bodyBytes: number;
  keepsConnection: boolean;
}

/** Creates a parser. Its memory is bounded whatever it is fed, as receivers are not trusted. */
export function createAnswerReader(): AnswerReader {
  let part: Part = 'head';
  let answer: OwnAnswer | undefined;
  /** An incomplete head or line. */
  let partial = '';
  /** Of the heads, or of the lines of the body. */
  let parsedBytes = 0;
  /** Of the body, or of the current chunk. */
  let missingBytes = 0;

  return { feed, answer: () => answer };

  function feed(bytes: Buffer): boolean {
    let at = 0;
    try {
      while (at < bytes.length && part !== 'nothing') at += feedPart(bytes, at);
    } catch (error) {
      acceptStatusAlone(error);
      return true;
    }
    if (part !== 'nothing') return false;
    // Unsolicited data could be taken for the beginning of the next answer.
    if (at < bytes.length && answer !== undefined) answer.keepsConnection = false;
    return true;
  }

  /** If a complete head cannot be parsed, its status line counts all the same: it decides whether this is a success. */
  function acceptStatusAlone(error: unknown): void {
    const statusCode = part === 'head' ? FINAL_STATUS.exec(partial)?.[1] : undefined;
    if (statusCode === undefined) throw error;
    // As HTTP/1.0, so that the connection is not reused.
    const head = { statusCode: Number(statusCode), minorVersion: 0, fields: new Map() };
    begin(head, { part: 'nothing', lengthBytes: 0 });
  }

  /** Returns how many bytes it consumed. */
  function feedPart(bytes: Buffer, from: number): number {
    switch (part) {
      case 'head':
        return partial === '' && isLineEnd(bytes[from])
          ? skipLineEnd()
          : feedUntil('\r\n\r\n', bytes, from, onHead);
      case 'counted':
      case 'chunk':
        return feedCounted(bytes.subarray(from, from + missingBytes));
      case 'untilClosed':
        return feedBody(bytes.subarray(from));
      case 'chunkSize':
        return feedUntil('\r\n', bytes, from, onChunkSize);
      case 'chunkEnd':
        return feedUntil('\r\n', bytes, from, onChunkEnd);
      case 'trailers':
        return feedUntil('\r\n', bytes, from, onTrailer);
      case 'nothing':
        return 0;
      default:
        return part satisfies never;
    }
  }

  /** Old implementations send an additional line end after a body: RFC 9112, section 2.2. */
  function skipLineEnd(): number {
    parsedBytes += 1;
    if (parsedBytes > HEADS_MAX_BYTES) throw invalid();
    return 1;
  }

  /** Calls `handOn` with everything before `end`, once `end` has arrived. */
  function feedUntil(end: string, bytes: Buffer, from: number, handOn: (text: string) => void): number {
    const partialBefore = partial.length;
    const maxBytes = part === 'head' ? HEADS_MAX_BYTES : LINES_MAX_BYTES;
    const room = maxBytes - parsedBytes - partialBefore;
    // No more than that, as all the lines of a body in tiny chunks would be decoded again for each chunk.
    const foundAt = bytes.indexOf(end, from, 'latin1');
    const upTo = foundAt === -1 ? bytes.length : foundAt + end.length;
    const text = partial + bytes.toString('latin1', from, Math.min(from + room, upTo));
    const endsAt = text.indexOf(end, Math.max(0, partialBefore - end.length + 1));
    partial = text;
    if (endsAt === -1) {
      if (part === 'head' && !isHttp(text, partialBefore)) throw invalid();
      if (text.length - partialBefore === room) throw invalid();
      return text.length - partialBefore;
    }
    parsedBytes += endsAt + end.length;
    handOn(text.slice(0, endsAt));
    partial = '';
    return endsAt + end.length - partialBefore;
  }

  function onHead(text: string): void {
    const head = parseHead(text);
    // Switching Protocols, which was not requested.
    if (head.statusCode === 101) throw invalid();
    // 100 Continue, 102 Processing and 103 Early Hints precede the answer.
    if (head.statusCode < 200) return;
    begin(head, framingOf(head));
  }

  function begin(head: Head, framing: Framing): void {
    part = framing.part;
    parsedBytes = 0;
    missingBytes = framing.lengthBytes;
    answer = {
      statusCode: head.statusCode,
      retryAfter: head.fields.get('retry-after') ?? null,
      kept: [],
      bodyBytes: 0,
      keepsConnection: part !== 'untilClosed' && keepsConnection(head),
      idleMs: idleMsOf(head),
    };
  }

  function onChunkSize(line: string): void {
    const size = CHUNK_SIZE.exec(line)?.[1];
    if (size === undefined) throw invalid();
    missingBytes = Number.parseInt(size, 16);
    part = missingBytes === 0 ? 'trailers' : 'chunk';
  }

  function onChunkEnd(line: string): void {
    if (line !== '') throw invalid();
    part = 'chunkSize';
  }

  function onTrailer(line: string): void {
    if (line === '') part = 'nothing';
  }

  function feedCounted(bytes: Buffer): number {
    missingBytes -= bytes.length;
    if (missingBytes === 0) part = part === 'chunk' ? 'chunkEnd' : 'nothing';
    return feedBody(bytes);
  }

  function feedBody(bytes: Buffer): number {
    if (answer === undefined) throw new Error('a body before its head');
    const roomBytes = BODY_KEPT_MAX_BYTES - answer.bodyBytes;
    // Not Buffer.from: a small Buffer keeps 64 KiB alive, which it shares with others.
    if (roomBytes > 0) answer.kept.push(new Uint8Array(bytes.subarray(0, roomBytes)));
    answer.bodyBytes += bytes.length;
    return bytes.length;
  }
}

interface Head {
  statusCode: number;
  /** 0 or 1, of HTTP/1.x. */
  minorVersion: number;
  /** The values of each header, joined by commas, by its lower-case name. */
  fields: Map<string, string>;
}

interface Framing {
  /** What follows the head. */
  part: Part;
  lengthBytes: number;
}

/** The status line of a final answer, so not of a 1xx. */
const FINAL_STATUS = /^HTTP\/1\.[01] ([2-9]\d\d)(?: [^\r\n]*)?\r?\n/;
const STATUS_LINE = /^HTTP\/1\.([01]) ([1-9]\d\d)(?: .*)?$/;
const TOKEN = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;
const CHUNK_SIZE = /^([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?$/;
const DIGITS = /^\d{1,15}$/;

function isLineEnd(byte: number | undefined): boolean {
  return byte === 0x0d || byte === 0x0a;
}

/**
 * Whether `text` may be the beginning of an answer: it starts like one, and no line ends in a bare LF. What comes before
 * `from` was checked already: checking a head of 16 KiB as a whole for each of its bytes took 0.9 s.
 */
function isHttp(text: string, from: number): boolean {
  const beginning = 'HTTP/1.';
  BARE_LINE_FEED.lastIndex = from;
  return text.slice(0, beginning.length) === beginning.slice(0, text.length) && !BARE_LINE_FEED.test(text);
}

const BARE_LINE_FEED = /(?<!\r)\n/g;

function parseHead(text: string): Head {
  // A line that begins with a space continues the previous one: RFC 9112, section 5.2.
  const [first = '', ...lines] = text.replace(/\r\n[ \t]+/g, ' ').split('\r\n');
  const [, minorVersion, statusCode] = STATUS_LINE.exec(first) ?? [];
  if (statusCode === undefined) throw invalid();
  const fields = new Map<string, string>();
  for (const line of lines) {
    const colonAt = line.indexOf(':');
    const name = line.slice(0, colonAt);
    const value = line.slice(colonAt + 1).trim();
    if (colonAt < 1 || !TOKEN.test(name) || /[\0\r\n]/.test(value)) throw invalid();
    const key = name.toLowerCase();
    const before = fields.get(key);
    fields.set(key, before === undefined ? value : `${before}, ${value}`);
  }
  return { statusCode: Number(statusCode), minorVersion: Number(minorVersion), fields };
}

/** Where the body ends: RFC 9112, section 6.3. */
function framingOf({ statusCode, fields }: Head): Framing {
  if (statusCode === 204 || statusCode === 304) return { part: 'nothing', lengthBytes: 0 };
  const coding = fields.get('transfer-encoding');
  const length = fields.get('content-length');
  if (coding !== undefined) {
    // The two contradict each other.
    if (length !== undefined) throw invalid();
    return { part: /(?:^|,)[ \t]*chunked$/i.test(coding) ? 'chunkSize' : 'untilClosed', lengthBytes: 0 };
  }
  if (length === undefined) return { part: 'untilClosed', lengthBytes: 0 };
  if (!DIGITS.test(length)) throw invalid();
  const lengthBytes = Number(length);
  return { part: lengthBytes === 0 ? 'nothing' : 'counted', lengthBytes };
}

function keepsConnection({ minorVersion, fields }: Head): boolean {
  const options = (fields.get('connection') ?? '').toLowerCase().split(',');
  const has = (option: string) => options.some((one) => one.trim() === option);
  return !has('close') && (minorVersion === 1 || has('keep-alive'));
}

function idleMsOf({ fields }: Head): number | null {
  const seconds = /(?:^|,)\s*timeout=(\d{1,9})/i.exec(fields.get('keep-alive') ?? '')?.[1];
  return seconds === undefined ? null : Number(seconds) * 1000;
}

function invalid(): AttemptError {
  return new AttemptError('invalid_response');
}
