import { delay, type Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import type { RunningDeployment } from '../store/deployments.ts';
import type { Store } from '../store/store.ts';
import { writePersistently } from '../store/writer.ts';
import { endOf } from './executor.ts';
import { holdersOf, stopTree } from './processes.ts';
import type { Workspaces } from './workspace.ts';

/**
 * Ends what an earlier run of the service left running and did not see the end of: first its processes,
 * then the record, `failed` and `interrupted` (or `canceled`, where that was under way). Nothing is run again:
 * how far it came is not ours to know. Resolves when none is left, which a process of another user or a full disk may
 * put off for ever; before that nothing new may be claimed.
 */
export async function recover(
  { reads, writer }: Store,
  options: {
    killGraceMs: number;
    workspaces: Workspaces;
    /** A file that only a service has open. */
    lockPath: string;
    effects: Effects;
    logger: Logger;
  },
): Promise<void> {
  const { killGraceMs, workspaces, lockPath, effects, logger } = options;
  const running = reads.deployments.running();
  if (running.some(({ process }) => process === null)) await untilStarted(lockPath, effects);
  await Promise.all(running.map(end));
  // Nobody needs them, and nobody waits for it: 200,000 files take seconds.
  workspaces
    .removeLeft()
    .catch((error) => logger.warn({ err: error }, 'directories of earlier runs are left behind'));

  async function end({ id, process }: RunningDeployment): Promise<void> {
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
    // Canceled before the crash, or meanwhile.
    const isCanceled = reads.deployments.get(id)?.status === 'canceling';
    const outcome = { kind: isCanceled ? 'canceled' : 'interrupted' } as const;
    await writePersistently(writer, 'deployments.finish', endOf(id, outcome, {}), effects);
    logger.warn({ deployment_id: id }, 'a deployment was interrupted by the end of the service');
  }
}

/** So long the kernel may take to start a command; it waits for a disk, for instance. */
const STARTING_MAX_MS = 10_000;
const LOOK_EVERY_MS = 5;

/**
 * A command that a killed service was just starting outlives it, and cannot be told from it before execve(2): it has the
 * service's environment in place of its own. And the service's open files, by which it is known.
 */
async function untilStarted(lockPath: string, effects: Effects): Promise<void> {
  const untilMs = effects.monotonicMs() + STARTING_MAX_MS;
  while (holdersOf(lockPath).length > 0 && effects.monotonicMs() < untilMs) {
    await delay(LOOK_EVERY_MS, effects);
  }
}
