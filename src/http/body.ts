import { isUtf8 } from 'node:buffer';
import { IncomingMessage } from 'node:http';
import { Readable } from 'node:stream';
import type { Request } from '@hapi/hapi';
import type { Effects } from '../effects.ts';
import { AppError, invalid } from '../errors.ts';

export const BODY_MAX_BYTES = 64 * 1024;

/** Deep enough for every body of this API, shallow enough for any recursion over one. */
const BODY_MAX_DEPTH = 32;

/**
 * Of one list or object; ours have 100 at most. joi looks at each, and describes what is wrong with it: 32,000 numbers
 * in place of event types took 0.9 s, in which nobody was answered.
 */
const ITEMS_MAX = 1_000;

/**
 * Reads the body before authentication, where hapi would read it after, so that every check comes in the
 * promised order. hapi leaves a payload alone that is there already (lib/route.js, `internals.payload`)
 * and still validates it. What was read is null for no body, else any JSON value but null.
 */
export async function takeBody(request: Request): Promise<void> {
  const bytes = await readBody(request);
  // A body means nothing to GET and HEAD, whatever it is.
  if (request.route.method === 'get') return;
  // hapi's types call it read-only; its own extensions, and its documentation, set it.
  Object.assign(request, { payload: bytes.length === 0 ? null : (parseJson(bytes) ?? NULL_BODY) });
}

/** No schema of ours could tell the body `null` from no body, and none takes it: like this it is refused as a text is. */
const NULL_BODY = 'null';

/**
 * The JSON value that `bytes` are, as strict as I-JSON (RFC 7493): UTF-8 without a byte order mark, no name
 * twice in one object, no NUL and no half of a surrogate pair. Throws `invalid_request`, without echoing.
 */
export function parseJson(bytes: Buffer): unknown {
  if (!isUtf8(bytes)) throw invalidBody('must be UTF-8');
  const text = bytes.toString('utf8');
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw invalidBody(`is not valid JSON${positionIn(error)}`);
  }
  const names = checkedNames(value, 1);
  if (names !== writtenNames(text)) throw invalidBody('must not repeat a name in one object');
  return value;
}

/** Whether there is a body, here or on its way, that nobody has read to its end. */
export function isBodyPending({ raw: { req } }: Request): boolean {
  const isRead = req.complete && req.readableLength === 0;
  return isFromSocket(req) && announcesBody(req) && !isRead && !broken.has(req);
}

/** False for requests that hapi's `server.inject` makes: there is no connection and no parser under them. */
export function isFromSocket(req: unknown): boolean {
  return req instanceof IncomingMessage;
}

/**
 * `text` as a stream that ends only when the rest of the request's body has been thrown away, so that the
 * connection is not closed, and thereby reset, under a client that reads its answer after it has sent
 * everything. Bounded in time and bytes, as nginx's `lingering_close` is.
 */
export function untilBodyEnds(text: string, request: Request, effects: Effects): Readable {
  const stream = new Readable({ read() {} });
  stream.push(text);
  throwAway(request.raw.req, effects, () => stream.push(null));
  return stream;
}

/**
 * Ends the reading of a body, now or when it is about to begin, because the rest of it will not come: too
 * slow, cut off, or not valid HTTP. Only the connection hears of that; Node does not tell the request.
 */
export function interruptBody(req: IncomingMessage, problem: AppError): void {
  broken.set(req, problem);
  req.emit(INTERRUPTED, problem);
}

const broken = new WeakMap<IncomingMessage, AppError>();

/** Told to whoever is reading. */
const INTERRUPTED = Symbol('interrupted');

async function readBody(request: Request): Promise<Buffer> {
  const { req, res } = request.raw;
  if (!announcesBody(req)) return NOTHING;
  const declaredBytes = declaredLength(req);
  if (declaredBytes === 0) return NOTHING;
  if (declaredBytes !== undefined && declaredBytes > BODY_MAX_BYTES) throw tooLarge();
  const isIgnored = request.route.method === 'get';
  // A chunked body may turn out to be empty, and then its type does not matter.
  if (!isIgnored && declaredBytes !== undefined) checkMediaType(req);
  checkTransferCoding(req);
  if (expectsContinue(req)) res.writeContinue();
  const bytes = await collect(req);
  if (!isIgnored && bytes.length > 0) checkMediaType(req);
  return bytes;
}

const NOTHING = Buffer.alloc(0);

function announcesBody({ headers }: IncomingMessage): boolean {
  return headers['content-length'] !== undefined || headers['transfer-encoding'] !== undefined;
}

/** Undefined for a chunked body. The parser has made sure that it is a number, and not there twice. */
function declaredLength({ headers }: IncomingMessage): number | undefined {
  return headers['transfer-encoding'] === undefined ? Number(headers['content-length']) : undefined;
}

function checkMediaType({ headers }: IncomingMessage): void {
  const [mediaType = '', ...parameters] = (headers['content-type'] ?? '').split(';');
  const charset = parameters.map((parameter) => CHARSET.exec(parameter)?.[1]).find(Boolean) ?? 'utf-8';
  if (mediaType.trim().toLowerCase() !== 'application/json' || !UTF_8.test(charset)) {
    throw new AppError('unsupported_media_type', 'the body must be JSON: Content-Type: application/json');
  }
  if ((headers['content-encoding'] ?? 'identity').trim().toLowerCase() !== 'identity') {
    throw new AppError(
      'unsupported_media_type',
      'the body must not be compressed: leave out Content-Encoding',
    );
  }
}

/** Without the dash it is no registered name, and common. */
const UTF_8 = /^utf-?8$/i;

const CHARSET = /^\s*charset\s*=\s*"?([^"\s]*)"?\s*$/i;

function checkTransferCoding({ headers }: IncomingMessage): void {
  if ((headers['transfer-encoding'] ?? 'chunked').trim().toLowerCase() !== 'chunked') {
    throw invalid('header', 'Transfer-Encoding', 'must be chunked');
  }
}

function expectsContinue({ headers, httpVersion }: IncomingMessage): boolean {
  return httpVersion === '1.1' && headers.expect?.toLowerCase() === '100-continue';
}

/** Each is an object of some 250 bytes, however little it holds: a body in chunks of one byte was 15 MiB of them. */
const CHUNKS_MAX = 256;

/** The whole body. Rejects once it is too large or will not come; what is left of it stays unread then. */
function collect(req: IncomingMessage): Promise<Buffer> {
  return new Promise((resolve, reject) => {
    let chunks: Buffer[] = [];
    let size = 0;
    req.on('data', onData).on('end', onEnd).on('close', onClose).on(INTERRUPTED, fail);
    const problem = broken.get(req);
    if (problem !== undefined) fail(problem);

    function onData(chunk: Buffer): void {
      size += chunk.length;
      if (size > BODY_MAX_BYTES) fail(tooLarge());
      else if (chunks.push(chunk) === CHUNKS_MAX) chunks = [Buffer.concat(chunks)];
    }
    function onEnd(): void {
      release();
      const [only] = chunks;
      resolve(chunks.length === 1 && only !== undefined ? only : Buffer.concat(chunks, size));
    }
    function onClose(): void {
      fail(new AppError('invalid_request', 'the connection was closed before the body was complete'));
    }
    function fail(problem: AppError): void {
      release();
      req.pause();
      reject(problem);
    }
    function release(): void {
      req.off('data', onData).off('end', onEnd).off('close', onClose).off(INTERRUPTED, fail);
    }
  });
}

function tooLarge(): AppError {
  return new AppError('payload_too_large', `the body must be at most ${BODY_MAX_BYTES} bytes`);
}

function invalidBody(reason: string): AppError {
  return invalid('body', 'body', reason);
}

/** V8's message quotes the body; only the place in it is passed on. */
function positionIn(error: unknown): string {
  const position = error instanceof Error ? /at position (\d+)/.exec(error.message)?.[1] : undefined;
  return position === undefined ? '' : `, at character ${Number(position) + 1}`;
}

/**
 * Counts the names of all objects in `value`; throws for what no text in this service may hold. `field` is the
 * body's own field that it stands in.
 */
function checkedNames(value: unknown, depth: number, field = 'body'): number {
  if (typeof value === 'string') {
    checkText(value, field);
    return 0;
  }
  if (typeof value !== 'object' || value === null) return 0;
  if (depth > BODY_MAX_DEPTH) throw invalidBody(`must not be nested deeper than ${BODY_MAX_DEPTH}`);
  const entries = Object.entries(value);
  if (entries.length > ITEMS_MAX) {
    throw invalidBody(`must have at most ${ITEMS_MAX} items in one list or object`);
  }
  if (Array.isArray(value)) {
    return value.reduce((names: number, item: unknown) => names + checkedNames(item, depth + 1, field), 0);
  }
  let names = 0;
  for (const [name, item] of entries) {
    checkText(name, field);
    if (reachesPrototype(name, item)) throw invalidBody('must not have a name that reaches for a prototype');
    names += 1 + checkedNames(item, depth + 1, depth === 1 && PLAIN_NAME.test(name) ? name : field);
  }
  return names;
}

/** A field's name is the sender's text: only one that could be ours is repeated. */
const PLAIN_NAME = /^[a-z_]{1,64}$/;

function checkText(text: string, field: string): void {
  if (text.includes('\0')) throw invalid('body', field, 'must not contain NUL');
  if (!text.isWellFormed()) throw invalid('body', field, 'must not contain half of a surrogate pair');
}

/** The two ways in which a copied object poisons others; see CVE-2018-3728, against which hapi has Bourne. */
function reachesPrototype(name: string, value: unknown): boolean {
  if (name === '__proto__') return true;
  return name === 'constructor' && typeof value === 'object' && value !== null && 'prototype' in value;
}

/** The colons outside of strings in valid JSON: one for each name, also one that JSON.parse dropped. */
function writtenNames(text: string): number {
  let names = 0;
  let inString = false;
  for (let index = 0; index < text.length; index++) {
    const character = text.charCodeAt(index);
    if (inString && character === BACKSLASH) index++;
    else if (character === QUOTE) inString = !inString;
    else if (!inString && character === COLON) names++;
  }
  return names;
}

const QUOTE = 0x22;
const COLON = 0x3a;
const BACKSLASH = 0x5c;

const THROW_AWAY_MAX_BYTES = 64 * 1024 * 1024;
/** As nginx's `lingering_timeout` and `lingering_time`: some proxies look for the answer only when they have sent it all. */
const THROW_AWAY_LOOK_MS = 5_000;
const THROW_AWAY_MAX_LOOKS = 6;

/** Reads on until the body ends, nothing came for 5 s, 30 s are over, or it is too much. */
function throwAway(req: IncomingMessage, effects: Effects, ended: () => void): void {
  let bytes = 0;
  let bytesAtLastLook = -1;
  let looks = 0;
  let cancelLook = (): void => {};
  req.on('data', onData).on('end', stop).on('close', stop).on(INTERRUPTED, stop);
  req.resume();
  look();

  function onData(chunk: Buffer): void {
    bytes += chunk.length;
    if (bytes > THROW_AWAY_MAX_BYTES) stop();
  }
  function look(): void {
    if (bytes === bytesAtLastLook || looks === THROW_AWAY_MAX_LOOKS) {
      stop();
      return;
    }
    bytesAtLastLook = bytes;
    looks++;
    cancelLook = effects.after(THROW_AWAY_LOOK_MS, look);
  }
  function stop(): void {
    cancelLook();
    req.off('data', onData).off('end', stop).off('close', stop).off(INTERRUPTED, stop);
    ended();
  }
}
