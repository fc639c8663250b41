import { type Command, Option } from 'commander';
import type { Effects } from '../effects.ts';
import { option, withVariable } from '../options.ts';
import type { Terminal } from './terminal.ts';

/** What every command gets from main.ts. */
export interface CommandContext {
  terminal: Terminal;
  /** The words after the name of the program. */
  commandLine: readonly string[];
  environment: Readonly<Record<string, string | undefined>>;
  /** The environment as davit was started with it, before it forgot or set any variable. */
  startEnvironment: Readonly<Record<string, string | undefined>>;
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

/**
 * Some signals arrive twice: timeout(1) signals its child and then the group, and npm forwards what the terminal sent
 * to all.
 */
const SAME_SIGNAL_MS = 200;

/** A listener to whom signals in immediate succession are one, for those who take a second one for another request. */
export function countingOnce<Name extends SignalName>(
  listener: (name: Name) => void,
  effects: Effects,
): (name: Name) => void {
  let countedAtMs: number | undefined;
  return (name) => {
    const nowMs = effects.monotonicMs();
    if (countedAtMs !== undefined && nowMs - countedAtMs <= SAME_SIGNAL_MS) return;
    countedAtMs = nowMs;
    listener(name);
  };
}

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
class RequiredOption extends Option {}

/** The same as `option`, but mandatory. */
export function requiredOption(flags: string, description: string): Option {
  return withVariable(new RequiredOption(flags, description));
}

/** A mandatory option of the command that was not given; undefined: all were. */
export function missingOption(command: Command): Option | undefined {
  return command.options.find(
    (candidate) =>
      candidate instanceof RequiredOption && command.getOptionValue(candidate.attributeName()) === undefined,
  );
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

/** Keeps the process alive until it is disposed of, which neither timers of `effects` nor open files do. */
export function stayAlive(): Disposable {
  const { port1 } = new MessageChannel();
  port1.ref();
  return { [Symbol.dispose]: () => port1.close() };
}
