import type { Command } from 'commander';
import { printable } from '../printable.ts';
import { withoutSecrets } from '../secrets.ts';
import { missingOption } from './command.ts';
import { pathOf, rootOf, visibleCommands, visibleOptions } from './command-tree.ts';
import { nearest } from './suggest.ts';

/** Makes every usage error of the command and its subcommands one line, with a hint, and without any value. */
export function explainErrors(command: Command): void {
  // Commander's own suggestions know only the commands of one level, and compare `--ulr=…` with its value.
  command.showSuggestionAfterError(false).configureOutput({
    outputError(text, write) {
      const message = withSuggestion(withoutValue(text.trim()), command);
      const hint = message.endsWith('?') ? '' : ` (see '${pathOf(command)} --help')`;
      const line = withoutSecrets(printable(message)).replace(/\.$/, '');
      write(`${line}${hint}`);
    },
  });
  for (const subcommand of command.commands) explainErrors(subcommand);
}

/** Commander's message without the value in it, which may be a secret in the wrong place. */
function withoutValue(message: string): string {
  return message
    .replace(/^(error: option '[^']*' value) '.*'( from env '\w+' is invalid)/s, '$1$2')
    .replace(/^(error: option '[^']*' argument) '.*'( is invalid)/s, '$1$2')
    .replace(
      /^error: command-argument value '.*' is invalid for argument '(\w+)'\. (?:It|(Allowed choices are)) /s,
      (_, name: string, choices?: string) =>
        `error: the ${name.replaceAll('_', ' ')} ${choices === undefined ? '' : 'must be one of '}`,
    )
    .replace(/^(error: too many arguments.*? but got \d+): .*$/s, '$1')
    .replace(/^(error: unknown option '[^=]*)=.*'/s, "$1'");
}

function withSuggestion(message: string, command: Command): string {
  if (message.startsWith('error: too many arguments')) {
    const missing = missingOption(command);
    return missing === undefined ? message : `${message}, and '${missing.flags}' is missing`;
  }
  const [, kind, word = ''] = /^error: unknown (option|command) '(.*)'$/s.exec(message) ?? [];
  if (kind === undefined) return message;
  if (kind === 'option' && command.commands.some((one) => isTakenBy(one, word))) {
    return `error: option '${word}' goes after the command that takes it`;
  }
  if (
    command.name() === 'webhook' &&
    [...OVER_API, ...OVER_API.flatMap(synonymsOf)].includes(word.toLowerCase())
  ) {
    return `${message}: keys register webhooks with POST /v2/webhooks, and change them with PATCH /v2/webhooks/{id}`;
  }
  const known = kind === 'option' ? optionsOf(command) : commandsOf(command);
  const synonym =
    kind === 'option' ? optionCalled(word, known.keys()) : commandCalled(word, command, known.keys());
  // `--` alone is near to any short word.
  const names = [...known.keys()].filter((name) => name !== '--');
  const meant = known.get(synonym ?? nearest(word, names) ?? '');
  if (meant === undefined) return message;
  // The option exists, but was given a value, as in `--wait=yes`.
  if (kind === 'option' && meant === word) return `error: option '${word}' takes no value`;
  return `${message}: did you mean ${meant}?`;
}

function optionsOf(command: Command): Map<string, string> {
  const flags = visibleOptions(command).flatMap(({ long, short }) =>
    [long, short].flatMap((flag) => flag ?? []),
  );
  const takesCommand = command.registeredArguments.some((argument) => argument.name() === 'command');
  return new Map([
    ...flags.map((flag): [string, string] => [flag, flag]),
    ...(takesCommand ? [['--', '-- and the command after it'] as const] : []),
  ]);
}

function isTakenBy(command: Command, word: string): boolean {
  return (
    command.options.some(({ long, short }) => word === long || word === short) ||
    command.commands.some((one) => isTakenBy(one, word))
  );
}

/**
 * What to type for each name: its own commands by name, and those of `davit` and `davit admin`, easily confused, by
 * path.
 */
function commandsOf(command: Command): Map<string, string> {
  const root = rootOf(command);
  const admin = root.commands.filter((one) => one.name() === 'admin');
  const others = [root, ...admin].flatMap(visibleCommands);
  return new Map([
    ['version', `${pathOf(root)} --version`],
    ...others.map((one): [string, string] => [one.name(), pathOf(one)]),
    ...visibleCommands(command).map((one): [string, string] => [one.name(), one.name()]),
    ['help', `${pathOf(command)} --help`],
  ]);
}

/** The command that other programs call by this word: one of its own, or else another one that is known. */
function commandCalled(word: string, command: Command, known: Iterable<string>): string | undefined {
  const own = visibleCommands(command).map((one) => one.name());
  return [...own, ...known].find((name) => synonymsOf(name).includes(word.toLowerCase()));
}

/** The option that other programs call so. */
function optionCalled(word: string, known: Iterable<string>): string | undefined {
  return [...known].find((flag) => synonymsOf(flag).includes(word));
}

function synonymsOf(name: string): readonly string[] {
  return SYNONYMS[name] ?? [];
}

/** What is done with a webhook over the API alone. */
const OVER_API = ['create', 'set'];

const REMOVE = ['rm', 'remove', 'delete', 'del', 'destroy'];

const SYNONYMS: Record<string, readonly string[]> = {
  create: ['new', 'add', 'make', 'register'],
  list: ['ls', 'all'],
  show: ['get', 'info', 'describe', 'view', 'inspect', 'status'],
  set: ['edit', 'update', 'change', 'modify', 'config', 'env', 'rename'],
  pause: ['stop', 'suspend', 'disable'],
  resume: ['start', 'unpause', 'unarchive', 'continue', 'enable'],
  enable: ['resume', 'unpause', 'start'],
  disable: ['pause', 'suspend', 'stop'],
  archive: REMOVE,
  revoke: REMOVE,
  delete: REMOVE,
  logs: ['tail', 'output', 'follow', 'watch'],
  cancel: ['stop', 'abort', 'kill'],
  redeploy: ['retry', 'rerun', 'restart'],
  ping: ['test'],
  replay: ['retry', 'resend', 'redeliver'],
  rotate: ['renew', 'regenerate', 'roll'],
  deployment: ['logs', 'cancel', 'redeploy'],
  deploy: ['rollback', 'release', 'push', 'up'],
  serve: ['start', 'restart', 'run', 'server'],
  doctor: ['check', 'health', 'diagnose'],
  queue: ['status', 'ps'],
  '--listen': ['--port', '-p', '--host', '-H', '--bind', '-b', '--address', '--addr'],
  '--db': ['--data', '--data-dir', '--database'],
  '--dir': ['--cwd', '--directory', '--workdir', '--working-directory', '-C'],
  '--env': ['-e'],
  '--': ['--command', '--cmd', '--exec', '--script'],
  '--expires-in': ['--ttl', '--expires', '--expiry'],
  '--key-file': ['--key', '--token', '--api-key'],
  '--limit': ['-n', '--lines'],
  '--name': ['-n'],
  '--url': ['--server', '--host', '--endpoint'],
  '--wait': ['--follow', '--watch', '-w'],
  '--yes': ['-y'],
};
