import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import type { UnfinishedDeployment } from '../store/deployments.ts';
import type { Store } from '../store/store.ts';
import { writePersistently } from '../store/writer.ts';
import { stopTree } from './processes.ts';
import { removeWorkspaceOf } from './workspace.ts';

/**
 * Ends what an earlier run of the service left running and did not see the end of: first its processes,
 * then the record, `failed` and `interrupted` (or `canceled`, where that was under way). Nothing is run again:
 * how far it came is not ours to know. Resolves when none is left; before that nothing new may be claimed.
 */
export async function recover(
  { reads, writer }: Store,
  options: { killGraceMs: number; temporaryDirectory: string; effects: Effects; logger: Logger },
): Promise<void> {
  const { killGraceMs, temporaryDirectory, effects, logger } = options;
  await Promise.all(reads.deployments.unfinished().map(end));

  async function end({ id, status, process }: UnfinishedDeployment): Promise<void> {
    await stopTree(
      { deploymentId: id, leader: process ?? undefined },
      {
        graceMs: killGraceMs,
        effects,
        onStuck: (processIds) =>
          logger.error(
            { deployment_id: id, process_ids: processIds },
            'processes of an interrupted deployment cannot be ended',
          ),
      },
    );
    await removeWorkspaceOf(temporaryDirectory, id).catch((error) =>
      logger.warn({ err: error, deployment_id: id }, 'a directory of a run is left behind'),
    );
    const wasCanceled = status === 'canceling';
    await writePersistently(
      writer,
      'deployments.finish',
      {
        id,
        status: wasCanceled ? 'canceled' : 'failed',
        reason: wasCanceled ? 'user' : 'interrupted',
        message: wasCanceled ? null : 'davit stopped while this ran; it may have done a part of its work',
        exitCode: null,
        signal: null,
        outputs: {},
      },
      effects,
    );
    logger.warn({ deployment_id: id }, 'a deployment was interrupted by the end of the service');
  }
}
