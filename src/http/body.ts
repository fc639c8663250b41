import type { IncomingMessage } from 'node:http';
import { TLSSocket } from 'node:tls';
import type { Request } from '@hapi/hapi';
import { AppError, invalid } from '../errors.ts';
import { dropBody, giveUpReading } from '../unread.ts';
import { parseJson } from './json.ts';
import type { ReceiveBuffers } from './receive-buffers.ts';

export const BODY_MAX_BYTES = 64 * 1024;

/**
 * Reads the body into `request.payload`: null for no body, else any JSON value but null. hapi would read it only after
 * authentication, and the checks have a promised order. A payload that is already there hapi leaves alone (lib/route.js,
 * `internals.payload`), and still validates.
 */
export async function parseBody(request: Request, buffers: ReceiveBuffers): Promise<void> {
  const bytes = await readBody(request, buffers);
  // The body of a GET or HEAD is read and ignored.
  if (request.route.method === 'get') return;
  // hapi's types say that `payload` is read-only, but its documentation and its own extensions set it.
  Object.assign(request, { payload: bytes.length === 0 ? null : (parseJson(bytes) ?? NULL_BODY) });
}

/** Stands for the body `null`, which schemas could not tell from no body. As a string it is refused by all of them. */
const NULL_BODY = 'null';

async function readBody(request: Request, buffers: ReceiveBuffers): Promise<Buffer> {
  const { req, res } = request.raw;
  if (!announcesBody(req)) return EMPTY;
  const declaredBytes = declaredLength(req);
  if (declaredBytes === 0) return EMPTY;
  if (declaredBytes !== undefined && declaredBytes > BODY_MAX_BYTES) throw tooLarge();
  const isIgnored = request.route.method === 'get';
  // A chunked body may turn out to be empty, so its type is checked after it was read.
  const isChunked = declaredBytes === undefined;
  if (!isIgnored && !isChunked) checkMediaType(req);
  checkTransferCoding(req);
  if (expectsContinue(req)) res.writeContinue();
  const bytes = await collect(req, buffers);
  if (!isIgnored && isChunked && bytes.length > 0) checkMediaType(req);
  return bytes;
}

const EMPTY = Buffer.alloc(0);

function announcesBody({ headers }: IncomingMessage): boolean {
  return headers['content-length'] !== undefined || headers['transfer-encoding'] !== undefined;
}

/** Undefined for a chunked body. Node's parser has checked that it is one number. */
function declaredLength({ headers }: IncomingMessage): number | undefined {
  return headers['transfer-encoding'] === undefined ? Number(headers['content-length']) : undefined;
}

function checkMediaType({ headers }: IncomingMessage): void {
  const [mediaType = '', ...parameters] = (headers['content-type'] ?? '').split(';');
  const charset = parameters.map((parameter) => CHARSET.exec(parameter.trim())?.[1]).find(Boolean) ?? 'utf-8';
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

/** `utf8` without the dash is not a registered name, but common. */
const UTF_8 = /^utf-?8$/i;

/** For a trimmed parameter: with `\s*` at the end too, 15,000 spaces behind the `=` took 150 ms, without a key. */
const CHARSET = /^charset\s*=\s*"?([^"\s]*)"?$/i;

function checkTransferCoding({ headers }: IncomingMessage): void {
  if ((headers['transfer-encoding'] ?? 'chunked').trim().toLowerCase() !== 'chunked') {
    throw invalid('header', 'Transfer-Encoding', 'must be chunked');
  }
}

function expectsContinue({ headers, httpVersion }: IncomingMessage): boolean {
  return httpVersion === '1.1' && headers.expect?.toLowerCase() === '100-continue';
}

/**
 * Beyond this they are merged: each Buffer takes some 400 bytes beside its own. 255 of one byte on each of 4,090
 * connections took 480 MB, which nobody counts; merged, they take 120.
 */
const PIECES_MAX = 32;

/** The whole body. Rejects once it is too large, too shredded or will not arrive, and leaves the rest unread. */
function collect(req: IncomingMessage, buffers: ReceiveBuffers): Promise<Buffer> {
  return new Promise((resolve, reject) => {
    let chunks: Buffer[] = [];
    let size = 0;
    const receiving = buffers.begin(() => fail(tooMany()));
    req.on('data', onData).on('end', onEnd).on('close', onClose).on(INTERRUPTED, fail).on(SHREDDED, fail);
    const problem = interrupted.get(req) ?? (shredded.has(req) ? tooShredded() : undefined);
    if (problem !== undefined) fail(problem);

    function onData(chunk: Buffer): void {
      size += chunk.length;
      receiving.add(chunk.length);
      if (size > BODY_MAX_BYTES) fail(tooLarge());
      else chunks = withPiece(chunks, chunk, size);
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
      receiving.end();
      req
        .off('data', onData)
        .off('end', onEnd)
        .off('close', onClose)
        .off(INTERRUPTED, fail)
        .off(SHREDDED, fail);
    }
  });
}

/** The pieces, `bytes` together, with one more: merged, once there are too many. */
function withPiece(pieces: Buffer[], piece: Buffer, bytes: number): Buffer[] {
  return pieces.push(piece) === PIECES_MAX ? [merge(pieces, bytes)] : pieces;
}

/** In memory of its own: a small result of Buffer.concat keeps 64 KiB alive, which it shares with others. */
function merge(pieces: readonly Buffer[], bytes: number): Buffer {
  const merged = Buffer.allocUnsafeSlow(bytes);
  let at = 0;
  for (const piece of pieces) at += piece.copy(merged, at);
  return merged;
}

function tooLarge(): AppError {
  return new AppError('payload_too_large', `the body must be at most ${BODY_MAX_BYTES} bytes`);
}

function tooMany(): AppError {
  return new AppError('unavailable', 'too many bodies are being received: send it again, and faster', {
    retryAfterSeconds: 5,
  });
}

function tooShredded(): AppError {
  return new AppError('invalid_request', 'the body comes in too many tiny pieces: send it in larger chunks');
}

/**
 * Refuses a body that comes in many tiny pieces, as chunks or as records of TLS, and drops the rest of it: each piece
 * costs some microseconds, whatever its size, and one read can bring thousands. To be called before the first piece.
 */
export function refuseTinyPieces(req: IncomingMessage): void {
  const isTls = req.socket instanceof TLSSocket;
  // Without TLS, one read brings one piece of a body that has no chunks, so they cannot pile up.
  if (!isTls && req.headers['transfer-encoding'] === undefined) return;
  const push = req.push.bind(req);
  let pieces = 0;
  let bytes = 0;
  req.push = (piece: Buffer | null) => {
    if (piece === null) return push(null);
    pieces += 1;
    bytes += piece.length;
    if (pieces <= TINY_PIECES_MAX || bytes >= pieces * TINY_PIECE_BYTES) return push(piece);
    dropBody(req);
    // A record takes some microseconds also if it is dropped.
    if (isTls) giveUpReading(req.socket);
    shredded.add(req);
    req.emit(SHREDDED, tooShredded());
    return true;
  };
}

/** A report of the most outputs that is streamed token by token, as some libraries write JSON, has 409. */
const TINY_PIECES_MAX = 512;
/** Pieces that have as much on the average are not tiny. */
const TINY_PIECE_BYTES = 32;

/** The requests whose bodies came in too many tiny pieces. */
const shredded = new WeakSet<IncomingMessage>();

/** The event that tells the reader of a body that it comes in too many tiny pieces. */
const SHREDDED = Symbol('shredded');

/** Keeps the pieces of a body merged, until the returned function is called: without a reader, they would pile up. */
export function holdBody(req: IncomingMessage): () => void {
  const push = req.push.bind(req);
  let pieces: Buffer[] = [];
  let size = 0;
  let isHeld = true;
  let isComplete = false;
  req.push = (piece: Buffer | null) => {
    if (!isHeld) return push(piece);
    if (piece === null) isComplete = true;
    else {
      size += piece.length;
      pieces = withPiece(pieces, piece, size);
    }
    return true;
  };
  return () => {
    isHeld = false;
    if (size > 0) push(merge(pieces, size));
    if (isComplete) push(null);
  };
}

/**
 * Makes reading the body fail with `problem`, now or when it begins, because the rest of it will not arrive: it is too
 * slow, cut off or not valid HTTP. Node reports that only for the connection, not to the request.
 */
export function interruptBody(req: IncomingMessage, problem: AppError): void {
  interrupted.set(req, problem);
  req.emit(INTERRUPTED, problem);
}

const interrupted = new WeakMap<IncomingMessage, AppError>();

/** The event that tells the reader of a body. */
export const INTERRUPTED = Symbol('interrupted');

/** Whether the request has a body that was not read to its end. */
export function isBodyPending({ raw: { req } }: Request): boolean {
  const isRead = req.complete && req.readableLength === 0;
  return announcesBody(req) && !isRead && !interrupted.has(req);
}
