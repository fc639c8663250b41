import { closeSync, readSync } from 'node:fs';
import { Socket } from 'node:net';
import type { Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import { inTurn as inTurnOfThread } from '../turns.ts';

/** A pipe that is being read. */
export interface PipeReading {
  /**
   * Resolves when all is handed on and every writer has closed the pipe, or `finish` was called. Rejects as `onBytes`
   * does.
   */
  ended: Promise<void>;
  /** To be called when the command has ended: what the pipe holds is handed on at once. */
  handOnNow(): void;
  /** Hands on what the pipe holds now, and ends, even if a process still has it open. */
  finish(): void;
}

export interface PipeReader {
  /**
   * Hands on what arrives, in pieces of 128 KiB at most; while `onBytes` is busy the pipe fills and its writers block.
   */
  read(descriptor: number, onBytes: (bytes: Uint8Array) => Promise<void>): PipeReading;
  /** Closes every pipe that is still open. */
  close(): void;
}

/**
 * Reads pipes. A pipe that a daemon still holds open after its reading has ended is drained slowly, and the output
 * discarded: a closed pipe would kill the daemon with SIGPIPE at its next write, and a full one would block it. At most
 * `LEFT_OPEN_MAX` pipes are kept like that; then the oldest is closed.
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
      handOnNow: () => begin('now'),
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
        if (how === 'now' && (await handOnShort())) {
          closeSync(descriptor);
          return;
        }
      } catch (error) {
        readOn(opened(descriptor));
        throw error;
      }
      await watch(opened(descriptor));
    }

    /** Whether that was all: every writer has closed the pipe. */
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

    async function watch(socket: Socket): Promise<void> {
      for (const event of ['readable', 'end', 'close']) socket.on(event, () => wake());
      try {
        for (;;) {
          const bytes: Buffer | null = socket.read();
          if (bytes !== null) {
            // Readers take turns: a command that prints as fast as it is read would fill one turn of the event loop
            // with 2 MiB. Not when finishing: each turn waited for would bring more output, and so no end.
            await (finishing ? onBytes(bytes) : inTurn(() => onBytes(bytes), descriptor));
          } else if (socket.readableEnded || socket.destroyed) {
            return;
          } else if (finishing) {
            // The socket's buffer is empty, and the event loop has not turned since: only the pipe can hold more.
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
      leftOpen.delete(oldest); // not only at its 'close': more pipes may be added before that
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
 * If a command ends sooner, its output waits in the pipe and is read once, at its end: two system calls in place of a
 * dozen and a turn of the event loop.
 */
const WATCH_AFTER_MS = 10;

const READ_BYTES = 64 * 1024;
const scratch = Buffer.allocUnsafeSlow(READ_BYTES);
/** What a pipe can hold, unless root made it larger: /proc/sys/fs/pipe-max-size, pipe(7). */
const PIPE_MAX_BYTES = 1024 * 1024;

/** What one call reads from the pipe; empty: every writer has closed it; undefined: it holds nothing now. */
function readNow(descriptor: number): Buffer | undefined {
  try {
    return Buffer.from(scratch.subarray(0, readSync(descriptor, scratch)));
  } catch (error) {
    if (codeOf(error) === 'EAGAIN') return undefined;
    throw error;
  }
}
