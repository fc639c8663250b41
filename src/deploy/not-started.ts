import { accessSync, closeSync, constants, openSync, readSync, type Stats, statSync } from 'node:fs';
import { delimiter, resolve } from 'node:path';
import type { SpawnRequest } from './spawner-process.ts';

/**
 * Why a command could not be started, for whoever configured it. `code` is the system's, execve(2); it says
 * ENOENT alike for a missing directory, command or interpreter, so the files are looked at again. Names
 * the command's first word, never its other arguments or its environment, which may be secret.
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
    default:
      return (
        directoryProblem(request.directory) ??
        commandProblem(request) ??
        `the command ${word} could not be started: ${code}`
      );
  }
}

function directoryProblem(directory: string): string | undefined {
  const stat = statOf(directory);
  if (stat === undefined) return `the directory ${directory} does not exist`;
  if (!stat.isDirectory()) return `${directory} is not a directory`;
  if (!mayExecute(directory)) return `the directory ${directory} may not be entered by this user`;
  return undefined;
}

function commandProblem({ command: [word], directory, environment }: SpawnRequest): string | undefined {
  const searchPath = environment['PATH'] ?? '';
  const path = word.includes('/') ? resolve(directory, word) : search(word, searchPath, directory);
  if (path === undefined) return `the command ${word} was not found in PATH (${searchPath})`;
  const stat = statOf(path);
  if (stat === undefined) return `the command ${path} does not exist`;
  if (stat.isDirectory()) return `the command ${path} is a directory`;
  if (!mayExecute(path)) return `the command ${path} is not executable`;
  const interpreter = interpreterOf(path);
  if (interpreter !== undefined && !mayExecute(interpreter)) {
    return `the command ${path} begins with #!${interpreter}, which does not exist or is not executable`;
  }
  return undefined;
}

/** As execvp(3) does: the first that may be executed, else the first that is there. */
function search(word: string, searchPath: string, directory: string): string | undefined {
  const paths = searchPath.split(delimiter).map((folder) => resolve(directory, folder, word));
  const files = paths.filter((path) => statOf(path)?.isFile());
  return files.find(mayExecute) ?? files[0];
}

function statOf(path: string): Stats | undefined {
  try {
    return statSync(path);
  } catch {
    return undefined;
  }
}

function mayExecute(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/** The kernel reads no more of a first line than this: BINPRM_BUF_SIZE, execve(2). */
const FIRST_LINE_MAX_BYTES = 256;

function interpreterOf(path: string): string | undefined {
  const bytes = Buffer.alloc(FIRST_LINE_MAX_BYTES);
  try {
    const descriptor = openSync(path, 'r');
    try {
      readSync(descriptor, bytes);
    } finally {
      closeSync(descriptor);
    }
  } catch {
    return undefined;
  }
  return /^#![ \t]*([^ \t\r\n\0]+)/.exec(bytes.toString())?.[1];
}
