import { AttemptError } from './connect.ts';

/** An answer as far as it has come: its head, and of its body what is kept. */
export interface Answer {
  readonly statusCode: number;
  /** The Retry-After header as it came. */
  readonly retryAfter: string | null;
  /** The body's first bytes, BODY_KEPT_MAX_BYTES at most. */
  readonly kept: readonly Buffer[];
  /** How long the body is, so far. */
  readonly bodyBytes: number;
  /** Whether the connection may carry another request after this. */
  readonly keepsConnection: boolean;
  /** For how long the receiver says it waits for that; null: it does not say. */
  readonly idleMs: number | null;
}

/** Reads the answer to one POST, HTTP/1.0 or 1.1 (RFC 9112), as it comes, in whichever pieces. */
export interface AnswerReader {
  /** Takes what came; the bytes may be overwritten after. True: the answer is whole. Throws AttemptError `invalid_response`. */
  take(bytes: Buffer): boolean;
  /** The receiver says no more. True: the answer is whole. */
  close(): boolean;
  /** Undefined until its head is there. */
  answer(): Answer | undefined;
}

export const BODY_KEPT_MAX_BYTES = 4 * 1024;
/** All that is not body: heads of 1xx and of the answer, sizes of chunks, trailers. */
const HEADS_MAX_BYTES = 16 * 1024;

/** What comes next. Sizes of chunks, their ends and trailers are lines. */
type Part = 'head' | 'counted' | 'untilClosed' | 'chunkSize' | 'chunk' | 'chunkEnd' | 'trailers' | 'nothing';

interface OwnAnswer extends Answer {
  kept: Buffer[];
  bodyBytes: number;
  keepsConnection: boolean;
}

/** Keeps no more than it says, whatever comes: what it is given is a stranger's. */
export function createAnswerReader(): AnswerReader {
  let part: Part = 'head';
  let answer: OwnAnswer | undefined;
  /** What came of a head or a line that is not whole. */
  let held = '';
  let headBytes = 0;
  /** Of the body, or of its chunk. */
  let missingBytes = 0;

  return { take, close, answer: () => answer };

  function take(bytes: Buffer): boolean {
    let at = 0;
    try {
      while (at < bytes.length && part !== 'nothing') at += takeFrom(bytes, at);
    } catch (error) {
      takeStatusAlone(error);
      return true;
    }
    if (part !== 'nothing') return false;
    // Whoever says more than was asked for cannot be understood the next time.
    if (at < bytes.length && answer !== undefined) answer.keepsConnection = false;
    return true;
  }

  /** Of a head that cannot be understood its first line counts, as nothing else says whether it is a success. */
  function takeStatusAlone(error: unknown): void {
    const statusCode = part === 'head' ? FINAL_STATUS.exec(held)?.[1] : undefined;
    if (statusCode === undefined) throw error;
    // As of HTTP/1.0, whose connections are not kept.
    const head = { statusCode: Number(statusCode), minorVersion: 0, fields: new Map() };
    begin(head, { part: 'nothing', lengthBytes: 0 });
  }

  function close(): boolean {
    return part === 'untilClosed' || part === 'nothing';
  }

  /** How many bytes it took. */
  function takeFrom(bytes: Buffer, from: number): number {
    switch (part) {
      case 'head':
        return held === '' && isLineEnd(bytes[from])
          ? skipLineEnd()
          : takeUntil('\r\n\r\n', bytes, from, takeHead);
      case 'counted':
      case 'chunk':
        return takeCounted(bytes.subarray(from, from + missingBytes));
      case 'untilClosed':
        return takeBody(bytes.subarray(from));
      case 'chunkSize':
        return takeUntil('\r\n', bytes, from, takeChunkSize);
      case 'chunkEnd':
        return takeUntil('\r\n', bytes, from, takeChunkEnd);
      case 'trailers':
        return takeUntil('\r\n', bytes, from, takeTrailer);
      case 'nothing':
        return 0;
      default:
        return part satisfies never;
    }
  }

  /** What some send after a body, as was asked of them long ago: RFC 9112, section 2.2. */
  function skipLineEnd(): number {
    headBytes += 1;
    if (headBytes > HEADS_MAX_BYTES) throw invalid();
    return 1;
  }

  /** Hands on all before `end`, once that has come. */
  function takeUntil(end: string, bytes: Buffer, from: number, handOn: (text: string) => void): number {
    const heldBefore = held.length;
    const room = HEADS_MAX_BYTES - headBytes - heldBefore;
    const text = held + bytes.toString('latin1', from, from + room);
    const endsAt = text.indexOf(end, Math.max(0, heldBefore - end.length + 1));
    held = text;
    if (endsAt === -1) {
      if (part === 'head' && !isHttp(text, heldBefore)) throw invalid();
      if (text.length - heldBefore === room) throw invalid();
      return text.length - heldBefore;
    }
    headBytes += endsAt + end.length;
    handOn(text.slice(0, endsAt));
    held = '';
    return endsAt + end.length - heldBefore;
  }

  function takeHead(text: string): void {
    const head = parseHead(text);
    // Nobody asked for another protocol.
    if (head.statusCode === 101) throw invalid();
    // 100 Continue, 102 Processing and 103 Early Hints announce an answer, they are none.
    if (head.statusCode < 200) return;
    begin(head, framingOf(head));
  }

  function begin(head: Head, framing: Framing): void {
    part = framing.part;
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

  function takeChunkSize(line: string): void {
    const size = CHUNK_SIZE.exec(line)?.[1];
    if (size === undefined) throw invalid();
    missingBytes = Number.parseInt(size, 16);
    part = missingBytes === 0 ? 'trailers' : 'chunk';
  }

  function takeChunkEnd(line: string): void {
    if (line !== '') throw invalid();
    part = 'chunkSize';
  }

  function takeTrailer(line: string): void {
    if (line === '') part = 'nothing';
  }

  function takeCounted(bytes: Buffer): number {
    missingBytes -= bytes.length;
    if (missingBytes === 0) part = part === 'chunk' ? 'chunkEnd' : 'nothing';
    return takeBody(bytes);
  }

  function takeBody(bytes: Buffer): number {
    if (answer === undefined) throw new Error('a body before its head');
    const roomBytes = BODY_KEPT_MAX_BYTES - answer.bodyBytes;
    if (roomBytes > 0) answer.kept.push(Buffer.from(bytes.subarray(0, roomBytes)));
    answer.bodyBytes += bytes.length;
    return bytes.length;
  }
}

interface Head {
  statusCode: number;
  /** Of HTTP/1. */
  minorVersion: number;
  /** The values of each header, by its name in small letters, with commas between. */
  fields: Map<string, string>;
}

interface Framing {
  /** What comes behind the head. */
  part: Part;
  lengthBytes: number;
}

/** No other is the last word. */
const FINAL_STATUS = /^HTTP\/1\.[01] ([2-9]\d\d)(?: [^\r\n]*)?\r?\n/;
const STATUS_LINE = /^HTTP\/1\.([01]) ([1-9]\d\d)(?: .*)?$/;
const TOKEN = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;
const CHUNK_SIZE = /^([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?$/;
const DIGITS = /^\d{1,15}$/;

function isLineEnd(byte: number | undefined): boolean {
  return byte === 0x0d || byte === 0x0a;
}

/**
 * Whether this may be the beginning of an answer: lines end with both characters. `from`: where what was not looked at
 * yet begins; a head of 16 KiB that came byte by byte took 0.9 s to be looked at as a whole each time.
 */
function isHttp(text: string, from: number): boolean {
  const beginning = 'HTTP/1.';
  BARE_LINE_FEED.lastIndex = from;
  return text.slice(0, beginning.length) === beginning.slice(0, text.length) && !BARE_LINE_FEED.test(text);
}

const BARE_LINE_FEED = /(?<!\r)\n/g;

function parseHead(text: string): Head {
  // A line that begins with a space goes on with the one before: RFC 9112, section 5.2.
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
    // One of the two lies.
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
