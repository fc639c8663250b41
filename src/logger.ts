import { constants, openSync } from 'node:fs';
import { isatty } from 'node:tty';
import { type Logger, pino } from 'pino';
import type { LogLevel } from './config.ts';
import { timestamp } from './domain.ts';
import type { Effects } from './effects.ts';
import { codeOf, messageOf } from './errors.ts';
import { logText } from './log-text.ts';

export type { Logger };

/** JSON lines for programs; text for people, with colours where their terminal shows them. */
type LogForm = 'json' | 'text' | 'colours';

export interface LogOptions {
  level: LogLevel;
  form: LogForm;
}

/** How much text is buffered while stderr accepts none, as its reader stalls or its disk is full; more is dropped. */
const BUFFERED_MAX_CHARACTERS = 1024 * 1024;
const RETRY_MS = 100;

/** How long an exit retries to write what is buffered: a reader that is alive has made room by then. */
const LAST_TRIES = 20;
const LAST_TRY_MS = 10;

const BATCH_MS = 10;
const BATCH_MAX_PIECES = 16;

/**
 * PIPE_BUF, pipe(7): a full pipe takes so much as a whole or not at all, so that no other thread writes into the middle
 * of a line. Only a longer line, with several stacks, can be cut, and on a terminal that stalls any line, as that takes
 * what it has room for.
 */
const PIECE_MAX_BYTES = 4096;

const CAUSES_MAX = 5;

type LogEffects = Pick<Effects, 'after' | 'block' | 'now'>;

/** A logger that writes lines to stderr. Each thread has its own, on the same file descriptor. */
export function createLogger({ level, form }: LogOptions, effects: LogEffects): Logger {
  const lines = batched(openStderr(effects), effects);
  return pino(
    {
      level,
      base: null,
      timestamp: () => `,"time":"${timestamp(effects.now())}"`,
      formatters: { level: (label) => ({ level: label }) },
      serializers: { err: errorFields },
    },
    form === 'json'
      ? lines
      : { ...lines, write: (line: string) => lines.write(logText(line, form === 'colours')) },
  );
}

interface LogFile {
  write(text: string): void;
  /** Blocks for a moment to write what is still buffered. */
  finish(): void;
}

/**
 * stderr, written to without blocking: davit's work matters more than its log, whose reader may stall, as a pager, a
 * collector of container logs or a terminal at ^S does.
 */
function openStderr(effects: LogEffects): LogFile {
  const stderr = pino.destination({
    fd: nonBlockingStderr(),
    sync: true,
    maxLength: BUFFERED_MAX_CHARACTERS,
    maxWrite: PIECE_MAX_BYTES,
    retryEAGAIN: () => false, // by default the library blocks the thread until the pipe has room
  });
  let isRefused = false;
  let willRetry = false;
  stderr.on('error', () => {
    isRefused = true;
    if (!willRetry) effects.after(RETRY_MS, retry);
    willRetry = true;
  });
  // The library retries only when it accepts a line, and with a full buffer it accepts only an empty one.
  stderr.on('drop', () => write(''));
  return {
    write,
    finish() {
      for (let tries = LAST_TRIES; isRefused && tries > 0; tries--) {
        effects.block(LAST_TRY_MS);
        write('');
      }
    },
  };

  function write(text: string): void {
    isRefused = false;
    stderr.write(text);
  }

  function retry(): void {
    willRetry = false;
    if (isRefused) write('');
  }
}

/**
 * Node makes pipes and sockets non-blocking, but has writes to a terminal wait: one that stalled held up all of davit, and
 * its stop too. Not set on the terminal itself, which others write to as well.
 */
function nonBlockingStderr(): number {
  if (!isatty(2)) return 2;
  try {
    return openSync('/proc/self/fd/2', constants.O_WRONLY | constants.O_NONBLOCK | constants.O_NOCTTY);
  } catch {
    return 2; // another user's terminal, as under su
  }
}

/**
 * Writes the lines of 10 ms together, in pieces of PIECE_MAX_BYTES: one write for each line was a twelfth of the cost of
 * a request. No line is lost at an exit or an uncaught error; SIGKILL loses those of the last 10 ms, and so does
 * terminating a thread without `logger.flush`.
 */
function batched(file: LogFile, effects: LogEffects) {
  let pieces: string[] = [];
  let lastBytes = 0;
  process.on('exit', finish);
  return {
    write(line: string): void {
      if (pieces.length === 0) effects.after(BATCH_MS, flush);
      const bytes = Buffer.byteLength(line);
      if (pieces.length > 0 && lastBytes + bytes <= PIECE_MAX_BYTES) {
        pieces[pieces.length - 1] += line;
        lastBytes += bytes;
      } else {
        pieces.push(line);
        lastBytes = bytes;
      }
      if (pieces.length > BATCH_MAX_PIECES) flush();
    },
    /** For `logger.flush`. */
    flush: finish,
    /** pino calls it after a fatal line. */
    flushSync: flush,
  };

  function finish(): void {
    flush();
    file.finish();
  }

  function flush(): void {
    const written = pieces;
    pieces = [];
    for (const piece of written) file.write(piece);
  }
}

/** JSON unless `stderr` is a terminal. `hasColors` respects NO_COLOR. */
export function logFormOf(stderr: { isTTY?: boolean; hasColors?(): boolean }): LogForm {
  if (stderr.isTTY !== true) return 'json';
  return stderr.hasColors?.() === true ? 'colours' : 'text';
}

/** Only these fields. pino's serializer logs every property, and an error of a library may carry a whole request. */
function errorFields(error: unknown, depth = 0): unknown {
  const message = messageOf(error);
  if (!(error instanceof Error)) return { message };
  const code = 'code' in error && typeof error.code === 'string' ? { code: codeOf(error) } : {};
  const cause =
    error.cause === undefined || depth === CAUSES_MAX ? {} : { cause: errorFields(error.cause, depth + 1) };
  const stack = error.stack?.replace(error.message, () => message);
  return { type: error.name, ...code, message, stack, ...cause };
}
