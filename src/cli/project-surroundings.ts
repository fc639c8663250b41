import { accessSync, constants, realpathSync } from 'node:fs';
import { stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { isAbsolute } from 'node:path';
import { givenPath } from '../deploy/command-path.ts';
import { delay, type Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import { absolutePath, statusOf } from '../paths.ts';
import { readEnvironment } from '../proc.ts';
import type { Serving } from '../store/holder.ts';
import type { ProjectDetails } from '../store/projects.ts';
import { visibleProcess } from './serving.ts';

/** What else than a project's files and settings decides whether its command can be started. */
export interface Surroundings {
  /** The process of the service that would start it; null: there is none, or it cannot be identified from here. */
  serviceProcessId: number | null;
  /** Where the files of commands are made: as the service has it, as far as that can be seen, else as this process. */
  temporaryDirectory: string;
  /** The paths of `pathsOf`, and the temporary directory, as far as their file systems did not answer. */
  unanswered: ReadonlySet<string>;
}

/** A sleeping disk needs some seconds to spin up; nobody waits much longer for a check. */
const ANSWER_TIMEOUT_MS = 5_000;

/**
 * The surroundings of these projects in the file `dbPath`. Does not reject for a path, and resolves in time: a stat(2)
 * that hangs goes on in libuv's threads.
 */
export async function surroundingsOf(
  projects: readonly ProjectDetails[],
  { dbPath, service }: { dbPath: string; service: Serving | null },
  effects: Effects,
  statPath: (path: string) => Promise<unknown> = stat,
): Promise<Surroundings> {
  const serviceProcessId = service === null ? null : await visibleProcess(service, dbPath);
  const ofService = serviceProcessId === null ? undefined : temporaryDirectoryOf(serviceProcessId);
  const temporaryDirectory = ofService ?? absolutePath(tmpdir());
  const paths = [...new Set([...projects.flatMap(pathsOf), temporaryDirectory])];
  const silent = await Promise.all(
    paths.map((path) => {
      const answered = statPath(path).then(
        () => [],
        () => [],
      );
      return Promise.race([answered, delay(ANSWER_TIMEOUT_MS, effects).then(() => [path])]);
    }),
  );
  return { serviceProcessId, temporaryDirectory, unanswered: new Set(silent.flat()) };
}

/** The paths in a project's settings: its directory, and its command unless that is a bare name. */
export function pathsOf({ command, directory }: ProjectDetails): string[] {
  const given = command === null ? undefined : givenPath({ command, directory: directory ?? '/' });
  return [...(directory === null ? [] : [directory]), ...(given === undefined ? [] : [given])];
}

/** As `tmpdir` of node:os finds it; undefined if it is relative, or the process is another user's. */
function temporaryDirectoryOf(processId: number): string | undefined {
  const environment = readEnvironment(`/proc/${processId}`);
  if (environment === undefined) return undefined;
  const variable = (name: string) => new RegExp(`(?:^|\\0)${name}=([^\\0]+)`).exec(environment)?.[1];
  const path = variable('TMPDIR') ?? variable('TMP') ?? variable('TEMP') ?? '/tmp';
  return isAbsolute(path) ? Buffer.from(path, 'latin1').toString() : undefined;
}

/** What another process sees at a path: the same as this one, the same but read-only, or not the same. */
type View = 'same' | 'readOnly' | 'hidden';

/** How a process sees a path that exists for this one; `same` if that cannot be known. */
export function viewOf(processId: number, path: string): View {
  const root = `/proc/${processId}/root`;
  const own = statusOf(path);
  if (statusOf(`${root}/`) === undefined || own === undefined) return 'same';
  // Resolved first: below /proc/…/root, absolute links would lead from the root of this process.
  const real = realpathSync(path);
  const theirs = statusOf(root + real);
  if (own.ino !== theirs?.ino || own.dev !== theirs.dev) return 'hidden';
  return isReadOnly(root + real) && !isReadOnly(real) ? 'readOnly' : 'same';
}

function isReadOnly(path: string): boolean {
  try {
    accessSync(path, constants.W_OK);
    return false;
  } catch (error) {
    return codeOf(error) === 'EROFS';
  }
}
