import type { DeploymentId, ProjectId, Reason, Ref, TerminalStatus } from '../domain.ts';
import { AppError } from '../errors.ts';
import type { WriteContext } from './context.ts';
import type { DeploymentReads } from './deployments.ts';
import type { EventWrites } from './events.ts';

/** How a deployment ended. */
export interface DeploymentEnd {
  id: DeploymentId;
  status: TerminalStatus;
  reason: Reason | null;
  message: string | null;
  exitCode: number | null;
  signal: string | null;
  outputs: Record<string, string>;
  /** When it ended; undefined: now. A full disk, for instance, may have delayed the record of it. */
  endedAtMs?: number | undefined;
}

/** The message of a deployment that waited when its project was archived. */
export const PROJECT_ARCHIVED = 'its project was archived';

export type TransitionWrites = ReturnType<typeof transitionWrites>;

/** Starts and ends deployments; nothing else does. Writes status, event and outbox rows together. */
export function transitionWrites(
  { database, effects, changed }: WriteContext,
  reads: DeploymentReads,
  events: EventWrites,
) {
  const markRunning = database.prepare(
    `UPDATE deployments SET status = 'running', started_at = max(created_at, :at) WHERE id = +:id AND status = 'queued'`,
  );
  const end = database.prepare(`
    UPDATE deployments
       SET status = :status, reason = :reason, message = :message, exit_code = :exitCode, signal = :signal,
           outputs = :outputs, finished_at = max(created_at, coalesce(started_at, 0), :finishedAt)
     WHERE id = +:id AND finished_at IS NULL`);

  return {
    /** Makes a deployment, which must be queued, `running` since `at`. */
    start(deployment: { id: DeploymentId; project_id: ProjectId; ref: Ref }, at: number): void {
      markRunning.run({ id: deployment.id, at });
      events.record('deployment.started', deployment, at);
      changed(deployment.id);
    },

    /**
     * Records the end. To be called when nothing of the deployment runs any more. If it has already ended, nothing
     * changes.
     */
    finish({ outputs, endedAtMs, ...rest }: DeploymentEnd): void {
      const at = effects.now();
      const finishedAt = Math.min(at, endedAtMs ?? at);
      if (end.run({ ...rest, outputs: JSON.stringify(outputs), finishedAt }).changes === 0) return;
      events.record(`deployment.${rest.status}`, reads.existing(rest.id), at);
      changed(rest.id);
    },
  };
}

/** The error for a request that a finished deployment does not allow. */
export function endedAlready(status: TerminalStatus): AppError {
  return new AppError(
    'conflict',
    `the deployment has ended already: it ${status === 'canceled' ? 'was canceled' : status}`,
  );
}
