import { type Stats, statSync } from 'node:fs';
import { basename } from 'node:path';
import { type Command, Option } from 'commander';
import type { Timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, codeOf, isStorageProblem, messageOf } from '../errors.ts';
import { option, withVariable } from '../options.ts';
import { absolutePath } from '../paths.ts';
import { escapedIn, printable } from '../printable.ts';
import { withoutSecrets } from '../secrets.ts';
import { realPath } from '../store/place.ts';
import type { Store } from '../store/store.ts';
import { walBytesOf } from '../store/wal.ts';
import { fromNow } from './moments.ts';
import type { Terminal } from './terminal.ts';

/** What every command gets from main.ts. */
export interface CommandContext {
  terminal: Terminal;
  /** The words after the name of the program. */
  commandLine: readonly string[];
  environment: Readonly<Record<string, string | undefined>>;
  effects: Effects;
  /** Returns a function that removes the listener. A signal without a listener ends davit at once. */
  onSignal<Name extends SignalName>(names: readonly Name[], listener: (name: Name) => void): () => void;
  /**
   * Ends davit without waiting for a name that is being resolved. If there is one, the caller goes on for milliseconds.
   */
  exit(code: number): void;
  /** The same where other threads may be resolving names. */
  exitWithThreads(code: number): void;
  /**
   * Goes to `/`, as the directory where davit was started may be removed, and threads cannot start then. Paths that are
   * relative to it must have been resolved before.
   */
  leaveDirectory(): void;
}

/** 128 and the signal's number, as shells do. SIGHUP is sent when a terminal is closed. */
export const EXIT_CODE_OF_SIGNAL = { SIGHUP: 129, SIGINT: 130, SIGUSR1: 138, SIGTERM: 143 } as const;
type SignalName = keyof typeof EXIT_CODE_OF_SIGNAL;

/** Adds options, arguments, subcommands and the action to a command that has its name and summary. */
export type DefineCommand = (command: Command, context: CommandContext) => void;

/** Whether Node has replaced bytes that were not valid UTF-8 by U+FFFD: what they were is lost. */
export function holdsReplaced(text: string): boolean {
  return text.includes('\ufffd');
}

/** Ends davit with exit code 1; the command has printed the reason already. */
export class Refusal extends Error {
  override readonly name = 'Refusal';
}

/**
 * A mandatory option. Commander's own mandatory options are reported missing before an unknown option is, though a typo
 * in an option is mostly why one is missing.
 */
export class RequiredOption extends Option {}

/** The same as `option`, but mandatory. */
export function requiredOption(flags: string, description: string): Option {
  return withVariable(new RequiredOption(flags, description));
}

/** For every command that prints a result. */
export function jsonOption(): Option {
  return option('--json', 'print one JSON value');
}

/** Ends davit with exit code 2, the message, and a hint at the command's help. */
export function misused(command: Command, message: string): never {
  return command.error(`error: ${message}`);
}

/** Gives a command a description and examples. */
export function explain(command: Command, text: string, examples: readonly string[]): Command {
  const lines = examples.map((example) => `  $ ${example}`);
  return command.description(text).addHelpText('after', `\nExamples:\n${lines.join('\n')}`);
}

/**
 * Opens the file for `action`, and closes it in any case. Only commands that may come first create a missing file, and
 * say so: otherwise a wrong path would look like an empty file. Throws AppError.
 */
export async function withStore<Result>(
  command: Command,
  { effects, terminal }: CommandContext,
  whenMissing: 'create' | 'refuse',
  action: (store: Store) => Promise<Result> | Result,
): Promise<Result> {
  const path = whenMissing === 'refuse' ? existingDbPathOf(command) : dbPathOf(command);
  // Imported only here, as loading SQLite takes longer than all else that `--help` needs.
  const [{ openStore }, { refuseToOpen }] = await Promise.all([
    import('../store/store.ts'),
    import('../store/may-open.ts'),
  ]);
  refuseToOpen(path, effects);
  const isNew = statusOfFile(path) === undefined;
  const store = openStore(path, effects);
  if (isNew) terminal.note(`created the file ${printable(absolutePath(path))}`);
  try {
    return await action(store);
  } finally {
    await store.close();
  }
}

/**
 * A name may have 255 bytes, and SQLite takes paths of 512. This leaves room for the longest ones beside the file: those
 * of what a restore keeps, and of a copy that is being made.
 */
const NAME_MAX_BYTES = 200;
const PATH_MAX_BYTES = 400;

/**
 * The path of `--db` or DAVIT_DB. An empty one and `:memory:` would be temporary databases of SQLite: they are misuse.
 */
export function dbPathOf(command: Command): string {
  const path = String(command.optsWithGlobals()['db']);
  if (path === '' || path === ':memory:') misused(command, '--db must be the path of a file');
  // better-sqlite3 trims the path, and would open another file.
  if (path.trim() !== path) misused(command, '--db must not begin or end with white space');
  const real = realPath(path);
  if (Buffer.byteLength(basename(real)) > NAME_MAX_BYTES || Buffer.byteLength(real) > PATH_MAX_BYTES) {
    misused(
      command,
      `--db must be a path of at most ${PATH_MAX_BYTES} bytes, the name at its end of at most ${NAME_MAX_BYTES}: files with ` +
        'longer names lie beside it',
    );
  }
  const status = statusOfFile(path);
  if (status !== undefined && !status.isFile()) {
    const kind = status.isDirectory() ? 'a directory' : 'not a regular file';
    throw new AppError('conflict', `${path} is ${kind}: give the path of a file with --db or DAVIT_DB`);
  }
  return path;
}

/** The same; throws AppError `not_found` if the file is missing or empty. */
export function existingDbPathOf(command: Command): string {
  const path = dbPathOf(command);
  const status = statusOfFile(path);
  if (status === undefined) {
    throw new AppError(
      'not_found',
      walBytesOf(path) > 0
        ? `there is no file ${path}, but its -wal is there, which holds a part of it: move the file back`
        : `there is no file ${path}: give its path with --db or DAVIT_DB`,
    );
  }
  if (status.size === 0) {
    throw new AppError(
      'not_found',
      `${path} is not a davit file, as it is empty: choose another one with --db`,
    );
  }
  return path;
}

/** Undefined: nothing is there. Throws AppError `conflict` if that cannot be known. */
function statusOfFile(path: string): Stats | undefined {
  try {
    return statSync(path, { throwIfNoEntry: false });
  } catch (error) {
    const code = codeOf(error);
    throw new AppError(
      'conflict',
      `cannot access ${path} (${code}): run this as a user who can, or choose another file with --db`,
      { cause: error },
    );
  }
}

/** Prints one JSON value to stdout, with the API's field names, and without control characters. */
export function printJson({ terminal }: CommandContext, value: unknown): void {
  terminal.print(escapedIn(JSON.stringify(value, null, 2)));
}

/**
 * Prints `word`, the id or the secret of what was made, alone on stdout, so that $(…) takes it; `text`, for people,
 * goes to stderr. With `--json`, prints all of `made` and nothing else.
 */
export function printMade<Made>(
  context: CommandContext,
  { json }: { json?: boolean },
  made: Made,
  text: string,
  word: string,
): void {
  if (json === true) {
    printJson(context, made);
    return;
  }
  context.terminal.note(text);
  context.terminal.print(word);
}

/** The options of a command that asks before it changes anything. */
export interface ConfirmedOptions {
  yes?: boolean;
  json?: boolean;
}

/**
 * Returns only after `--yes`, or when the user says yes. Otherwise ends with exit code 1, or 2 if there is no terminal
 * to ask on.
 */
export async function confirm(
  command: Command,
  question: string,
  yes: boolean | undefined,
  { terminal }: CommandContext,
): Promise<void> {
  if (yes === true) return;
  const answer = await terminal.ask(`${question} [y/N] `);
  if (answer === null)
    misused(command, 'this must be confirmed, but there is no terminal to ask on: give --yes');
  if (isYes(answer)) return;
  terminal.note('nothing was changed');
  throw new Refusal('not confirmed');
}

/** Whether an answer is yes. */
export function isYes(answer: string): boolean {
  return /^y(es)?$/i.test(answer);
}

/** On a terminal such as `3h ago`, else ISO 8601. */
export function moment({ terminal, effects }: CommandContext, at: Timestamp): string {
  return terminal.columns === null ? at : fromNow(at, effects.now());
}

/** ISO 8601, and on a terminal also how long ago that is. */
export function exactMoment(context: CommandContext, at: Timestamp): string {
  return context.terminal.columns === null ? at : `${at} (${moment(context, at)})`;
}

/** `exactMoment` for moments that may not have come: null stays null. */
export function exactMomentOf(context: CommandContext): (at: Timestamp | null) => string | null {
  return (at) => (at === null ? null : exactMoment(context, at));
}

/** Keeps the process alive until it is disposed of, which neither timers of `effects` nor open files do. */
export function stayAlive(): Disposable {
  const { port1 } = new MessageChannel();
  port1.ref();
  return { [Symbol.dispose]: () => port1.close() };
}

/** An error as one line; only a bug of davit comes with its stack. */
export function errorText(error: unknown): string {
  return `error: ${problemText(error)}`;
}

/** The same without `error: `. */
export function problemText(error: unknown): string {
  if (error instanceof AppError) return printable(withoutSecrets(error.message));
  if (!(error instanceof Error)) return String(error);
  if ('syscall' in error && error.syscall === 'uv_cwd') {
    return 'the current directory was removed: change to another one, or give paths that begin with /';
  }
  // A system call failed, for a port or a file: the message says enough.
  if ('syscall' in error) return printable(withoutSecrets(messageOf(error)));
  if (isStorageProblem(error)) return storageText(error);
  return `davit failed, which is a bug: ${error.stack ?? error.message}`;
}

function storageText(error: Error): string {
  return codeOf(error).startsWith('SQLITE_BUSY')
    ? 'another process keeps the database locked: try again when it has ended'
    : `the database cannot be used (${printable(error.message)}): 'davit doctor' tells more`;
}
