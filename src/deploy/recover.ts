import type { DeploymentId } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import { readProc, retryOnShortage } from '../proc.ts';
import type { ProcessStat } from '../process-identity.ts';
import type { RunningDeployment } from '../store/deployments.ts';
import type { Store } from '../store/store.ts';
import { writePersistently } from '../store/writer.ts';
import { endOf } from './outcome.ts';
import { stopTree } from './process-tree.ts';
import { visitProcesses } from './processes.ts';
import { signal } from './signals.ts';
import type { Workspaces } from './workspace.ts';

export interface RecoverOptions {
  killGraceMs: number;
  workspaces: Workspaces;
  /** The -shm of the database, which a service has in its memory. */
  sharedMemoryPath: string;
  effects: Effects;
  logger: Logger;
}

/**
 * Ends the deployments that were running when an earlier service process ended: first their processes, then the record,
 * `failed` and `interrupted` (or `canceled`, if that had been asked for). Nothing is run again, as davit cannot know
 * how far a command came. Resolves when none is left, which a process of another user or a full disk may put off for
 * ever; before that no deployment may be claimed.
 */
export async function recover({ reads, writer }: Store, options: RecoverOptions): Promise<void> {
  const { killGraceMs, workspaces, effects, logger } = options;
  const running = reads.deployments.running();
  if (running.some(({ process }) => process === null)) await endStarting(options);
  const endings = running.map((deployment) => {
    const ended = endProcesses(deployment);
    return { ended, recorded: ended.then(() => record(deployment.id)) };
  });
  await Promise.all([
    // Not only once all ends are recorded: that waits while the disk is full, perhaps of these very directories.
    Promise.all(endings.map(({ ended }) => ended)).then(removeLeft),
    ...endings.map(({ recorded }) => recorded),
  ]);

  async function endProcesses({ id, process }: RunningDeployment): Promise<void> {
    await stopTree(
      { deploymentId: id, leader: process ?? undefined },
      {
        graceMs: () => killGraceMs,
        effects,
        onStuck: (processIds) =>
          logger.error(
            { deployment_id: id, process_ids: processIds },
            'processes of an interrupted deployment cannot be ended',
          ),
      },
    );
  }

  async function record(id: DeploymentId): Promise<void> {
    // Asked now, as it may also have been canceled while its processes were being ended.
    const isCanceled = reads.deployments.get(id)?.status === 'canceling';
    const outcome = { kind: isCanceled ? 'canceled' : 'interrupted' } as const;
    await writePersistently(writer, 'deployments.finish', endOf(id, outcome, {}), effects);
    logger.warn({ deployment_id: id }, 'a deployment was interrupted by the end of the service');
  }

  /** Not awaited, as nothing depends on it: 200,000 files take seconds. */
  function removeLeft(): void {
    workspaces
      .removeLeft()
      .catch((error) => logger.warn({ err: error }, 'directories of earlier runs are left behind'));
  }
}

/** How long to wait for a process that SIGKILL does not end yet, as the disk from which execve(2) reads hangs. */
const STARTING_MAX_MS = 10_000;
const CHECK_EVERY_MS = 5;

/**
 * Ends commands that a killed service had forked and that have not reached execve(2), as they do while a disk hangs.
 * They carry no marker yet.
 */
async function endStarting({ sharedMemoryPath, effects }: RecoverOptions): Promise<void> {
  const untilMs = effects.monotonicMs() + STARTING_MAX_MS;
  do {
    if (!(await retryOnShortage(() => killStarting(sharedMemoryPath), effects))) return;
    await delay(CHECK_EVERY_MS, effects);
  } while (effects.monotonicMs() < untilMs);
}

/** Whether there was one: it may not be gone yet. */
async function killStarting(sharedMemoryPath: string): Promise<boolean> {
  let isLeft = false;
  await visitProcesses((stat) => {
    if (!isStarting(stat, sharedMemoryPath)) return;
    signal(stat.processId, 'SIGKILL');
    isLeft = true;
  });
  return isLeft;
}

/**
 * Whether a service that is gone was just starting a command in this process. Until execve(2) one that posix_spawn(3)
 * made has the memory of the service, and the name of the thread that made it. By that name it is told from all others
 * that have the database in their memory: its files would not tell it from a daemon that closed its own.
 */
function isStarting({ processId, parentId, name }: ProcessStat, sharedMemoryPath: string): boolean {
  if (name !== STARTER_NAME) return false;
  // Whoever opened the file since may have removed it and made it anew, as the last connection to close does.
  const path = inMaps(sharedMemoryPath);
  const ends = [` ${path}`, ` ${path} (deleted)`];
  const isMapped = (id: number) =>
    readProc(`/proc/${id}/maps`, MAPS_MAX_BYTES)
      ?.split('\n')
      .some((line) => ends.some((end) => line.endsWith(end))) === true;
  // In another mount namespace a living service may have the same path. It is asked first: if it closes its database
  // meanwhile, that is gone from the memory of both. An orphan may also have come to this process.
  return !(parentId !== process.pid && isMapped(parentId)) && isMapped(processId);
}

/** A service's has 33 KB. A process of that name with 65,509 mappings had 243 MB, which held davit up for 7 s. */
const MAPS_MAX_BYTES = 1024 * 1024;

/** A path as `readProc` gives it of /proc/<id>/maps, proc_pid_maps(5): as latin1, and with line ends escaped. */
function inMaps(path: string): string {
  return Buffer.from(path).toString('latin1').replaceAll('\n', '\\012');
}

/** How libuv calls the threads of its pool, in which `Posix` starts programs. */
const STARTER_NAME = 'libuv-worker';
