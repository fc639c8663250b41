import { constants, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, isAbsolute } from 'node:path';
import {
  commandPath,
  commandProblem,
  directoryProblem,
  interpreterOf,
  problemText,
  type SpawnRequest,
  type StartProblem,
} from '../deploy/command-file.ts';
import { COMMAND_PATH, homeDirectory, variableProblem } from '../deploy/environment.ts';
import { formatDuration } from '../durations.ts';
import type { ProjectDetails } from '../store/projects.ts';
import type { AnyFinding } from './findings.ts';
import { pathsOf, type Surroundings, viewOf } from './project-surroundings.ts';

export interface Finding extends AnyFinding {
  check: 'user' | 'status' | 'directory' | 'command' | 'variables' | 'limits';
}

/**
 * What there is to say of a project's settings, and of the files that they name, as they are now and for the user
 * of this process. Runs nothing. Names variables, never their values.
 */
export function findingsOf(
  project: ProjectDetails,
  variables: Readonly<Record<string, string>>,
  surroundings: Surroundings,
): Finding[] {
  const { command } = project;
  return [
    ...checkStatus(project),
    ...(command === null ? [NO_COMMAND] : checkFiles(project, command, variables, surroundings)),
    ...checkVariables(project, variables),
    ...(command === null ? checkReportTimeout(project) : checkTimeouts(project)),
  ];
}

/** What its deployments would fail of at their start, by the same look as `findingsOf`; undefined: nothing. */
export function startProblemOf(
  project: ProjectDetails,
  variables: Readonly<Record<string, string>>,
): StartProblem | undefined {
  const { command, directory } = project;
  const problem = directory === null ? undefined : directoryProblem(directory);
  if (problem !== undefined || command === null) return problem;
  return commandProblem(requestOf(command, directory, variables));
}

const NO_COMMAND: Finding = {
  check: 'command',
  level: 'ok',
  message: 'none: another system does the work and reports it',
  advice: null,
};

function checkStatus({ id, status }: ProjectDetails): Finding[] {
  const resume = `davit admin project resume ${id}`;
  switch (status) {
    case 'active':
      return [{ check: 'status', level: 'ok', message: 'active', advice: null }];
    case 'paused':
      return [{ check: 'status', level: 'note', message: 'paused: nothing of it starts', advice: resume }];
    case 'archived':
      return [
        { check: 'status', level: 'note', message: 'archived: it takes no deployments', advice: resume },
      ];
    default:
      return status satisfies never;
  }
}

/** What starting the command would fail of, by the same judgement as a deployment's. */
function checkFiles(
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
  // What counts from a directory that is not there is not there either: once is enough to say.
  const isPointless = !hasDirectory && word.includes('/') && !isAbsolute(word);
  return [
    directoryFinding,
    ...(directory === null || !hasDirectory
      ? []
      : [...checkWritable('directory', directory), ...checkView('directory', directory, surroundings)]),
    ...(isPointless ? [] : checkCommand(project, requestOf(command, directory, variables), surroundings)),
    ...checkHome(project, variables),
  ];
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
  if (directory === null) {
    return { check: 'directory', level: 'ok', message: 'a new, empty one each time', advice: null };
  }
  const problem = directoryProblem(directory);
  return problem === undefined
    ? { check: 'directory', level: 'ok', message: directory, advice: null }
    : problemFinding('directory', problem, project);
}

function checkCommand(project: ProjectDetails, request: SpawnRequest, surroundings: Surroundings): Finding[] {
  const problem = commandProblem(request);
  if (problem !== undefined) return [problemFinding('command', problem, project)];
  const path = commandPath(request) ?? request.command[0];
  return [
    { check: 'command', level: 'ok', message: path, advice: null },
    ...checkProgramOfEnv(project, path, request),
    ...checkWritable('command', path),
    ...checkView('command', path, surroundings),
  ];
}

/** All else would wait for it, and nobody could stop that. */
function noAnswer(check: 'directory' | 'command', path: string): Finding {
  return {
    check,
    level: 'problem',
    message: `${path} does not answer: as a rule it is on a network, and its server is away`,
    advice: 'see whether the server runs and can be reached, or mount it anew',
  };
}

/** The unit of a service, or its container, may hide from it what whoever asks can see. */
function checkView(
  check: 'directory' | 'command',
  path: string,
  { serviceProcessId }: Surroundings,
): Finding[] {
  const view = serviceProcessId === null ? 'same' : viewOf(serviceProcessId, path);
  switch (view) {
    case 'same':
      return [];
    case 'hidden':
      return [
        {
          check,
          level: 'problem',
          message: `the service does not see ${path}: its unit hides it (ProtectHome=, PrivateTmp=), or its container`,
          advice: 'put it elsewhere, below /srv for instance, or open it to the service: BindPaths=',
        },
      ];
    case 'readOnly':
      if (check === 'command') return [];
      return [
        {
          check,
          level: 'note',
          message: `the service may only read ${path}`,
          advice: `if the command writes there: ReadWritePaths=${path} in the unit`,
        },
      ];
    default:
      return view satisfies never;
  }
}

/** `#!/usr/bin/env node` starts well, and then looks for node in the command's own PATH. */
function checkProgramOfEnv(project: ProjectDetails, path: string, request: SpawnRequest): Finding[] {
  const [interpreter, ...words] = interpreterOf(path);
  if (interpreter === undefined || basename(interpreter) !== 'env') return [];
  const program = words.find((word) => !word.startsWith('-') && !word.includes('='));
  if (program === undefined) return [];
  const problem = commandProblem({ ...request, command: [program] });
  if (problem === undefined) return [];
  const { advice } = problemFinding('command', problem, project);
  return [
    {
      check: 'command',
      level: 'problem',
      message: `${path} is run by ${program}, as its first line says: ${problemText(problem)}`,
      advice,
    },
  ];
}

/** In such a directory only the owner of a file may put another in its place, inode(7). */
const STICKY = 0o1000;

/** What anybody may change runs with the rights of the service. */
function checkWritable(check: 'directory' | 'command', path: string): Finding[] {
  const stat = statSync(path, { throwIfNoEntry: false });
  const isSticky = stat?.isDirectory() === true && (stat.mode & STICKY) !== 0;
  if (stat === undefined || isSticky || (stat.mode & constants.S_IWOTH) === 0) return [];
  return [
    {
      check,
      level: 'problem',
      message: `anybody on this machine may change ${path}`,
      advice: `chmod o-w ${path}`,
    },
  ];
}

/** Git, npm and ssh look there, and the home of a system's user is often nowhere. */
function checkHome(project: ProjectDetails, variables: Readonly<Record<string, string>>): Finding[] {
  const home = variables['HOME'] ?? homeDirectory();
  if (directoryProblem(home) === undefined) return [];
  return [
    {
      check: 'directory',
      level: 'note',
      message: `HOME is ${home}, where this user cannot work`,
      advice: `if the command needs one: davit admin project set ${project.id} --env HOME=…`,
    },
  ];
}

function problemFinding(
  check: 'directory' | 'command',
  problem: StartProblem,
  project: ProjectDetails,
): Finding {
  return { check, level: 'problem', message: problemText(problem), advice: adviceFor(problem, project.id) };
}

function adviceFor(problem: StartProblem, projectId: string): string {
  const set = `davit admin project set ${projectId}`;
  switch (problem.kind) {
    case 'directoryMissing':
      return `make it, or name another with ${set} --dir …`;
    case 'notADirectory':
      return `name a directory with ${set} --dir …`;
    case 'directoryClosed':
      return `give this user the right to enter it and all above it: chmod o+x, or chgrp and chmod g+x`;
    case 'notFound':
      return `install it there, or give PATH or the whole path: ${set} --env PATH=…`;
    case 'commandMissing':
    case 'commandIsDirectory':
      return `put it there, or name another with ${set} -- …`;
    case 'commandHidden':
      return 'give this user the right to enter all directories above it: chmod o+x, or chgrp and chmod g+x';
    case 'notExecutable':
      return `chmod +x ${problem.path}; if it is so already, its file system is mounted noexec`;
    case 'notAProgram':
      return 'let it begin with a line such as #!/bin/sh, if it is a script';
    case 'linkCircle':
      return `mend the link, or name another place with ${set}`;
    case 'nameTooLong':
      return `name another place with ${set}`;
    case 'noInterpreter':
      return problem.interpreter.endsWith('\r')
        ? `its lines end with CR LF, and must end with LF: sed -i 's/\\r$//' ${problem.path}`
        : 'install that, or change the first line';
    default:
      return problem satisfies never;
  }
}

function checkVariables(project: ProjectDetails, variables: Readonly<Record<string, string>>): Finding[] {
  const names = Object.keys(variables);
  const findings = Object.entries(variables).flatMap(([name, value]): Finding[] => {
    const problem = variableProblem(name, value);
    return problem === undefined
      ? []
      : [
          {
            check: 'variables',
            level: 'problem',
            message: `${name} ${problem}`,
            advice: `davit admin project set ${project.id} --unset-env ${name}`,
          },
        ];
  });
  if (findings.length > 0) return findings;
  return [{ check: 'variables', level: 'ok', message: names.join(' ') || 'none', advice: null }];
}

/** A command that is stopped so soon hardly does its work. */
const SHORT_TIMEOUT_MS = 5_000;

function checkTimeouts(project: ProjectDetails): Finding[] {
  const { id, timeout_ms, idle_timeout_ms } = project;
  const set = `davit admin project set ${id}`;
  const limits = { check: 'limits' } as const;
  if (timeout_ms === null && idle_timeout_ms === null) {
    return [
      {
        ...limits,
        level: 'note',
        message: 'none: a command that hangs holds up all that come after it',
        advice: `${set} --timeout 30m`,
      },
    ];
  }
  const timeout = timeout_ms === null ? 'off' : formatDuration(timeout_ms);
  const idleTimeout = idle_timeout_ms === null ? 'off' : formatDuration(idle_timeout_ms);
  if (timeout_ms !== null && idle_timeout_ms !== null && idle_timeout_ms >= timeout_ms) {
    return [
      {
        ...limits,
        level: 'problem',
        message: `the idle timeout (${idleTimeout}) never counts, as the timeout (${timeout}) is not longer`,
        advice: `${set} --idle-timeout with less than ${timeout}, or off`,
      },
    ];
  }
  const shortest = Math.min(
    timeout_ms ?? Number.POSITIVE_INFINITY,
    idle_timeout_ms ?? Number.POSITIVE_INFINITY,
  );
  const message = `timeout ${timeout}, idle timeout ${idleTimeout}`;
  return shortest < SHORT_TIMEOUT_MS
    ? [{ ...limits, level: 'note', message: `${message}: very short`, advice: `${set} --timeout 30m` }]
    : [{ ...limits, level: 'ok', message, advice: null }];
}

function checkReportTimeout({ id, report_timeout_ms }: ProjectDetails): Finding[] {
  if (report_timeout_ms !== null) {
    const message = `report timeout ${formatDuration(report_timeout_ms)}`;
    return [{ check: 'limits', level: 'ok', message, advice: null }];
  }
  return [
    {
      check: 'limits',
      level: 'note',
      message: 'none: a deployment that nobody reports on stays open for ever',
      advice: `davit admin project set ${id} --report-timeout 2h`,
    },
  ];
}
