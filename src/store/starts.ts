import type { DeploymentId, ProjectId, Ref } from '../domain.ts';
import type { WriteContext } from './context.ts';
import type { EventWrites } from './events.ts';

export type StartWrites = ReturnType<typeof startWrites>;

/** Starts deployments; nothing else does. Writes status, event and outbox rows together. */
export function startWrites({ database, changed }: WriteContext, events: EventWrites) {
  const markRunning = database.prepare(
    `UPDATE deployments SET status = 'running', started_at = max(created_at, :at) WHERE id = +:id AND status = 'queued'`,
  );

  return {
    /** Makes a deployment, which must be queued, `running` since `at`. */
    start(deployment: { id: DeploymentId; project_id: ProjectId; ref: Ref }, at: number): void {
      markRunning.run({ id: deployment.id, at });
      events.record('deployment.started', deployment, at);
      changed(deployment.id);
    },
  };
}
