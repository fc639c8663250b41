import type { Readable, Writable } from 'node:stream';
import { buffer } from 'node:stream/consumers';

/** The input and the outputs of a command. Everything that it reads and writes passes here. */
export interface Terminal {
  /** One or more lines of what was asked for, to stdout: what a script reads. */
  print(text: string): void;
  /**
   * The same byte for byte. Resolves when stdout has taken them; to false if it takes no more, and there is
   * nobody to go on for.
   */
  write(bytes: Uint8Array): Promise<boolean>;
  /** Resolves when both outputs have taken all that was given to them, or take no more: a pipe holds 64 KiB. */
  flushed(): Promise<void>;
  /** A line for the person who watches, to stderr: notes, warnings and errors. */
  note(text: string): void;
  /** What is going on, in a line on stderr that the next one takes the place of; nothing where nobody watches. */
  progress(text: string): void;
  /** How wide the terminal on stdout is; null: a file or a pipe, and a program reads it. */
  readonly columns: number | null;
  /** Whether stdout is a terminal that shows colours, and nobody said NO_COLOR. */
  readonly colours: boolean;
  /** Whether somebody types what stdin brings. */
  readonly inputIsTyped: boolean;
  /** All of stdin, as bytes. */
  readInput(): Promise<Buffer>;
  /** Asks on stderr and waits for a line; null where nobody is there to answer. */
  ask(question: string): Promise<string | null>;
}

type Input = Readable & { isTTY?: boolean };
type Output = Writable & { isTTY?: boolean; columns?: number; hasColors?(): boolean };

const COLUMNS_OF_MOST_TERMINALS = 80;

/**
 * `onOutputLost` is called when stdout can take no more for another reason than that its reader went away,
 * as `| head` does: then what was asked for has not arrived.
 */
export function createTerminal(
  streams: { stdin: Input; stdout: Output; stderr: Output },
  onOutputLost: (error: Error) => void,
): Terminal {
  const { stdout, stderr } = streams;
  stdout.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code !== 'EPIPE') onOutputLost(error);
  });
  // There is nowhere left to say it.
  stderr.on('error', () => undefined);
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
      if (stderr.isTTY !== true) return;
      const columns = stderr.columns || COLUMNS_OF_MOST_TERMINALS;
      wipeProgress();
      stderr.write(text.slice(0, columns - 1));
      progressShown = true;
    },
    columns: stdout.isTTY === true ? stdout.columns || COLUMNS_OF_MOST_TERMINALS : null,
    colours: stdout.isTTY === true && stdout.hasColors?.() === true,
    get inputIsTyped() {
      return streams.stdin.isTTY === true;
    },

    readInput: () => buffer(streams.stdin),

    async ask(question) {
      const { stdin } = streams;
      if (stdin.isTTY !== true || stderr.isTTY !== true) return null;
      wipeProgress();
      stderr.write(question);
      // In the terminal's own line mode, so that ^C ends davit as it does everything else.
      for await (const chunk of stdin) return String(chunk).trim();
      return '';
    },
  };

  function wipeProgress(): void {
    if (!progressShown) return;
    stderr.write(WIPE_LINE);
    progressShown = false;
  }
}

/** Resolves when it has these and all before them; to false if it takes no more. */
function taken(output: Output, bytes: Uint8Array | string): Promise<boolean> {
  return new Promise((resolve) => {
    output.write(bytes, (error) => resolve(error === null || error === undefined));
  });
}

/** To the beginning of the line, and nothing in it any more: ECMA-48, EL. */
const WIPE_LINE = '\r\x1b[K';

function line(text: string): string {
  return text.endsWith('\n') ? text : `${text}\n`;
}
