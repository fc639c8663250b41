import type { Effects } from '../effects.ts';
import { endsLine, type LogAppend, type LogChunk } from '../store/logs.ts';
import { maskFor } from './mask.ts';

interface LogKeeperOptions {
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
  /** What davit itself has to say, on a line of its own. */
  appendLine(text: string): Promise<void>;
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
  let midLine = false;

  return {
    append,
    appendLine: (text) => append(Buffer.from(`${midLine ? '\n' : ''}${text}\n`)),
    async end() {
      add(mask.end());
      while (pendingBytes > 0 || writing !== undefined) {
        startWriting();
        await writing;
      }
    },
  };

  async function append(bytes: Uint8Array): Promise<void> {
    if (failed) await writing;
    if (bytes.length > 0) midLine = !endsLine(bytes);
    add(mask.push(bytes));
    writeWhenGathered();
    while (pendingBytes >= PENDING_MAX_BYTES) await writing;
  }

  function add(bytes: Buffer): void {
    if (bytes.length === 0) return;
    pending.push(bytes);
    pendingBytes += bytes.length;
  }

  function writeWhenGathered(): void {
    if (pendingBytes >= CHUNK_MAX_BYTES) startWriting();
    else if (pendingBytes > 0) cancelTimer ??= effects.after(GATHER_MS, startWriting);
  }

  /** One write after the other. A failed one stays as `writing`, and is what everybody hears of from then on. */
  function startWriting(): void {
    cancelTimer?.();
    cancelTimer = undefined;
    if (writing !== undefined || pendingBytes === 0) return;
    writing = writePending().then(() => {
      writing = undefined;
      writeWhenGathered();
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
