import { constants, lstatSync, mkdtempSync, openSync, readdirSync, readSync, rmSync } from 'node:fs';
import { Socket } from 'node:net';
import { join } from 'node:path';
import type { Effects } from '../effects.ts';
import { bootId, isAlive, processIdentity } from './processes.ts';

/** A pipe that nobody has used yet: open for reading here, by name for the writer. */
export interface UnusedPipe {
  path: string;
  descriptor: number;
  /** Its name is needed no longer. */
  release(): void;
}

export interface PipePool {
  /** Rejects when no pipe can be made. */
  take(): Promise<UnusedPipe>;
  /** Makes some in advance; rejects likewise. */
  fill(): Promise<void>;
  /** Removes the names of all of them. */
  close(): void;
}

interface PipePoolOptions {
  /** Where a private directory for the pipes is made. */
  directory: string;
  /** Makes named pipes at these paths; rejects when it cannot. */
  makePipes(paths: string[]): Promise<void>;
}

/**
 * Pipes for what commands print, made some dozens at a time, as it takes a program to make them. Each is
 * used once: a daemon that an earlier command left cannot write into a later one's log.
 */
export function createPipePool({ directory, makePipes }: PipePoolOptions): PipePool {
  const folders = new Map<string, { pathsLeft: number }>();
  let paths: string[] = [];
  let filling: Promise<void> | undefined;

  removeStaleFolders(directory);
  return { take, fill, close };

  async function take(): Promise<UnusedPipe> {
    for (;;) {
      const path = paths.pop();
      if (path === undefined) {
        await fill();
        continue;
      }
      // What cannot be made in advance is found out, and told, when there is none left.
      if (paths.length < REFILL_BELOW) fill().catch(() => undefined);
      const descriptor = openIfThere(path);
      // Somebody who tidies up temporary files may have been here.
      if (descriptor === undefined) leave(path);
      else return { path, descriptor, release: () => leave(path) };
    }
  }

  function fill(): Promise<void> {
    filling ??= makeFolder().finally(() => {
      filling = undefined;
    });
    return filling;
  }

  async function makeFolder(): Promise<void> {
    const folder = mkdtempSync(join(directory, folderPrefix()));
    const made = Array.from({ length: PIPES_PER_FOLDER }, (_, number) => join(folder, String(number)));
    folders.set(folder, { pathsLeft: made.length });
    try {
      await makePipes(made);
    } catch (error) {
      removeFolder(folder);
      throw error;
    }
    paths = [...made, ...paths];
  }

  function leave(path: string): void {
    const folder = join(path, '..');
    const entry = folders.get(folder);
    if (entry === undefined) return;
    entry.pathsLeft -= 1;
    if (entry.pathsLeft === 0) removeFolder(folder);
  }

  function removeFolder(folder: string): void {
    folders.delete(folder);
    rmSync(folder, { recursive: true, force: true });
  }

  function close(): void {
    paths = [];
    for (const folder of folders.keys()) removeFolder(folder);
  }
}

const PIPES_PER_FOLDER = 32;
const REFILL_BELOW = 8;

const FOLDER_FORM = /^davit-pipes-(\d+)-(\d+)-/;

/** Names the process that it belongs to, so that one that was left behind is known as such. */
function folderPrefix(): string {
  const self = processIdentity(process.pid);
  return `davit-pipes-${process.pid}-${self?.processStartedAt ?? 0}-`;
}

/** A directory that cannot be read is told of when a folder is to be made in it. */
function removeStaleFolders(directory: string): void {
  for (const name of namesIn(directory)) {
    const [, processId, processStartedAt] = FOLDER_FORM.exec(name) ?? [];
    if (processId === undefined || processStartedAt === undefined) continue;
    const owner = {
      processId: Number(processId),
      processStartedAt: Number(processStartedAt),
      bootId: bootId(),
    };
    const path = join(directory, name);
    if (!isAlive(owner) && isOwnDirectory(path)) rmSync(path, { recursive: true, force: true });
  }
}

function namesIn(directory: string): string[] {
  try {
    return readdirSync(directory);
  } catch {
    return [];
  }
}

/** The directory is often one where everybody may write: what others put there under our names stays theirs. */
function isOwnDirectory(path: string): boolean {
  const stat = lstatSync(path, { throwIfNoEntry: false });
  return stat?.isDirectory() === true && stat.uid === process.getuid?.();
}

function openIfThere(path: string): number | undefined {
  try {
    return openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  } catch (error) {
    if (error instanceof Error && 'code' in error && error.code === 'ENOENT') return undefined;
    throw error;
  }
}

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
