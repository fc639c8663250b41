import type { Argument, Command, Option } from 'commander';
import { printable } from '../printable.ts';
import { quoteForBash, unquote } from '../shell-words.ts';
import { visibleCommands, visibleOptions } from './command-tree.ts';

export const SHELLS = ['bash', 'zsh', 'fish'] as const;
export type Shell = (typeof SHELLS)[number];

/** How the scripts of `davit completion` call davit. Not for users. */
export const COMPLETE_ARGUMENT = '__complete';

export interface Candidate {
  value: string;
  description: string;
}

/** Placeholders of arguments and options whose values are in the file. */
const NAMED_NOUNS = ['project', 'key', 'webhook', 'deployment'] as const;
export type NamedNoun = (typeof NAMED_NOUNS)[number];

/** Looks up those values in the file; `dbPath` is null if `--db` was not typed. */
type NamesOf = (noun: NamedNoun, start: string, dbPath: string | null) => Promise<Candidate[]>;

/** What the last word can be completed to: these candidates, and paths if `paths` says so. */
interface Completion {
  candidates: Candidate[];
  paths: 'none' | 'files' | 'directories';
}

const NOTHING: Completion = { candidates: [], paths: 'none' };

/**
 * What a script of `davit completion` reads: a line `none`, `files` or `directories`, then a line for each candidate
 * for the last one of `words`; for zsh and fish with a tab and a description. `words` are as they were typed, for bash
 * with their quotes. Candidates with unprintable characters are left out.
 */
export async function completionText(
  shell: Shell,
  program: Command,
  words: readonly string[],
  namesOf: NamesOf,
): Promise<string> {
  const typed = words.at(-1) ?? '';
  const meant = shell === 'bash' ? words.map(unquote) : words;
  const { candidates, paths } = await complete(program, meant, namesOf);
  const lines = candidates
    .filter(({ value }) => printable(value) === value)
    .map(({ value, description }) =>
      shell === 'bash' ? quoteForBash(value, typed) : `${value}\t${printable(description)}`,
    );
  return [paths, ...lines].join('\n');
}

/** The same for words without quotes. Candidates begin with the last word. */
async function complete(program: Command, words: readonly string[], namesOf: NamesOf): Promise<Completion> {
  const current = words.at(-1) ?? '';
  const { command, positionals, awaiting, isOver, isHelp, dbPath } = walk(program, words.slice(0, -1));
  if (command === null) return NOTHING;
  if (awaiting !== null && !(awaiting.variadic && current.startsWith('-'))) {
    return await valuesOf(nounOf(awaiting), awaiting.argChoices);
  }
  if (!isOver && current.startsWith('-')) {
    const valueAt = current.startsWith('--') ? current.indexOf('=') + 1 : 0;
    if (valueAt === 0) return beginning(isHelp ? [] : flagsOf(command), current);
    const option = optionOf(command, current.slice(0, valueAt - 1));
    if (option === undefined || !takesValue(option)) return NOTHING;
    return await valuesOf(nounOf(option), option.argChoices, current.slice(0, valueAt));
  }
  if (command.commands.length > 0) return beginning(commandsOf(command, isHelp), current);
  if (isHelp) return NOTHING;
  const argument = argumentAt(command, positionals);
  return argument === undefined ? NOTHING : await valuesOf(argument.name(), argument.argChoices);

  async function valuesOf(noun: string, choices: readonly string[] = [], prefix = ''): Promise<Completion> {
    if (noun === 'file' || (noun === 'command' && isOver)) return { candidates: [], paths: 'files' };
    if (noun === 'directory') return { candidates: [], paths: 'directories' };
    const named = NAMED_NOUNS.find((one) => one === noun);
    const start = current.slice(prefix.length);
    const values =
      named === undefined
        ? choices.map((value) => ({ value, description: '' }))
        : await namesOf(named, start, dbPath);
    return beginning(
      values.map(({ value, description }) => ({ value: prefix + value, description })),
      current,
    );
  }
}

interface Place {
  /** Null: an earlier word is no command of davit's. */
  command: Command | null;
  /** How many arguments the command has so far. */
  positionals: number;
  /** The option whose value comes next. */
  awaiting: Option | null;
  /** Whether there was a `--`, after which there are no options. */
  isOver: boolean;
  /** `davit help …`: only the names of commands follow. */
  isHelp: boolean;
  dbPath: string | null;
}

/** Reads words as commander does, up to the one that is completed. */
function walk(program: Command, words: readonly string[]): Place {
  const isHelp = words[0] === 'help';
  const place: Place = {
    command: program,
    positionals: 0,
    awaiting: null,
    isOver: false,
    isHelp,
    dbPath: null,
  };
  for (const word of isHelp ? words.slice(1) : words) {
    if (place.command === null) break;
    step(place, place.command, word);
  }
  return place;
}

function step(place: Place, command: Command, word: string): void {
  const { awaiting } = place;
  if (awaiting !== null && !(awaiting.variadic && word.startsWith('-'))) {
    if (awaiting.long === '--db') place.dbPath = word;
    if (!awaiting.variadic) place.awaiting = null;
    return;
  }
  place.awaiting = null;
  if (place.isOver || !word.startsWith('-') || word === '-') {
    const subcommand = command.commands.find((one) => one.name() === word);
    if (command.commands.length > 0) place.command = subcommand ?? null;
    else place.positionals += 1;
  } else if (word === '--') {
    place.isOver = true;
  } else {
    const [flag = '', ...value] = word.split('=');
    const option = optionOf(command, flag);
    if (option?.long === '--db' && value.length > 0) place.dbPath = value.join('=');
    if (option !== undefined && takesValue(option) && value.length === 0) place.awaiting = option;
  }
}

function takesValue({ required, optional }: Option): boolean {
  return required || optional;
}

function optionOf(command: Command, flag: string): Option | undefined {
  return visibleOptions(command).find(({ short, long }) => flag === short || flag === long);
}

function flagsOf(command: Command): Candidate[] {
  return visibleOptions(command).map(({ long, short, description }) => ({
    value: long ?? short ?? '',
    description,
  }));
}

function commandsOf(command: Command, isHelp: boolean): Candidate[] {
  const all = isHelp ? command.commands : visibleCommands(command);
  return all
    .filter((one) => !one.name().startsWith('__'))
    .map((one) => ({ value: one.name(), description: one.summary() || one.description() }));
}

function argumentAt({ registeredArguments }: Command, index: number): Argument | undefined {
  const last = registeredArguments.at(-1);
  return registeredArguments[index] ?? (last?.variadic === true ? last : undefined);
}

/** `project` of `--project <project...>`. */
function nounOf({ flags }: Option): string {
  return /[<[]([\w-]+)/.exec(flags)?.[1] ?? '';
}

function beginning(candidates: readonly Candidate[], start: string): Completion {
  return { candidates: candidates.filter(({ value }) => value.startsWith(start)), paths: 'none' };
}
