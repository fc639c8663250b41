import { Command, CommanderError, type Option } from 'commander';
import { option } from '../options.ts';
import { type CommandContext, explain, holdsReplaced, missingOption, misused, Refusal } from './command.ts';
import { allOptions, rootOf } from './command-tree.ts';
import { errorText } from './error-text.ts';
import { explainErrors } from './usage.ts';

const WIDEST_HELP = 100;

/** `davit` itself, without its commands. All of them take `--db`, before or after their names. */
export function createProgram(
  version: string,
  { terminal, environment, commandLine }: CommandContext,
): Command {
  const width = Math.min(terminal.columns ?? 80, WIDEST_HELP);
  return explain(
    new Command('davit'),
    'A deployment service: one executable, one SQLite file.\n\n' +
      'Options can also be set by environment variables, shown as $DAVIT_…. Exit code 1 is a refusal or a failure, 2 wrong usage.',
    [
      'davit admin project create --name website --dir /srv/website -- ./deploy.sh',
      'davit serve',
      'davit admin deployment create website main',
      'davit help admin project',
    ],
  )
    .version(version)
    .addOption(option('--db <file>', "davit's database file").default('./davit.db'))
    .configureHelp({
      showGlobalOptions: true,
      optionDescription,
      subcommandTerm: (command) => command.name(),
      visibleGlobalOptions: (command) =>
        command.parent === null ? [] : rootOf(command).options.filter(isDb),
    })
    .configureOutput({
      writeOut: terminal.print,
      writeErr: terminal.note,
      getOutHelpWidth: () => width,
      getErrHelpWidth: () => width,
    })
    .exitOverride()
    .hook('preAction', (_program, command) => {
      refuseReplaced(command, environment);
      refuseDashes(command, commandLine);
      correctFlags(command, environment);
      checkRequired(command);
    });
}

/** Runs the program. Returns the exit code: 0, 1 for a refusal, 2 for wrong usage; every error is printed already. */
export async function runProgram(
  program: Command,
  { terminal, commandLine }: CommandContext,
): Promise<number> {
  explainErrors(program);
  try {
    const [first, ...words] = commandLine;
    const unreadableAt = commandLine.findIndex(holdsReplaced);
    if (unreadableAt >= 0) misused(program, `argument ${unreadableAt + 1} is not valid UTF-8`);
    if (first === 'help') showHelp(program, words);
    else await program.parseAsync(commandLine, { from: 'user' });
    return 0;
  } catch (error) {
    if (error instanceof CommanderError) return error.exitCode === 0 ? 0 : 2;
    if (error instanceof Refusal) return 1;
    terminal.note(errorText(error));
    return 1;
  }
}

function optionDescription({
  flags,
  description,
  defaultValue,
  defaultValueDescription,
  envVar,
  required,
}: Option): string {
  const preset =
    required && defaultValue !== undefined
      ? [`default ${defaultValueDescription ?? String(defaultValue)}`]
      : [];
  // A default such as 10s shows how to write a duration, `off` does not.
  const example =
    flags.endsWith('<duration>') && !/\d[dhms]/.test(preset.join()) ? ['such as 30m or 5d'] : [];
  const variable = envVar === undefined ? [] : [`$${envVar}`];
  const details = [...example, ...preset, ...variable];
  return details.length === 0 ? description : `${description} (${details.join(', ')})`;
}

function isDb(candidate: Option): boolean {
  return candidate.long === '--db';
}

/** Refuses a variable that was not valid UTF-8, as arguments are: Node has replaced some of its bytes. */
function refuseReplaced(command: Command, environment: CommandContext['environment']): void {
  for (const { envVar } of allOptions(command)) {
    if (envVar !== undefined && holdsReplaced(environment[envVar] ?? '')) {
      misused(command, `${envVar} is not valid UTF-8`);
    }
  }
}

/** Refuses `--dir -- make`: commander takes the `--` for the directory. */
function refuseDashes(command: Command, commandLine: readonly string[]): void {
  if (!commandLine.includes('--')) return;
  const values = command.optsWithGlobals();
  const missing = allOptions(command).find((one) => [values[one.attributeName()]].flat().includes('--'));
  if (missing !== undefined) misused(command, `option '${missing.flags}' argument missing before --`);
}

/** Commander takes a flag as given whenever its variable is set, but `DAVIT_YES=0` must not mean yes. */
function correctFlags(command: Command, environment: CommandContext['environment']): void {
  for (const flag of command.options) {
    const name = flag.attributeName();
    if (flag.envVar === undefined || flag.required || command.getOptionValueSource(name) !== 'env') continue;
    const value = environment[flag.envVar];
    // Undefined: the value comes from the variable of its counterpart, as for --no-dir from that of --dir.
    if (value === undefined || /^(?:1|true|yes|on)$/i.test(value)) continue;
    if (!/^(?:0|false|no|off)$/i.test(value)) misused(command, `${flag.envVar} must be 1 or 0`);
    const counterpart = command.options.find((one) => one !== flag && one.attributeName() === name);
    const given = environment[counterpart?.envVar ?? ''];
    if (given === undefined)
      command.setOptionValueWithSource(name, flag.negate ? true : flag.defaultValue, 'default');
    else command.setOptionValueWithSource(name, given, 'env');
  }
}

function checkRequired(command: Command): void {
  const missing = missingOption(command);
  if (missing === undefined) return;
  misused(command, `required option '${missing.flags}' not specified: give it, or ${missing.envVar}`);
}

/** `davit help admin project`: commander's own help command knows only one level. */
function showHelp(program: Command, words: readonly string[]): void {
  words
    .filter((word) => !word.startsWith('-'))
    .reduce(subcommandOf, program)
    .outputHelp();
}

function subcommandOf(command: Command, word: string): Command {
  const found = command.commands.find((one) => one.name() === word);
  return found ?? misused(command, `unknown command '${word}'`);
}
