import type { Effects } from '../effects.ts';
import { endsLine, type LogAppend, type LogChunk } from '../store/logs.ts';
import { maskFor } from './mask.ts';

interface LogKeeperOptions {
  /** How much of the beginning is kept. */
  headBytes?: number;
  /** How much of the end is kept at least; less than one chunk more is kept. */
  tailBytes?: number;
  /** What is hidden in the log, but for short ones: see maskFor. */
  secrets: readonly string[];
  effects: Effects;
  /** Not called again before it has resolved. When it rejects, so do all later calls of the keeper. */
  write(append: Omit<LogAppend, 'id'>): Promise<void>;
}

export interface LogKeeper {
  /** Resolves at once while writing keeps up, later when it does not. Keeps `bytes`: they must not change. */
  append(bytes: Uint8Array): Promise<void>;
  /** From now on `append` does not wait: little more comes, and whoever hands it on must not wait for a full disk. */
  waitNoMore(): void;
  /** Adds a message of davit's own, on a line of its own. */
  appendLine(text: string): Promise<void>;
  /** Resolves when everything is written; nothing may be appended after it. */
  end(): Promise<void>;
}

/**
 * Keeps what a command prints: masks secrets, gathers small writes and leaves out the middle of a long log. All lengths
 * and positions count bytes after masking. Never holds more than about 1 MiB in memory.
 */
export function createLogKeeper({
  headBytes = HEAD_BYTES,
  tailBytes = TAIL_BYTES,
  secrets,
  effects,
  write,
}: LogKeeperOptions): LogKeeper {
  const mask = maskFor(secrets);
  const tailEnds: number[] = []; // where the chunks of the tail end, oldest first
  let pending: Buffer[] = [];
  let pendingBytes = 0;
  let logBytes = 0;
  let writing: Promise<void> | undefined;
  let failed = false;
  let cancelTimer: (() => void) | undefined;
  let midLine = false;
  let mayWait = true;
  /** Ends the waits of `append`. */
  const waiting = new Set<() => void>();

  return {
    append,
    waitNoMore() {
      mayWait = false;
      for (const goOn of waiting) goOn();
    },
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
    while (pendingBytes >= PENDING_MAX_BYTES && mayWait) await waitForWrite();
  }

  /** With a promise for each call: one for all of them would keep what waits for it until the end of the command. */
  async function waitForWrite(): Promise<void> {
    const { promise: toldToGoOn, resolve } = Promise.withResolvers<void>();
    waiting.add(resolve);
    await Promise.race([writing, toldToGoOn]).finally(() => waiting.delete(resolve));
  }

  function add(bytes: Buffer): void {
    if (bytes.length === 0) return;
    pending.push(bytes);
    pendingBytes += bytes.length;
    if (pending.length === PENDING_MAX_PIECES) pending = [Buffer.concat(pending)];
  }

  function writeWhenGathered(): void {
    if (pendingBytes >= CHUNK_MAX_BYTES) startWriting();
    else if (pendingBytes > 0) cancelTimer ??= effects.after(GATHER_MS, startWriting);
  }

  /** One write at a time. A failed one stays in `writing`, so that every later call rejects with its error. */
  function startWriting(): void {
    cancelTimer?.();
    cancelTimer = undefined;
    if (writing !== undefined) return;
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
    return write({ chunks, logBytes, dropTailBefore, headBytes });
  }

  /** The end of the last tail chunk that drops out of the tail once `chunks` are added; null: none does. */
  function dropOf(chunks: LogChunk[]): number | null {
    for (const { start, bytes } of chunks) {
      if (start >= headBytes) tailEnds.push(start + bytes.length);
    }
    const dropped = tailEnds.findIndex((end) => end > logBytes - tailBytes);
    const last = dropped > 0 ? tailEnds[dropped - 1] : undefined;
    if (last === undefined) return null;
    tailEnds.splice(0, dropped);
    return last;
  }
}

const HEAD_BYTES = 256 * 1024;
const TAIL_BYTES = 5 * 1024 * 1024;
const CHUNK_MAX_BYTES = 64 * 1024;
const PENDING_MAX_BYTES = 1024 * 1024;
/** A Buffer takes some 650 bytes, however few it holds: 290,000 pieces of one byte took 190 MiB. */
const PENDING_MAX_PIECES = 1_024;
/** Too short for a follower of the log to notice; a command that prints in dribbles costs only 5 writes a second. */
const GATHER_MS = 200;

/** Cuts into chunks, none of which has bytes of both the head and the tail. */
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
