import { isAbsolute } from 'node:path';
import { type Command, Option } from 'commander';
import { startProblemText } from '../deploy/command-file.ts';
import { QUEUE_POLICIES, type QueuePolicy } from '../domain.ts';
import { AppError } from '../errors.ts';
import { durationMsOf, nullIfOff, oneOf, option, orOff, repeated } from '../options.ts';
import { absolutePath } from '../paths.ts';
import { printable } from '../printable.ts';
import type { ProjectDetails, ProjectSettings } from '../store/projects.ts';
import type { Store } from '../store/store.ts';
import { type CommandContext, explain, jsonOption, misused, requiredOption } from './command.ts';
import { counted } from './counted.ts';
import { withStore } from './database-file.ts';
import { checkName, nameOfProject, PROJECT_ARGUMENT, resolveProject, warnOfNamesakes } from './names.ts';
import { startProblemOf } from './project-files.ts';
import { printJson, printMade } from './results.ts';
import { readVariables } from './variables.ts';

/*
 * `davit admin project create` and `set` have the same settings. Without an option, `create` takes the default, and
 * `set` leaves the setting as it is.
 */

const COMMAND_HELP =
  'The command comes after --, one word for each argument, and is run without a shell. A bare name is looked up in PATH; ' +
  'a path with a slash is relative to --dir. Exit code 0 is success. The command gets DEPLOY_REF, other DEPLOY_ ' +
  "variables and those of --env, and nothing of davit's own environment.";

const POLICY_MEANINGS: Record<QueuePolicy, string> = {
  queue: 'deploy all in order',
  latest: 'a new deployment replaces those that wait',
};

interface CreateOptions {
  name: string;
  dir?: string;
  env?: string[];
  envFrom?: string;
  timeout: number | 'off';
  idleTimeout: number | 'off';
  reportTimeout: number | 'off';
  policy: QueuePolicy;
  json?: boolean;
}

interface SetOptions extends Partial<Omit<CreateOptions, 'dir'>> {
  /** False: --no-dir. */
  dir?: string | false;
  unsetEnv?: string[];
  /** False: --no-command. */
  command: boolean;
}

/** `davit admin project create`. */
export function defineCreateProject(command: Command, context: CommandContext): void {
  explain(
    command.summary('create a project; prints its id'),
    `Creates a project and prints its id. Without a command, another system does the work and reports it.\n\n${COMMAND_HELP}`,
    [
      'davit admin project create --name website --dir /srv/website -- ./deploy.sh',
      'davit admin project create --name api --env STAGE=live -- make -C /srv/api',
      'davit admin project create --name app --report-timeout 2h',
    ],
  )
    .usage('[options] [-- command args...]')
    .addOption(requiredOption('--name <name>', 'its name'));
  addSettings(command, 'with defaults');
  command
    .argument('[command...]')
    .addOption(jsonOption())
    .action((words: string[], options: CreateOptions) => createProject(command, words, options, context));
}

/** `davit admin project set`. */
export function defineSetProject(command: Command, context: CommandContext): void {
  explain(
    command.summary('change settings of a project'),
    'Changes the settings that are given, and no others. Deployments that are running go on unchanged, but a new ' +
      '--report-timeout also holds for those whose end is not reported yet: where there was none, it counts from now.' +
      `\n\n${COMMAND_HELP}`,
    [
      'davit admin project set website --timeout 1h',
      'davit admin project set website --env STAGE=live --unset-env DEBUG',
      'davit admin project set website -- ./deploy.sh --fast',
      'davit admin project set website --no-command',
    ],
  )
    .usage('[options] <project> [-- command args...]')
    .addOption(option('--name <name>', 'its name'));
  addSettings(command, 'as they are');
  command
    .addOption(option('--no-dir', 'run the command in an empty directory each time'))
    .addOption(option('--unset-env <name>', 'remove a variable; may be repeated').argParser(repeated))
    .addOption(option('--no-command', 'from now on another system does the work and reports it'))
    .argument(...PROJECT_ARGUMENT)
    .argument('[command...]', 'the command, after --')
    .addOption(jsonOption())
    .action((text: string, words: string[], options: SetOptions) =>
      setProject(command, text, words, options, context),
    );
}

function addSettings(command: Command, defaults: 'with defaults' | 'as they are'): void {
  command
    .addOption(
      option('--dir <directory>', 'where the command runs; by default in an empty directory each time'),
    )
    .addOption(
      option(
        '--env <name=value>',
        'a variable for the command; a name alone takes its value from the current environment; may be repeated',
      ).argParser(repeated),
    )
    // Also --env-file: see env-file.ts.
    .addOption(
      option(
        '--env-from <file>',
        'a file of such variables, one name=value a line; quotes around a whole value are removed, lines that begin with # are skipped; - for stdin',
      ),
    );
  addSetting('--timeout <duration>', 'stop the command after this time, or off', '30m');
  addSetting(
    '--idle-timeout <duration>',
    'stop the command when it prints nothing for this time, or off',
    'off',
  );
  addSetting(
    '--report-timeout <duration>',
    'without a command: fail a deployment whose end is not reported within this time, or off',
    'off',
  );
  addSetting(
    '--policy <policy>',
    QUEUE_POLICIES.map((policy) => `${policy}: ${POLICY_MEANINGS[policy]}`).join('; '),
    'queue',
    oneOf(QUEUE_POLICIES),
    QUEUE_POLICIES,
  );

  function addSetting(
    flags: string,
    description: string,
    preset: string,
    parse: (text: string) => unknown = orOff(durationMsOf),
    choices: readonly string[] = [],
  ): void {
    const setting = option(flags, description).choices(choices).argParser(parse);
    command.addOption(defaults === 'with defaults' ? setting.default(parse(preset), preset) : setting);
  }
}

async function createProject(
  command: Command,
  words: string[],
  options: CreateOptions,
  context: CommandContext,
): Promise<void> {
  const settings: ProjectSettings = {
    name: checkName(command, options.name),
    command: commandOf(command, words, context),
    directory: options.dir === undefined ? null : directoryOf(command, options.dir),
    timeoutMs: nullIfOff(options.timeout),
    idleTimeoutMs: nullIfOff(options.idleTimeout),
    reportTimeoutMs: nullIfOff(options.reportTimeout),
    policy: options.policy,
    variables: await readVariables(command, options, context),
  };
  checkPlace(command, settings);
  const { project, namesakes } = await withStore(command, context, 'create', async (store) => {
    const made = await store.writer.write('projects.create', settings);
    return { project: made, namesakes: countNamed(made.name, store) };
  });
  printMade(context, options, project, `created ${nameOfProject(project)}`, project.id);
  noteUnused(command, project, 0, context);
  warnOfStart(project, settings.variables, context);
  warnOfNamesakes(namesakes, 'projects', context);
}

/** How many projects have this name. Archived ones do not count, as the name means another. */
export function countNamed(name: string, store: Store): number {
  return store.reads.projects
    .list()
    .filter((project) => project.name === name && project.status !== 'archived').length;
}

async function setProject(
  command: Command,
  text: string,
  words: string[],
  options: SetOptions,
  context: CommandContext,
): Promise<void> {
  const changes = changesOf(command, words, options, context);
  const variables = await readVariables(command, options, context);
  const unsetVariables = [...new Set(options.unsetEnv)];
  const both = unsetVariables.find((name) => Object.hasOwn(variables, name));
  if (both !== undefined) misused(command, `${both} is both set and removed: choose one`);
  if (Object.keys(changes).length + Object.keys(variables).length + unsetVariables.length === 0) {
    misused(command, 'nothing to change: give an option or a command');
  }
  const { project, all, namesakes, awaited } = await withStore(command, context, 'refuse', async (store) => {
    const before = resolveProject(store, text);
    checkPlace(command, { ...before, ...changes });
    const unknown = unsetVariables.find((name) => !before.variable_names.includes(name));
    if (unknown !== undefined) {
      throw new AppError(
        'not_found',
        `${nameOfProject(before)} has no variable ${unknown}: 'davit admin project show' lists them`,
      );
    }
    const changed = { id: before.id, changes, variables, unsetVariables };
    const after = await store.writer.write('projects.set', changed);
    const isRenamed = after.name !== before.name;
    return {
      project: after,
      all: store.reads.projects.variables(before.id),
      namesakes: isRenamed ? countNamed(after.name, store) : 1,
      awaited: store.reads.deployments.reportsAwaited(before.id),
    };
  });
  if (options.json === true) printJson(context, project);
  else {
    const timed =
      changes.reportTimeoutMs === undefined || awaited === 0
        ? ''
        : `; its report timeout also holds for ${counted(awaited, 'open deployment')}`;
    context.terminal.print(`${nameOfProject(project)} is changed${timed}`);
  }
  if (changes.command !== undefined && changes.command !== null) noteAwaited(awaited, context);
  noteUnused(command, project, awaited, context);
  warnOfStart(project, all, context);
  warnOfNamesakes(namesakes, 'projects', context);
}

/** The settings that have no effect while the project has no command. */
const OF_COMMAND = ['--dir', '--env', '--env-from', '--timeout', '--idle-timeout', '--policy'];

/** Says which of the given settings have no effect at present. */
function noteUnused(
  command: Command,
  project: ProjectDetails,
  awaited: number,
  { terminal }: CommandContext,
): void {
  const unused = project.command === null ? OF_COMMAND : awaited === 0 ? ['--report-timeout'] : [];
  const given = unused.filter((flag) => {
    const name = new Option(flag).attributeName();
    const isGiven = /^(?:cli|env)$/.test(command.getOptionValueSource(name) ?? '');
    // What is switched off has no effect in any case.
    return isGiven && !['off', false].includes(command.getOptionValue(name));
  });
  if (given.length === 0) return;
  const which = project.command === null ? 'no' : 'a';
  terminal.note(`note: without effect while the project has ${which} command: ${given.join(', ')}`);
}

/** To be said where it may be thought that what another system carries out has ended, too. */
export function noteAwaited(awaited: number, { terminal }: CommandContext): void {
  if (awaited === 0) return;
  const open = `${counted(awaited, 'deployment')} of another system ${awaited === 1 ? 'stays' : 'stay'} open`;
  terminal.note(
    `note: ${open}: 'davit admin queue' shows all, 'davit admin deployment cancel' ends one that waits, ` +
      "'davit admin project set --report-timeout' limits the others",
  );
}

function changesOf(
  command: Command,
  words: string[],
  options: SetOptions,
  context: CommandContext,
): Partial<Omit<ProjectSettings, 'variables'>> {
  const { name, dir, timeout, idleTimeout, reportTimeout, policy } = options;
  const newCommand = commandOf(command, words, context);
  if (newCommand !== null && command.getOptionValueSource('command') === 'cli')
    misused(command, '--no-command and a command exclude each other');
  return {
    ...(name === undefined ? {} : { name: checkName(command, name) }),
    // A command in the command line takes precedence over DAVIT_NO_COMMAND.
    ...(newCommand === null && options.command ? {} : { command: newCommand }),
    ...(typeof dir === 'string' ? { directory: directoryOf(command, dir) } : {}),
    ...(dir === false ? { directory: null } : {}),
    ...(timeout === undefined ? {} : { timeoutMs: nullIfOff(timeout) }),
    ...(idleTimeout === undefined ? {} : { idleTimeoutMs: nullIfOff(idleTimeout) }),
    ...(reportTimeout === undefined ? {} : { reportTimeoutMs: nullIfOff(reportTimeout) }),
    ...(policy === undefined ? {} : { policy }),
  };
}

/** The words after `--`; null: none. If `--` were optional, `--env A=1 B=2` would make `B=2` the command. */
function commandOf(
  command: Command,
  words: readonly string[],
  { commandLine }: CommandContext,
): ProjectSettings['command'] {
  const dashesAt = commandLine.indexOf('--');
  const count = dashesAt < 0 ? 0 : commandLine.length - dashesAt - 1;
  // Commander took one of the words after -- for the project.
  if (words.length < count) misused(command, "missing required argument 'project'");
  if (words.length > count) {
    // Without what follows a =, which is likely to be the value of a variable.
    const [word = ''] = (words[0] ?? '').split(/(?<==)/);
    const advice =
      dashesAt < 0
        ? 'put -- before the command'
        : 'leave it out, or give the option that it is for, such as --name';
    misused(command, `'${word}' is not expected here: ${advice}`);
  }
  const [file, ...rest] = words;
  if (file === undefined)
    return dashesAt < 0 ? null : misused(command, 'nothing comes after --: put the command there');
  if (file === '') misused(command, 'the command must not be empty');
  return [file, ...rest];
}

/** Absolute, as the service has another working directory. */
function directoryOf(command: Command, text: string): string {
  return text === '' ? misused(command, '--dir must not be empty') : absolutePath(text);
}

/** A command with a relative path needs `--dir`, to which it is relative. */
function checkPlace(command: Command, project: Pick<ProjectSettings, 'command' | 'directory'>): void {
  const file = project.command?.[0];
  if (file === undefined || project.directory !== null || !file.includes('/') || isAbsolute(file)) return;
  misused(command, `'${file}' is relative to --dir: give that too, or an absolute path`);
}

/** Only a warning, as what is missing may be created later, or be visible to the service alone. */
function warnOfStart(
  project: ProjectDetails,
  variables: Readonly<Record<string, string>>,
  { terminal }: CommandContext,
): void {
  const problem = startProblemOf(project, variables);
  if (problem === undefined) return;
  terminal.note(`warning: ${printable(startProblemText(problem))}: deployments fail until that is fixed`);
}
