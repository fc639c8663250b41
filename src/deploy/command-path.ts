import { constants } from 'node:fs';
import { access, stat } from 'node:fs/promises';
import { delimiter } from 'node:path';
import { isAccessible, pathIn, statusOf } from '../paths.ts';

/** A command to start. */
export interface SpawnRequest {
  /**
   * Argument vector. The first word is a path, relative to `directory`, or a bare name to find in the environment's
   * PATH.
   */
  command: readonly [string, ...string[]];
  /** Absolute. */
  directory: string;
  /** The whole of it. */
  environment: Record<string, string>;
}

/** The file that is run: a path is relative to the directory, a bare name is searched in PATH; undefined: not found. */
export function commandPath(request: SpawnRequest): string | undefined {
  return givenPath(request) ?? search(pathsOf(request));
}

/**
 * The same without blocking on a file system that hangs, as one over a network may: a bare name is searched in libuv's
 * threads, and only up to the first match.
 */
export function findCommand(request: SpawnRequest): string | Promise<string | undefined> {
  return givenPath(request) ?? searchAside(pathsOf(request));
}

/** The absolute path, if the command's first word is a path; undefined: it is a bare name. */
export function givenPath({
  command: [word],
  directory,
}: Pick<SpawnRequest, 'command' | 'directory'>): string | undefined {
  return word.includes('/') ? pathIn(directory, word) : undefined;
}

/** The paths at which a bare name may be. */
function pathsOf(request: SpawnRequest): string[] {
  const { command, directory } = request;
  const [word] = command;
  return searchPathOf(request)
    .split(delimiter)
    .map((folder) => pathIn(directory, `${folder === '' ? '.' : folder}/${word}`));
}

/** What a bare name is searched in: empty without a PATH. */
export function searchPathOf({ environment }: SpawnRequest): string {
  return environment['PATH'] ?? '';
}

/** Like execvp(3): the first executable file, else the first file. What comes after the match may hang. */
function search(paths: readonly string[]): string | undefined {
  let there: string | undefined;
  for (const path of paths) {
    if (statusOf(path)?.isFile() !== true) continue;
    if (mayExecute(path)) return path;
    there ??= path;
  }
  return there;
}

async function searchAside(paths: readonly string[]): Promise<string | undefined> {
  let there: string | undefined;
  for (const path of paths) {
    const isFile = await stat(path).then(
      (stats) => stats.isFile(),
      () => false,
    );
    if (!isFile) continue;
    const isExecutable = await access(path, constants.X_OK).then(
      () => true,
      () => false,
    );
    if (isExecutable) return path;
    there ??= path;
  }
  return there;
}

/** Whether this user may execute a file, or enter a directory. */
export function mayExecute(path: string): boolean {
  return isAccessible(path, constants.X_OK);
}
