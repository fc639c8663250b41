import { type Logger, pino } from 'pino';
import type { LogLevel } from './config.ts';
import { timestamp } from './domain.ts';
import type { Effects } from './effects.ts';
import { logText } from './log-text.ts';

export type { Logger };

/** JSON lines for programs; text for people, with colours where their terminal shows them. */
type LogForm = 'json' | 'text' | 'colours';

export interface LogOptions {
  level: LogLevel;
  form: LogForm;
}

/** What waits for a log that takes nothing at the moment, for want of a reader or of room; more is lost. */
const WAITING_MAX_CHARACTERS = 1024 * 1024;
const RETRY_MS = 100;

/** What an exit waits for a log that takes nothing: a reader that lives has made room by then. */
const LAST_TRIES = 20;
const LAST_TRY_MS = 10;

const GATHERED_MS = 10;
const GATHERED_MAX_CHARACTERS = 64 * 1024;

const CAUSES_MAX = 5;

type LogEffects = Pick<Effects, 'after' | 'block' | 'now'>;

/** Lines on stderr; threads write to the same descriptor. */
export function createLogger({ level, form }: LogOptions, effects: LogEffects): Logger {
  const lines = gathered(openStderr(effects), effects);
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
  /** The last that can be done for what waits. */
  finish(): void;
}

/**
 * stderr, which holds nothing up: what davit does matters more than its log, and whoever follows it may stall, as a
 * collector of a container's logs or a pager does. Node has pipes and sockets never block.
 */
function openStderr(effects: LogEffects): LogFile {
  const stderr = pino.destination({
    fd: 2,
    sync: true,
    maxLength: WAITING_MAX_CHARACTERS,
    retryEAGAIN: () => false, // the library would hold up the thread till it has gone
  });
  let isRefused = false;
  let willRetry = false;
  stderr.on('error', () => {
    isRefused = true;
    if (!willRetry) effects.after(RETRY_MS, retry);
    willRetry = true;
  });
  // The library tries again only with a line that it takes, and once too much waits it takes none but this.
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
 * What is said within a moment is written together: a write for each line was a twelfth of what a request costs. An
 * exit loses none, nor does an error that nobody caught; a kill those of the moment.
 */
function gathered(file: LogFile, effects: LogEffects) {
  let text = '';
  process.on('exit', () => {
    flush();
    file.finish();
  });
  return {
    write(line: string): void {
      if (text === '') effects.after(GATHERED_MS, flush);
      text += line;
      if (text.length > GATHERED_MAX_CHARACTERS) flush();
    },
    /** Called by the library after a fatal line. */
    flushSync: flush,
  };

  function flush(): void {
    if (text !== '') file.write(text);
    text = '';
  }
}

/** Which form `stderr` wants. NO_COLOR is heard by `hasColors`. */
export function logFormOf(stderr: { isTTY?: boolean; hasColors?(): boolean }): LogForm {
  if (stderr.isTTY !== true) return 'json';
  return stderr.hasColors?.() === true ? 'colours' : 'text';
}

/** Not all that hangs on an error, as pino has it: a library's may carry the request that it failed at. */
function errorFields(error: unknown, depth = 0): unknown {
  if (!(error instanceof Error)) return { message: String(error) };
  const code = 'code' in error && typeof error.code === 'string' ? { code: error.code } : {};
  const cause =
    error.cause === undefined || depth === CAUSES_MAX ? {} : { cause: errorFields(error.cause, depth + 1) };
  return { type: error.name, ...code, message: error.message, stack: error.stack, ...cause };
}
