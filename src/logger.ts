import { type Logger, pino } from 'pino';
import type { LogLevel } from './config.ts';
import { timestamp } from './domain.ts';
import type { Effects } from './effects.ts';
import { logText } from './log-text.ts';

export type { Logger };

/** JSON lines for programs; text for people, with colours where their terminal shows them. */
export type LogForm = 'json' | 'text' | 'colours';

export interface LogOptions {
  level: LogLevel;
  form: LogForm;
}

/** What waits for a log that takes nothing at the moment, on a full disk for instance; more is lost. */
const WAITING_MAX_CHARACTERS = 1024 * 1024;

const GATHERED_MS = 10;
const GATHERED_MAX_CHARACTERS = 64 * 1024;

const CAUSES_MAX = 5;

/** Lines on stderr; threads write to the same descriptor. */
export function createLogger({ level, form }: LogOptions, effects: Pick<Effects, 'after' | 'now'>): Logger {
  const stderr = pino.destination({ fd: 2, sync: true, maxLength: WAITING_MAX_CHARACTERS });
  // There is nowhere left to say it, and what davit does matters more than its log.
  stderr.on('error', () => undefined);
  // The library tries again only with a line that it takes, and once too much waits it takes none but this.
  stderr.on('drop', () => stderr.write(''));
  const lines = gathered((text) => stderr.write(text), effects);
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

/**
 * What is said within a moment is written together: a write for each line was a twelfth of what a request costs. An
 * exit loses none, nor does an error that nobody caught; a kill those of the moment.
 */
function gathered(write: (text: string) => void, effects: Pick<Effects, 'after'>) {
  let text = '';
  process.on('exit', flush);
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
    if (text !== '') write(text);
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
