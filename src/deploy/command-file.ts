import { constants, Stats, statSync } from 'node:fs';
import { codeOf } from '../errors.ts';
import { isAccessible, octal, pathIn } from '../paths.ts';
import { printable } from '../printable.ts';
import { isOnNoexec } from '../store/mounts.ts';
import { commandPath, mayExecute, type SpawnRequest, searchPathOf } from './command-path.ts';
import { COMMAND_PATH } from './environment.ts';
import { beginningOf, firstLineIn, isNoProgram, loaderIn } from './program-format.ts';

/** What is wrong with the files of a command, so that it cannot be started. */
export type StartProblem =
  | { kind: 'directoryMissing' | 'notADirectory' | 'directoryClosed'; path: string }
  /** `word` is in none of the directories of `searchPath`. */
  | { kind: 'notFound'; word: string; searchPath: string }
  | {
      kind:
        | 'commandMissing'
        | 'commandHidden'
        | 'commandIsDirectory'
        | 'notExecutable'
        | 'onNoexec'
        | 'notAProgram';
      path: string;
    }
  /** Executable, but not by this user. `mode`: as in `Stats`. `uid`: its owner. */
  | { kind: 'notAllowed'; path: string; mode: number; uid: number }
  | Unreachable
  | { kind: 'noInterpreter'; path: string; interpreter: string }
  | { kind: 'noLoader'; path: string; loader: string };

/** Whether something is at the path cannot be found out. `code`: the system's error code, stat(2). */
type Unreachable =
  | { kind: 'linkLoop' | 'nameTooLong'; path: string }
  | { kind: 'unreachable'; path: string; code: string };

/**
 * Why a command could not be started, for the person who configured it. `code` is the system's error code, execve(2),
 * or `hidden in /proc`. As ENOENT may mean a missing directory, command or interpreter, the files are checked here.
 * Shows the command's first word, never its other arguments or its environment, which may be secret.
 */
export function whyNotStarted(code: string, request: SpawnRequest): string {
  const [word] = request.command;
  switch (code) {
    case 'E2BIG':
      return 'the arguments and the environment of the command are larger than the system allows';
    case 'EAGAIN':
      return 'the system allows no more processes';
    case 'EMFILE':
    case 'ENFILE':
      return 'the system allows no more open files';
    case 'ENOMEM':
      return 'there is not enough memory to start the command';
    case 'hidden in /proc':
      return `the command ${word} became another user, whose processes /proc hides from davit (hidepid), and was ended if davit may: let the group of davit see them (gid= of /proc)`;
    case 'ENOEXEC':
      return startProblemText(commandProblem(request) ?? { kind: 'notAProgram', path: word });
    case 'ETXTBSY':
      return `the command ${word} is open for writing: deploy again once whoever writes it is done`;
    case 'ENOENT':
    case 'ENOTDIR':
    case 'EACCES':
    case 'EPERM':
    case 'ELOOP':
    case 'ENAMETOOLONG': {
      const problem = directoryProblem(request.directory) ?? commandProblem(request);
      if (problem !== undefined) return startProblemText(problem);
      if (!isAccessible('/dev/null', constants.R_OK))
        return `/dev/null, which every command has as its stdin, cannot be read by this user (${code}): create it again, or mount /dev`;
      return code === 'ENOENT'
        ? `the command ${word} exists but could not be started (ENOENT): usually what its interpreter needs is missing`
        : textOf(word, code);
    }
    default:
      // No files are looked at: on a file system that does not answer, that would block davit.
      return textOf(word, code);
  }
}

/**
 * The same for a name that `findCommand` did not find. Looks at no file, not even at the directory, as that could block
 * davit.
 */
export function whyNotFound(request: SpawnRequest): string {
  return startProblemText(notFound(request));
}

function textOf(word: string, code: string): string {
  return `the command ${word} could not be started: ${code}`;
}

/** The problem as a sentence. */
export function startProblemText(problem: StartProblem): string {
  switch (problem.kind) {
    case 'directoryMissing':
      return `the directory ${problem.path} does not exist`;
    case 'notADirectory':
      return `${problem.path} is not a directory`;
    case 'directoryClosed':
      return `the directory ${problem.path} may not be entered by this user`;
    case 'notFound':
      // A project's own PATH is one of its variables, and their values are never shown.
      return `the command ${problem.word} was not found in PATH (${problem.searchPath === COMMAND_PATH ? COMMAND_PATH : "the project's own"})`;
    case 'commandMissing':
      return `the command ${problem.path} does not exist`;
    case 'commandHidden':
      return `the command ${problem.path} may not be reached by this user`;
    case 'commandIsDirectory':
      return `the command ${problem.path} is a directory`;
    case 'notExecutable':
      return `the command ${problem.path} is not executable`;
    case 'onNoexec':
      return `the command ${problem.path} is on a file system that is mounted noexec`;
    case 'notAllowed':
      return `this user may not execute the command ${problem.path} (${permissionsText(problem)})`;
    case 'notAProgram':
      return `the command ${problem.path} is neither a program for this machine nor a script that begins with #!`;
    case 'linkLoop':
      return `${problem.path} cannot be reached: its symbolic links form a loop`;
    case 'nameTooLong':
      return `${problem.path} cannot be reached: the name is too long`;
    case 'unreachable':
      return `${problem.path} cannot be reached: ${problem.code}`;
    case 'noInterpreter':
      return `the command ${problem.path} begins with #!${printable(problem.interpreter)}, which does not exist or is not executable`;
    case 'noLoader':
      return `the command ${problem.path} needs the dynamic loader ${printable(problem.loader)}, which is missing here: it was built for another system`;
    default:
      return problem satisfies never;
  }
}

/** `0700, root` */
function permissionsText({ mode, uid }: { mode: number; uid: number }): string {
  return `${octal(mode).padStart(4, '0')}, ${uid === 0 ? 'root' : `user ${uid}`}`;
}

/** Why this user cannot work in a directory; undefined: it can. */
export function directoryProblem(path: string): StartProblem | undefined {
  const stat = statOf(path);
  if (stat === 'hidden') return { kind: 'directoryClosed', path };
  if (stat === undefined) return { kind: 'directoryMissing', path };
  if (isUnreachable(stat)) return stat;
  if (!stat.isDirectory()) return { kind: 'notADirectory', path };
  return mayExecute(path) ? undefined : { kind: 'directoryClosed', path };
}

/** Why this user cannot run a command, as far as its files show; undefined: nothing is wrong with them. */
export function commandProblem(request: SpawnRequest): StartProblem | undefined {
  const path = commandPath(request);
  if (path === undefined) return notFound(request);
  const stat = statOf(path);
  if (stat === 'hidden') return { kind: 'commandHidden', path };
  if (stat === undefined) return { kind: 'commandMissing', path };
  if (isUnreachable(stat)) return stat;
  if (stat.isDirectory()) return { kind: 'commandIsDirectory', path };
  if (!stat.isFile()) return { kind: 'notExecutable', path };
  return mayExecute(path) ? contentProblem(path, request) : executionProblem(path, stat);
}

/** So many scripts the kernel follows, each the interpreter of the one before: ELOOP, execve(2). */
const SCRIPTS_MAX = 5;

/** Why the kernel cannot execute what is in an executable file. `scripts`: as many led to it. */
function contentProblem(path: string, request: SpawnRequest, scripts = 0): StartProblem | undefined {
  const beginning = beginningOf(path);
  if (beginning === undefined) return undefined;
  const loader = loaderIn(beginning);
  // Without a name the file was cut off before it.
  if (isNoProgram(beginning) || loader === '') return { kind: 'notAProgram', path };
  const interpreter = firstLineIn(beginning)?.interpreter;
  if (interpreter === undefined) {
    return loader === undefined
      ? undefined
      : neededProblem(loader, request, { kind: 'noLoader', path, loader });
  }
  const found = neededProblem(interpreter, request, { kind: 'noInterpreter', path, interpreter });
  if (found !== undefined || scripts === SCRIPTS_MAX) return found;
  return contentProblem(pathIn(request.directory, interpreter), request, scripts + 1);
}

function executionProblem(path: string, { mode, uid }: Stats): StartProblem {
  if ((mode & 0o111) === 0) return { kind: 'notExecutable', path };
  if (isOnNoexec(path)) return { kind: 'onNoexec', path };
  return { kind: 'notAllowed', path, mode, uid };
}

function notFound(request: SpawnRequest): StartProblem {
  return { kind: 'notFound', word: request.command[0], searchPath: searchPathOf(request) };
}

/** Why the kernel cannot execute what a command needs; `missing`: as no executable file is there. */
function neededProblem(
  needed: string,
  { directory }: SpawnRequest,
  missing: StartProblem,
): StartProblem | undefined {
  // To the kernel, a relative path begins in the working directory.
  const path = pathIn(directory, needed);
  const stat = statOf(path);
  if (isUnreachable(stat)) return stat;
  return isFile(stat) && mayExecute(path) ? undefined : missing;
}

/** Undefined: nothing is there; `hidden`: this user may not search a directory on the way. */
type Found = Stats | 'hidden' | Unreachable | undefined;

function statOf(path: string): Found {
  try {
    return statSync(path);
  } catch (error) {
    const code = codeOf(error);
    switch (code) {
      case 'ENOENT':
      case 'ENOTDIR':
        return undefined;
      case 'EACCES':
        return 'hidden';
      case 'ELOOP':
        return { kind: 'linkLoop', path };
      case 'ENAMETOOLONG':
        return { kind: 'nameTooLong', path };
      default:
        return { kind: 'unreachable', path, code };
    }
  }
}

function isUnreachable(found: Found): found is Unreachable {
  return typeof found === 'object' && 'kind' in found;
}

function isFile(found: Found): boolean {
  return found instanceof Stats && found.isFile();
}
