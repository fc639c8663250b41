import type { Effects } from '../effects.ts';
import type { LogAppend, LogChunk } from '../store/logs.ts';

export interface LogKeeperOptions {
  /** Of the beginning, this much is kept. */
  headBytes: number;
  /** Of the end, at least this much, and less than one chunk more. */
  tailBytes: number;
  /** What must not be read in a log; short ones are not hidden, see maskFor. */
  secrets: readonly string[];
  effects: Effects;
  /** Called with one thing at a time. When it rejects, all that follows does. */
  write(append: Omit<LogAppend, 'id'>): Promise<void>;
}

export interface LogKeeper {
  /** Resolves at once as long as writing keeps up, later when it does not. Keeps `bytes`: they must not change. */
  append(bytes: Uint8Array): Promise<void>;
  /** Resolves when everything was written; nothing may be appended after it. */
  end(): Promise<void>;
}

/**
 * What a command printed, as it is kept: secrets masked, small writes gathered, the middle of a long log left
 * out. Every length and position counts bytes after masking. Never holds more than about 1 MiB.
 */
export function createLogKeeper({
  headBytes,
  tailBytes,
  secrets,
  effects,
  write,
}: LogKeeperOptions): LogKeeper {
  const mask = maskFor(secrets);
  const tailEnds: number[] = []; // where the chunks of the tail end, oldest first
  let pending: Buffer[] = [];
  let pendingBytes = 0;
  let logBytes = 0;
  let truncated = false;
  let writing: Promise<void> | undefined;
  let failed = false;
  let cancelTimer: (() => void) | undefined;

  return {
    async append(bytes) {
      if (failed) await writing;
      add(mask.push(bytes));
      if (pendingBytes >= CHUNK_MAX_BYTES) startWriting();
      else if (pendingBytes > 0) cancelTimer ??= effects.after(GATHER_MS, startWriting);
      while (pendingBytes >= PENDING_MAX_BYTES) await writing;
    },
    async end() {
      add(mask.end());
      while (pendingBytes > 0 || writing !== undefined) {
        startWriting();
        await writing;
      }
    },
  };

  function add(bytes: Buffer): void {
    if (bytes.length === 0) return;
    pending.push(bytes);
    pendingBytes += bytes.length;
  }

  /** One write after the other. A failed one stays as `writing`, and is what everybody hears of from then on. */
  function startWriting(): void {
    cancelTimer?.();
    cancelTimer = undefined;
    if (writing !== undefined || pendingBytes === 0) return;
    writing = writePending().then(() => {
      writing = undefined;
      if (pendingBytes >= CHUNK_MAX_BYTES) startWriting();
      else if (pendingBytes > 0) cancelTimer ??= effects.after(GATHER_MS, startWriting);
    });
    writing.catch(() => {
      failed = true;
    });
  }

  function writePending(): Promise<void> {
    const bytes = Buffer.concat(pending);
    pending = [];
    pendingBytes = 0;
    const chunks = cut(bytes, logBytes, headBytes);
    logBytes += bytes.length;
    const dropTailBefore = dropOf(chunks);
    return write({ chunks, logBytes, truncated, dropTailBefore, headBytes });
  }

  function dropOf(chunks: LogChunk[]): number | null {
    for (const { start, bytes } of chunks) {
      if (start >= headBytes) tailEnds.push(start + bytes.length);
    }
    const dropped = tailEnds.findIndex((end) => end > logBytes - tailBytes);
    const last = dropped > 0 ? tailEnds[dropped - 1] : undefined;
    if (last === undefined) return null;
    tailEnds.splice(0, dropped);
    truncated = true;
    return last;
  }
}

const CHUNK_MAX_BYTES = 64 * 1024;
const PENDING_MAX_BYTES = 1024 * 1024;
/** Somebody who follows the log does not notice, and a command that prints in dribbles costs 5 writes a second. */
const GATHER_MS = 200;

/** In pieces of at most a chunk; none holds bytes of both the head and the tail. */
function cut(bytes: Buffer, start: number, headBytes: number): LogChunk[] {
  const chunks: LogChunk[] = [];
  for (let from = 0; from < bytes.length; ) {
    const untilHeadEnds = headBytes - (start + from);
    const length = untilHeadEnds > 0 ? Math.min(CHUNK_MAX_BYTES, untilHeadEnds) : CHUNK_MAX_BYTES;
    chunks.push({ start: start + from, bytes: bytes.subarray(from, from + length) });
    from += length;
  }
  return chunks;
}

/** Hides secrets in a text that comes in pieces. */
export interface Mask {
  /** What is certain so far; keeps back what may be the beginning of a secret. */
  push(bytes: Uint8Array): Buffer;
  /** What was kept back. */
  end(): Buffer;
}

/** Shorter values are words such as `true` or `eu-west`: hiding them would make logs unreadable and tell the value. */
const SECRET_MIN_LENGTH = 8;
const MASKED = Buffer.from('***');
const NOTHING = Buffer.alloc(0);

/**
 * Replaces every secret of 8 characters or more by `***`: the leftmost, and of several that begin there the
 * longest. The lines of a secret of several lines are secrets too, as programs print them one by one. What
 * comes out does not depend on how the text was cut.
 */
export function maskFor(secrets: readonly string[]): Mask {
  const needles = needlesOf(secrets);
  let held: Buffer = NOTHING;

  return {
    push: (bytes) => (needles.length === 0 ? asBuffer(bytes) : replace(joined(held, bytes), false)),
    end: () => replace(held, true),
  };

  function replace(text: Buffer, isLast: boolean): Buffer {
    const pieces: Buffer[] = [];
    const matches = needles.map((needle) => ({ needle, at: -1 }));
    let from = 0;
    for (;;) {
      const match = earliestMatch(text, from, matches);
      const begun = isLast ? text.length : earliestBeginning(text, from, needles);
      if (match === undefined || begun <= match.at) {
        pieces.push(text.subarray(from, begun));
        held = text.subarray(begun);
        return Buffer.concat(pieces);
      }
      pieces.push(text.subarray(from, match.at), MASKED);
      from = match.at + match.needle.length;
    }
  }
}

/** The same for a text that is at hand. */
export function maskText(text: string, secrets: readonly string[]): string {
  const mask = maskFor(secrets);
  return Buffer.concat([mask.push(Buffer.from(text)), mask.end()]).toString();
}

function needlesOf(secrets: readonly string[]): Buffer[] {
  const texts = secrets.flatMap((secret) => [secret, ...secret.split(/\r?\n/)]);
  return [...new Set(texts)]
    .filter(({ length }) => length >= SECRET_MIN_LENGTH)
    .map((text) => Buffer.from(text));
}

interface Match {
  needle: Buffer;
  /** Where it occurs next; Infinity when it does not. */
  at: number;
}

function earliestMatch(text: Buffer, from: number, matches: Match[]): Match | undefined {
  let best: Match | undefined;
  for (const match of matches) {
    if (match.at < from) {
      const at = text.indexOf(match.needle, from);
      match.at = at === -1 ? Number.POSITIVE_INFINITY : at;
    }
    if (match.at === Number.POSITIVE_INFINITY) continue;
    const isBetter =
      best === undefined ||
      match.at < best.at ||
      (match.at === best.at && match.needle.length > best.needle.length);
    if (isBetter) best = match;
  }
  return best;
}

/** Where the text ends with the beginning of a needle, the leftmost of such places; the text's end if with none. */
function earliestBeginning(text: Buffer, from: number, needles: Buffer[]): number {
  let earliest = text.length;
  for (const needle of needles) {
    const first = needle[0] ?? 0;
    let at = text.indexOf(first, Math.max(from, text.length - needle.length + 1));
    while (at !== -1 && at < earliest) {
      if (text.compare(needle, 0, text.length - at, at) === 0) earliest = at;
      else at = text.indexOf(first, at + 1);
    }
  }
  return earliest;
}

function joined(held: Buffer, bytes: Uint8Array): Buffer {
  return held.length === 0 ? asBuffer(bytes) : Buffer.concat([held, bytes]);
}

function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
