import { accessSync, constants, realpathSync } from 'node:fs';
import { stat } from 'node:fs/promises';
import { givenPath } from '../deploy/command-file.ts';
import { delay, type Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import type { Serving } from '../store/lock.ts';
import { statusOf } from '../store/place.ts';
import type { ProjectDetails } from '../store/projects.ts';

/** What besides a project's files decides whether its command can be started. */
export interface Surroundings {
  /** The process of the service that would start it; null: there is none, or it cannot be seen from here. */
  serviceProcessId: number | null;
  /** Of `pathsOf` those whose file system did not answer. */
  unanswered: ReadonlySet<string>;
}

/** A disk that sleeps takes some, and nobody waits much longer for a look. */
const ANSWER_TIMEOUT_MS = 5_000;

/** Of these projects in the file `dbPath`. Rejects for nothing, and returns in time; `look` goes on in libuv's threads. */
export async function surroundingsOf(
  projects: readonly ProjectDetails[],
  { dbPath, service }: { dbPath: string; service: Serving | null },
  effects: Effects,
  look: (path: string) => Promise<unknown> = stat,
): Promise<Surroundings> {
  const paths = [...new Set(projects.flatMap(pathsOf))];
  const answered = (path: string) =>
    look(path).then(
      () => true,
      () => true,
    );
  const late = async () => {
    await delay(ANSWER_TIMEOUT_MS, effects);
    return false;
  };
  const silent = await Promise.all(
    paths.map(async (path) => ((await Promise.race([answered(path), late()])) ? [] : [path])),
  );
  return {
    serviceProcessId: service === null ? null : await visibleProcess(service, dbPath),
    unanswered: new Set(silent.flat()),
  };
}

/** Where a project says that its files are; a command that PATH finds is not among them. */
export function pathsOf({ command, directory }: ProjectDetails): string[] {
  const given = command === null ? undefined : givenPath({ command, directory: directory ?? '/' });
  return [...(directory === null ? [] : [directory]), ...(given === undefined ? [] : [given])];
}

/** Null for one in another container, as a rule: there it has another id, and here that is nobody's or somebody else's. */
async function visibleProcess({ process_id }: Serving, dbPath: string): Promise<number | null> {
  const [{ openFilesOf }, { lockPath }] = await Promise.all([
    import('../deploy/proc.ts'),
    import('../store/lock.ts'),
  ]);
  return process_id !== null && openFilesOf(process_id).includes(lockPath(dbPath)) ? process_id : null;
}

/** What is at a path for another process: what is there for this one, the same but only to be read, or not that. */
type View = 'same' | 'readOnly' | 'hidden';

/** How a process sees a path that is there for this one; `same` where that cannot be told. */
export function viewOf(processId: number, path: string): View {
  const root = `/proc/${processId}/root`;
  const own = statusOf(path);
  if (statusOf(`${root}/`) === undefined || own === undefined) return 'same';
  // Links are followed here: there they would lead by the root of this process.
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
