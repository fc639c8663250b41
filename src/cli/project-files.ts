import { constants, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, isAbsolute } from 'node:path';
import {
  commandProblem,
  directoryProblem,
  type StartProblem,
  startProblemText,
} from '../deploy/command-file.ts';
import { commandPath, type SpawnRequest } from '../deploy/command-path.ts';
import { COMMAND_PATH, homeDirectory } from '../deploy/environment.ts';
import { beginningOf, firstLineIn } from '../deploy/program-format.ts';
import { parentProblem } from '../deploy/workspace.ts';
import { statusOf } from '../paths.ts';
import { quoteForBash } from '../shell-words.ts';
import type { ProjectDetails } from '../store/projects.ts';
import { type Check, type Finding, note, ok, problem } from './findings.ts';
import { pathsOf, type Surroundings, viewOf } from './project-surroundings.ts';

/**
 * Checks the directory, the command and what it needs, as they are now, by the same checks as at a deployment, and with
 * the rights of this process.
 */
export function checkFiles(
  project: ProjectDetails,
  command: NonNullable<ProjectDetails['command']>,
  variables: Readonly<Record<string, string>>,
  surroundings: Surroundings,
): Finding[] {
  const { directory } = project;
  const silent = pathsOf(project).find((path) => surroundings.unanswered.has(path));
  if (silent !== undefined) return [noAnswer(silent === directory ? 'directory' : 'command', silent)];
  const directoryFinding = checkDirectory(project);
  const hasDirectory = directoryFinding.level === 'ok';
  const [word] = command;
  // A command relative to a missing directory is missing, too: that need not be reported twice.
  const isPointless = !hasDirectory && word.includes('/') && !isAbsolute(word);
  return [
    directoryFinding,
    ...(directory === null || !hasDirectory
      ? []
      : [...checkWritable('directory', directory), ...checkView('directory', directory, surroundings)]),
    ...(isPointless ? [] : checkCommand(project, requestOf(command, directory, variables), surroundings)),
    ...checkHome(project, variables, surroundings),
  ];
}

/** Whether the files that each run of a command needs can be made; empty if they can, or no project has a command. */
export function checkTemporaryDirectory(
  projects: readonly ProjectDetails[],
  { temporaryDirectory, serviceProcessId, unanswered }: Surroundings,
): Finding[] {
  if (projects.every(({ command }) => command === null)) return [];
  if (unanswered.has(temporaryDirectory)) return [noAnswer('directory', temporaryDirectory)];
  // The service has its own one there (PrivateTmp= of systemd): what this process finds says nothing about it.
  if (serviceProcessId !== null && viewOf(serviceProcessId, temporaryDirectory) === 'hidden') return [];
  const found = parentProblem(temporaryDirectory);
  return found === undefined ? [] : [problem('directory', found.message, found.advice)];
}

/** Why the project's command could not be started, as `checkFiles` finds it; undefined: it could. */
export function startProblemOf(
  project: ProjectDetails,
  variables: Readonly<Record<string, string>>,
): StartProblem | undefined {
  const { command, directory } = project;
  if (command === null) return undefined;
  const problem = directory === null ? undefined : directoryProblem(directory);
  return problem ?? commandProblem(requestOf(command, directory, variables));
}

function requestOf(
  command: SpawnRequest['command'],
  directory: string | null,
  variables: Readonly<Record<string, string>>,
): SpawnRequest {
  return {
    command,
    directory: directory ?? tmpdir(),
    environment: { PATH: variables['PATH'] ?? COMMAND_PATH },
  };
}

function checkDirectory(project: ProjectDetails): Finding {
  const { directory } = project;
  if (directory === null) return ok('directory', 'a new, empty one each time');
  const found = directoryProblem(directory);
  return found === undefined ? ok('directory', directory) : problemFinding('directory', found, project);
}

function checkCommand(project: ProjectDetails, request: SpawnRequest, surroundings: Surroundings): Finding[] {
  const found = commandProblem(request);
  if (found !== undefined) return [problemFinding('command', found, project)];
  const path = commandPath(request) ?? request.command[0];
  return [
    checkReadable(path),
    ...checkShellOption(path),
    ...checkProgramOfEnv(project, path, request),
    ...checkWritable('command', path),
    ...checkView('command', path, surroundings),
  ];
}

/** A program starts in any case, but a script is read by its interpreter; and which of the two it is cannot be seen. */
function checkReadable(path: string): Finding {
  if (beginningOf(path) !== undefined) return ok('command', path);
  return note(
    'command',
    `${path} may be executed, but not read by this user: if it is a script, its interpreter cannot read it either`,
    `if it is a script: ${accessAdvice(path)}`,
  );
}

/** No other check is made of it, as that would block and could not be stopped. */
function noAnswer(check: Check, path: string): Finding {
  return problem(
    check,
    `${path} does not answer: usually it is on a network file system whose server is away`,
    'check that the server runs and can be reached, or remount it',
  );
}

/** The unit or the container of a service may hide files from it that this process can see. */
function checkView(check: Check, path: string, { serviceProcessId }: Surroundings): Finding[] {
  const view = serviceProcessId === null ? 'same' : viewOf(serviceProcessId, path);
  switch (view) {
    case 'same':
      return [];
    case 'hidden':
      return [
        problem(
          check,
          `the service does not see ${path}: its unit (ProtectHome=, PrivateTmp=) or its container hides it`,
          'move it elsewhere, below /srv for instance, or open it to the service: BindPaths=',
        ),
      ];
    case 'readOnly':
      if (check === 'command') return [];
      return [
        note(
          check,
          `the service may only read ${path}`,
          `if the command writes there: ReadWritePaths=${path} in the unit`,
        ),
      ];
    default:
      return view satisfies never;
  }
}

/** Other interpreters may ignore it, as perl and zsh do. */
function checkShellOption(path: string): Finding[] {
  const { interpreter, argument } = firstLineOf(path);
  if (!/^(?:a|ba|da|k)?sh$/.test(basename(interpreter)) || !/^[-+].*\r$/.test(argument)) return [];
  const line = `#!${interpreter} ${argument.slice(0, -1)}`;
  return [
    problem(
      'command',
      `${path} begins with ${line} and a CR, which the shell takes for one more option`,
      lineEndAdvice(path),
    ),
  ];
}

/** `#!/usr/bin/env node` is started in any case, and then looks for node in the command's own PATH. */
function checkProgramOfEnv(project: ProjectDetails, path: string, request: SpawnRequest): Finding[] {
  const program = programOfEnv(path);
  if (program === undefined) return [];
  const found = commandProblem({ ...request, command: [program] });
  if (found === undefined) return [];
  return [
    problem(
      'command',
      `${path} is run by ${program}, as its first line says: ${startProblemText(found)}`,
      adviceForProgramOfEnv(program, path) ?? adviceFor(found, project.id),
    ),
  ];
}

/** What to do where the first line itself is wrong; undefined: the program is missing. */
function adviceForProgramOfEnv(program: string, path: string): string | undefined {
  if (program.endsWith('\r')) return lineEndAdvice(path);
  if (!program.includes(' ')) return undefined;
  return 'begin it with #!/usr/bin/env -S, as env takes all that follows for one name otherwise';
}

/** What env(1) is told to run; undefined: that is not env, or its options and quotes leave it open. */
function programOfEnv(path: string): string | undefined {
  const { interpreter, argument } = firstLineOf(path);
  if (basename(interpreter) !== 'env' || argument === '') return undefined;
  const [, split] = /^-S[ \t]*(.*)$/.exec(argument) ?? [];
  if (split === undefined) return /^-|=/.test(argument) ? undefined : argument;
  const [, settings = '', program = ''] = /^((?:[^ \t=]+=[^ \t]*[ \t]+)*)([^ \t=]+)/.exec(split) ?? [];
  const isOpen = program === '' || /["'\\$]|^-|\bPATH=/.test(settings + program);
  return isOpen ? undefined : program;
}

/** Empty where it is no script, or may not be read. */
function firstLineOf(path: string): { interpreter: string; argument: string } {
  const beginning = beginningOf(path);
  return (beginning && firstLineIn(beginning)) ?? { interpreter: '', argument: '' };
}

/** In a directory with this bit only the owner of a file may replace it, inode(7). */
const STICKY = 0o1000;

/** The command runs with the rights of the service, so nobody else may be able to change it. */
function checkWritable(check: Check, path: string): Finding[] {
  const stat = statSync(path, { throwIfNoEntry: false });
  const isSticky = stat?.isDirectory() === true && (stat.mode & STICKY) !== 0;
  if (stat === undefined || isSticky || (stat.mode & constants.S_IWOTH) === 0) return [];
  return [problem(check, `anybody on this machine can change ${path}`, `chmod o-w ${quoteForBash(path)}`)];
}

/** git, npm and ssh need HOME, and that of a system user often does not exist. */
function checkHome(
  project: ProjectDetails,
  variables: Readonly<Record<string, string>>,
  { serviceProcessId }: Surroundings,
): Finding[] {
  const own = variables['HOME'];
  const home = own ?? homeDirectory();
  const isClosed = directoryProblem(home) !== undefined;
  // Another user has another home.
  const isOfService = own !== undefined || statusOf(`/proc/${serviceProcessId}`)?.uid === process.getuid?.();
  const isSeen = serviceProcessId === null || !isOfService || viewOf(serviceProcessId, home) === 'same';
  if (!isClosed && isSeen) return [];
  return [
    note(
      'directory',
      `HOME is ${own === undefined ? home : "the project's own"}, where ${isClosed ? 'this user' : 'the service'} cannot work`,
      `if the command needs one: davit admin project set ${project.id} --env HOME=…`,
    ),
  ];
}

function problemFinding(check: Check, found: StartProblem, project: ProjectDetails): Finding {
  return problem(check, startProblemText(found), adviceFor(found, project.id));
}

function adviceFor(problem: StartProblem, projectId: string): string {
  const set = `davit admin project set ${projectId}`;
  switch (problem.kind) {
    case 'directoryMissing':
      return `create it, or choose another one: ${set} --dir …`;
    case 'notADirectory':
      return `choose a directory: ${set} --dir …`;
    case 'directoryClosed':
      return 'let this user enter it and all directories above it: chmod o+x, or chgrp and chmod g+x';
    case 'notFound':
      return `install it there, give its whole path, or set PATH: ${set} --env PATH=…`;
    case 'commandMissing':
    case 'commandIsDirectory':
      return `put it there, or choose another one: ${set} -- …`;
    case 'commandHidden':
      return 'let this user enter all directories above it: chmod o+x, or chgrp and chmod g+x';
    case 'notExecutable':
    case 'notAllowed':
      return accessAdvice(problem.path);
    case 'onNoexec':
      return `move it to another file system, or mount that one with exec; then ${set} -- …`;
    case 'notAProgram':
      return beginsWithByteOrderMark(problem.path)
        ? `remove the byte order mark, which is before #!: sed -i '1s/^\\xef\\xbb\\xbf//' ${quoteForBash(problem.path)}`
        : 'if it is a script, begin it with a line such as #!/bin/sh';
    case 'linkLoop':
      return `fix the link, or choose another path with ${set}`;
    case 'nameTooLong':
      return `choose another path with ${set}`;
    case 'unreachable':
      return 'see whether its file system is there: a server that it needs may be away, or its disk defective (dmesg)';
    case 'noInterpreter':
      return problem.interpreter.endsWith('\r')
        ? lineEndAdvice(problem.path)
        : 'install it, or change the first line';
    case 'noLoader':
      return 'build it for this system, or statically';
    default:
      return problem satisfies never;
  }
}

function lineEndAdvice(path: string): string {
  return `its lines end with CR LF, and must end with LF: sed -i 's/\\r$//' ${quoteForBash(path)}`;
}

/** Which some editors write and none shows: a script that has one looks as if it began with `#!`. */
function beginsWithByteOrderMark(path: string): boolean {
  return beginningOf(path)?.toString('utf8', 0, 5) === '\ufeff#!';
}

/** How this user gets to execute a file and, if it is a script, to read it. Not for everybody: scripts hold secrets. */
function accessAdvice(path: string): string {
  if (statusOf(path)?.uid === process.getuid?.()) return `chmod u+rx ${quoteForBash(path)}`;
  return `let this user read and execute ${path}: chgrp and chmod g+rx, or chmod o+rx if it holds no secrets`;
}
