import { readSync } from 'node:fs';
import { Socket } from 'node:net';
import type { Effects } from '../effects.ts';

/** What is read from a pipe. */
export interface PipeReading {
  /** Resolves when every writer has closed it, or `finish` was called, and all was handed on. Rejects as `onBytes` does. */
  ended: Promise<void>;
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
export function createPipeReader(effects: Effects): PipeReader {
  const open = new Set<Socket>();
  const leftOpen = new Set<Socket>();

  return { read, close };

  function read(descriptor: number, onBytes: (bytes: Uint8Array) => Promise<void>): PipeReading {
    const socket = new Socket({ fd: descriptor, readable: true, writable: false });
    let wake = () => {};
    let finishing = false;
    open.add(socket);
    socket.on('readable', () => wake());
    socket.on('end', () => wake());
    socket.on('error', () => socket.destroy());
    socket.on('close', () => {
      open.delete(socket);
      leftOpen.delete(socket);
      wake();
    });
    return {
      ended: handOn(),
      finish() {
        finishing = true;
        wake();
      },
    };

    async function handOn(): Promise<void> {
      try {
        for (;;) {
          const bytes: Buffer | null = socket.read();
          if (bytes !== null) {
            await onBytes(bytes);
          } else if (socket.readableEnded || socket.destroyed) {
            return;
          } else if (finishing) {
            // Nothing is buffered, and the event loop has not turned since: what is in the pipe comes next.
            for (const rest of readNow(descriptor)) await onBytes(rest);
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

  function readOn(socket: Socket): void {
    leftOpen.add(socket);
    const [oldest] = leftOpen;
    if (leftOpen.size > LEFT_OPEN_MAX) oldest?.destroy();
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

const READ_BYTES = 64 * 1024;
/** What a pipe can hold, unless root made it larger: /proc/sys/fs/pipe-max-size, pipe(7). */
const PIPE_MAX_BYTES = 1024 * 1024;

/** What is in the pipe, without waiting; never more than a pipe holds, as its writers may be quicker than we are. */
function readNow(descriptor: number): Buffer[] {
  const pieces: Buffer[] = [];
  for (let leftBytes = PIPE_MAX_BYTES; leftBytes > 0; ) {
    const piece = Buffer.allocUnsafe(Math.min(READ_BYTES, leftBytes));
    const length = readOrNothing(descriptor, piece);
    if (length === 0) break;
    pieces.push(piece.subarray(0, length));
    leftBytes -= length;
  }
  return pieces;
}

function readOrNothing(descriptor: number, piece: Buffer): number {
  try {
    return readSync(descriptor, piece);
  } catch (error) {
    if (error instanceof Error && 'code' in error && error.code === 'EAGAIN') return 0;
    throw error;
  }
}
