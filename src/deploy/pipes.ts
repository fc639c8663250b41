import { closeSync, readSync } from 'node:fs';
import { Socket } from 'node:net';
import { delay, type Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import { inTurn as inTurnOfThread } from '../turns.ts';

/** What is read from a pipe. */
export interface PipeReading {
  /** Resolves when every writer has closed it, or `finish` was called, and all was handed on. Rejects as `onBytes` does. */
  ended: Promise<void>;
  /** Whoever was started with the pipe has ended: what is in it is handed on at once. */
  hurry(): void;
  /** Hands on what is in the pipe now, and ends, whether or not somebody still holds it open. */
  finish(): void;
}

export interface PipeReader {
  /** Hands on what arrives, in pieces of 128 KiB at most; while `onBytes` is busy the pipe fills and its writers wait. */
  read(descriptor: number, onBytes: (bytes: Uint8Array) => Promise<void>): PipeReading;
  /** Closes all that is still open. */
  close(): void;
}

/**
 * Reads pipes. One that is held open beyond its reading's end, by a daemon that a command left, is read on
 * and what comes is thrown away, slowly: closed, it would end the daemon with SIGPIPE at its next line, and
 * full, it would stop it. At most `LEFT_OPEN_MAX` are kept like that; then the oldest is closed.
 */
export function createPipeReader(effects: Effects, { inTurn = inTurnOfThread } = {}): PipeReader {
  const open = new Set<Socket>();
  const leftOpen = new Set<Socket>();

  return { read, close };

  function read(descriptor: number, onBytes: (bytes: Uint8Array) => Promise<void>): PipeReading {
    const { promise: begun, resolve: begin } = Promise.withResolvers<'now' | 'watch'>();
    const cancelBegin = effects.after(WATCH_AFTER_MS, () => begin('watch'));
    let wake = () => {};
    let finishing = false;
    return {
      ended: handOn(),
      hurry: () => begin('now'),
      finish() {
        finishing = true;
        begin('now');
        wake();
      },
    };

    async function handOn(): Promise<void> {
      const how = await begun;
      cancelBegin();
      try {
        if (how === 'now' && (await handOnLast())) {
          closeSync(descriptor);
          return;
        }
      } catch (error) {
        readOn(opened(descriptor));
        throw error;
      }
      await watch(opened(descriptor));
    }

    /** Whether that was all, as it is when every writer has ended. */
    async function handOnShort(): Promise<boolean> {
      for (let leftBytes = PIPE_MAX_BYTES; leftBytes > 0; ) {
        const bytes = readNow(descriptor);
        if (bytes === undefined) return false;
        if (bytes.length === 0) return true;
        await onBytes(bytes);
        leftBytes -= bytes.length;
      }
      return false;
    }

    /** The same of a command that has ended, with patience for those that are being started. */
    async function handOnLast(): Promise<boolean> {
      for (const pauseMs of STARTING_MS) {
        if (await handOnShort()) return true;
        if (finishing) return false;
        await delay(pauseMs, effects);
      }
      return await handOnShort();
    }

    async function watch(socket: Socket): Promise<void> {
      for (const event of ['readable', 'end', 'close']) socket.on(event, () => wake());
      try {
        for (;;) {
          const bytes: Buffer | null = socket.read();
          if (bytes !== null) {
            // Of each who prints as fast as it is read, one turn of the event loop would bring 2 MiB. To finish, no turn
            // is waited for: it would bring more, and so no end.
            await (finishing ? onBytes(bytes) : inTurn(() => onBytes(bytes)));
          } else if (socket.readableEnded || socket.destroyed) {
            return;
          } else if (finishing) {
            // Nothing is buffered, and the event loop has not turned since: what is in the pipe comes next.
            await handOnShort();
            return;
          } else {
            await new Promise<void>((resolve) => {
              wake = resolve;
            });
          }
        }
      } finally {
        if (socket.readableEnded) socket.destroy();
        else if (!socket.destroyed) readOn(socket);
      }
    }
  }

  function opened(descriptor: number): Socket {
    const socket = new Socket({ fd: descriptor, readable: true, writable: false });
    open.add(socket);
    socket.on('error', () => socket.destroy());
    socket.on('close', () => {
      open.delete(socket);
      leftOpen.delete(socket);
    });
    return socket;
  }

  function readOn(socket: Socket): void {
    leftOpen.add(socket);
    const [oldest] = leftOpen;
    if (leftOpen.size > LEFT_OPEN_MAX && oldest !== undefined) {
      leftOpen.delete(oldest); // at once: others may follow before it is closed
      oldest.destroy();
    }
    socket.unref();
    socket.removeAllListeners('readable');
    socket.on('data', () => {
      socket.pause();
      effects.after(LEFT_OPEN_PAUSE_MS, () => socket.resume());
    });
    socket.resume();
  }

  function close(): void {
    for (const socket of open) socket.destroy();
  }
}

const LEFT_OPEN_MAX = 100;
const LEFT_OPEN_PAUSE_MS = 50;

/**
 * A command that ends sooner is read once, when it has ended: two calls in place of a dozen and a turn of the event
 * loop. What it prints waits in the pipe.
 */
const WATCH_AFTER_MS = 10;

/**
 * From its fork to its program a command has whatever davit has open, so also the pipes of others: with eight at a time one
 * in nine was met so, and to watch a pipe takes 100 µs.
 */
const STARTING_MS = [1, 2, 4];

const READ_BYTES = 64 * 1024;
const scratch = Buffer.allocUnsafeSlow(READ_BYTES);
/** What a pipe can hold, unless root made it larger: /proc/sys/fs/pipe-max-size, pipe(7). */
const PIPE_MAX_BYTES = 1024 * 1024;

/** What is in the pipe, as far as one call takes it; empty: every writer has closed it; undefined: nothing now. */
function readNow(descriptor: number): Buffer | undefined {
  try {
    return Buffer.from(scratch.subarray(0, readSync(descriptor, scratch)));
  } catch (error) {
    if (codeOf(error) === 'EAGAIN') return undefined;
    throw error;
  }
}
