import { addAbortSignal, type Readable, type Writable } from 'node:stream';
import { INPUT_MAX_BYTES, tooLarge } from '../read-bounded.ts';

/** The input and the outputs of a command: all that it reads and writes passes here. */
export interface Terminal {
  /** Prints lines of the result to stdout: what a script reads. */
  print(text: string): void;
  /**
   * The same byte for byte. Resolves when stdout has taken the bytes; to false if its reader is gone, and there is no
   * reason to go on.
   */
  write(bytes: Uint8Array): Promise<boolean>;
  /** Resolves when both outputs have taken everything, or cannot take more: a pipe holds only 64 KiB. */
  flushed(): Promise<void>;
  /** Prints a line for people to stderr: a note, a warning or an error. */
  note(text: string): void;
  /** Shows a line on stderr that the next output replaces; only on a terminal that can erase one. */
  progress(text: string): void;
  /** The width of the terminal on stdout; null: it is a file or a pipe, for a program to read. */
  readonly columns: number | null;
  /** Whether stdout is a terminal that shows colours, and NO_COLOR is not set. */
  readonly colours: boolean;
  /** Whether stdin is a terminal. */
  readonly inputIsTyped: boolean;
  /** All of stdin, as bytes. Rejects with AppError `invalid_request` if that is more than `INPUT_MAX_BYTES`. */
  readInput(): Promise<Buffer>;
  /** Whether somebody can be asked: stdin and stderr are terminals. */
  readonly canAsk: boolean;
  /**
   * Asks on stderr and waits for a line; null: nobody can be asked. When `signal` aborts, the question counts as
   * answered with an empty line.
   */
  ask(question: string, signal?: AbortSignal): Promise<string | null>;
}

type Input = Readable & { isTTY?: boolean };
type Output = Writable & { isTTY?: boolean; columns?: number; hasColors?(): boolean };

const COLUMNS_OF_MOST_TERMINALS = 80;

/**
 * `onOutputLost` is called when stdout fails, so that the result is incomplete; but not when its reader has gone away,
 * as `| head` does.
 */
export function createTerminal(
  streams: { stdin: Input; stdout: Output; stderr: Output; env?: { readonly TERM?: string } },
  onOutputLost: (error: Error) => void,
): Terminal {
  const { stdout, stderr } = streams;
  stdout.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code !== 'EPIPE') onOutputLost(error);
  });
  // There is nowhere left to report it.
  stderr.on('error', () => undefined);
  const isDumb = streams.env?.TERM === 'dumb';
  let progressShown = false;

  return {
    print(text) {
      wipeProgress();
      stdout.write(line(text));
    },
    write: (bytes) => taken(stdout, bytes),
    async flushed() {
      await Promise.all([taken(stdout, ''), taken(stderr, '')]);
    },
    note(text) {
      wipeProgress();
      stderr.write(line(text));
    },
    progress(text) {
      if (stderr.isTTY !== true || isDumb) return;
      wipeProgress();
      stderr.write(text.slice(0, columnsOf(stderr) - 1));
      progressShown = true;
    },
    columns: stdout.isTTY === true ? columnsOf(stdout) : null,
    colours: stdout.isTTY === true && stdout.hasColors?.() === true,
    get inputIsTyped() {
      return streams.stdin.isTTY === true;
    },

    async readInput() {
      const pieces: Buffer[] = [];
      let length = 0;
      for await (const piece of streams.stdin) {
        length += piece.length;
        if (length > INPUT_MAX_BYTES) throw tooLarge('stdin');
        pieces.push(piece);
      }
      return Buffer.concat(pieces);
    },

    get canAsk() {
      return canAsk();
    },

    async ask(question, signal) {
      if (!canAsk()) return null;
      wipeProgress();
      stderr.write(question);
      if (signal !== undefined) addAbortSignal(signal, streams.stdin);
      try {
        // The terminal stays in line mode, so that ^C works as usual.
        for await (const chunk of streams.stdin) return String(chunk).trim();
      } catch (error) {
        if (signal?.aborted !== true) throw error;
        stderr.write('\n');
      }
      return '';
    },
  };

  function canAsk(): boolean {
    return streams.stdin.isTTY === true && stderr.isTTY === true;
  }

  function wipeProgress(): void {
    if (!progressShown) return;
    stderr.write(WIPE_LINE);
    progressShown = false;
  }
}

function columnsOf({ columns }: Output): number {
  return columns || COLUMNS_OF_MOST_TERMINALS;
}

/** Resolves when the output has taken these bytes and all before them; to false if it takes no more. */
function taken(output: Output, bytes: Uint8Array | string): Promise<boolean> {
  return new Promise((resolve) => {
    output.write(bytes, (error) => resolve(error === null || error === undefined));
  });
}

/** Goes to the beginning of the line and erases it: ECMA-48, EL. */
const WIPE_LINE = '\r\x1b[K';

function line(text: string): string {
  return text.endsWith('\n') ? text : `${text}\n`;
}
