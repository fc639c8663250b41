import { type Stats, statSync } from 'node:fs';
import { resolve } from 'node:path';
import { type Command, Option } from 'commander';
import type { Timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, codeOf, isStorageProblem } from '../errors.ts';
import { option, withVariable } from '../options.ts';
import { escapedIn, printable } from '../printable.ts';
import type { Store } from '../store/store.ts';
import { fromNow } from './moments.ts';
import type { Terminal } from './terminal.ts';
import { withoutSecrets } from './usage.ts';

/** What every command is given; main.ts makes it. */
export interface CommandContext {
  terminal: Terminal;
  /** Without the name of the program. */
  commandLine: readonly string[];
  environment: Readonly<Record<string, string | undefined>>;
  effects: Effects;
  /** Called for each of these signals until the returned function is; a signal without listeners ends davit at once. */
  onSignal<Name extends SignalName>(names: readonly Name[], listener: (name: Name) => void): () => void;
  /** Waits for no name that is being resolved: then what is under way may go on for some milliseconds. */
  exit(code: number): void;
  /** The same where threads may resolve names. */
  exitWithThreads(code: number): void;
}

/** Of a process that a signal ended, as shells count it. SIGHUP comes when a terminal is closed. */
export const EXIT_CODE_OF_SIGNAL = { SIGHUP: 129, SIGINT: 130, SIGUSR1: 138, SIGTERM: 143 } as const;
type SignalName = keyof typeof EXIT_CODE_OF_SIGNAL;

/** Adds options, arguments, subcommands and the action to a command that has its name and summary. */
export type DefineCommand = (command: Command, context: CommandContext) => void;

/** Whether Node has put U+FFFD where bytes were no UTF-8: what they were is lost. */
export function holdsReplaced(text: string): boolean {
  return text.includes('\ufffd');
}

/** The command has said on its own what is wrong: exit code 1. */
export class Refusal extends Error {
  override readonly name = 'Refusal';
}

/**
 * One without which the command does nothing. Commander's own mandatory options are missed before a word that is none
 * of its options is looked at, which is mostly why they are missed.
 */
export class RequiredOption extends Option {}

/** The same as `option`; the command is not begun without it. */
export function requiredOption(flags: string, description: string): Option {
  return withVariable(new RequiredOption(flags, description));
}

/** Every command that answers something has it. */
export function jsonOption(): Option {
  return option('--json', 'print one JSON value');
}

/** Ends with exit code 2 and one line that tells how it is used. */
export function misused(command: Command, message: string): never {
  return command.error(`error: ${message}`);
}

/** What a command is for, in a sentence or two, and how it is called. */
export function explain(command: Command, text: string, examples: readonly string[]): Command {
  const lines = examples.map((example) => `  $ ${example}`);
  return command.description(text).addHelpText('after', `\nExamples:\n${lines.join('\n')}`);
}

/**
 * Opens the file for `action` and closes it in any case. Only what begins something makes a file that is
 * not there, and says so: elsewhere a wrong name would look like a file with nothing in it. Throws AppError.
 */
export async function withStore<Result>(
  command: Command,
  { effects, terminal }: CommandContext,
  whenMissing: 'create' | 'refuse',
  action: (store: Store) => Promise<Result> | Result,
): Promise<Result> {
  const path = whenMissing === 'refuse' ? existingDbPathOf(command) : dbPathOf(command);
  // Only here: loading SQLite takes longer than all else that `--help` needs.
  const [{ openStore }, { refuseToOpen }] = await Promise.all([
    import('../store/store.ts'),
    import('./removed.ts'),
  ]);
  refuseToOpen(path, effects);
  const isNew = lookFor(path) === undefined;
  const store = openStore(path, effects);
  if (isNew) terminal.note(`made the file ${printable(resolve(path))}`);
  try {
    return await action(store);
  } finally {
    await store.close();
  }
}

/** What `--db` or DAVIT_DB says. SQLite takes two of these texts for databases that vanish with the process. */
export function dbPathOf(command: Command): string {
  const path = String(command.optsWithGlobals()['db']);
  if (path === '' || path === ':memory:') misused(command, '--db must be the path of a file');
  // better-sqlite3 would open another file than the one that is looked for here.
  if (path.trim() !== path) misused(command, '--db must not begin or end with white space');
  if (lookFor(path)?.isDirectory() === true) {
    throw new AppError('conflict', `${path} is a directory: say with --db or DAVIT_DB which file`);
  }
  return path;
}

/** The same; throws AppError `not_found` where there is no such file, or nothing in it yet. */
export function existingDbPathOf(command: Command): string {
  const path = dbPathOf(command);
  const status = lookFor(path);
  if (status === undefined) {
    throw new AppError('not_found', `there is no file ${path}: say with --db or DAVIT_DB where it is`);
  }
  if (status.isFile() && status.size === 0) {
    throw new AppError(
      'not_found',
      `${path} is not a davit file, as it is empty: choose another one with --db`,
    );
  }
  return path;
}

/** Undefined: nothing is there. Throws AppError `conflict` where that cannot be known. */
function lookFor(path: string): Stats | undefined {
  try {
    return statSync(path, { throwIfNoEntry: false });
  } catch (error) {
    const code = codeOf(error);
    throw new AppError(
      'conflict',
      `cannot look for ${path} (${code}): ask as a user who may, or say another place with --db`,
      { cause: error },
    );
  }
}

/** One JSON value on stdout, with the API's field names, and nothing in it that a terminal would obey. */
export function printJson({ terminal }: CommandContext, value: unknown): void {
  terminal.print(escapedIn(JSON.stringify(value, null, 2)));
}

/**
 * Tells of what was made, and prints `word`, its id or its secret: alone on stdout, so that $(…) takes it; what is for the
 * person goes to stderr. With `--json` the whole of it, and nothing else.
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

/**
 * Returns only after `--yes` or a yes. Else nothing has happened, and the exit code is 1, or 2 where nobody
 * can be asked.
 */
export async function confirm(
  command: Command,
  question: string,
  yes: boolean | undefined,
  { terminal }: CommandContext,
): Promise<void> {
  if (yes === true) return;
  const answer = await terminal.ask(`${question} [y/N] `);
  if (answer === null) misused(command, 'nobody is there to confirm this: say --yes if it is meant');
  if (/^y(es)?$/i.test(answer)) return;
  terminal.note('nothing was changed');
  throw new Refusal('not confirmed');
}

/** For people as they say it, `3h ago`; for programs ISO 8601. */
export function moment({ terminal, effects }: CommandContext, at: Timestamp): string {
  return terminal.columns === null ? at : fromNow(at, effects.now());
}

/** ISO 8601, and for people also how long ago that is. */
export function exactMoment(context: CommandContext, at: Timestamp): string {
  return context.terminal.columns === null ? at : `${at} (${moment(context, at)})`;
}

/** Neither the timers of `effects` nor an open file keep a process alive: this does until it is disposed of. */
export function stayAlive(): Disposable {
  const { port1 } = new MessageChannel();
  port1.ref();
  return { [Symbol.dispose]: () => port1.close() };
}

/** One line for a refusal, and for what a file, a lock or a disk has against SQLite; a bug also shows where it happened. */
export function errorText(error: unknown): string {
  return `error: ${problemText(error)}`;
}

/** The same for who puts something before it. */
export function problemText(error: unknown): string {
  if (error instanceof AppError) return printable(withoutSecrets(error.message));
  if (!(error instanceof Error)) return String(error);
  // What the system refused (a port, a file) is said by its message.
  if ('syscall' in error) return printable(withoutSecrets(error.message));
  if (isStorageProblem(error)) return storageText(error);
  return `davit failed, which is a bug: ${error.stack ?? error.message}`;
}

function storageText(error: Error): string {
  return codeOf(error).startsWith('SQLITE_BUSY')
    ? 'another process keeps the database locked: try again when it has ended'
    : `the database cannot be used (${printable(error.message)}): 'davit doctor' tells more`;
}
