import type { ClockSetting } from '../clock.ts';
import {
  type Deployment,
  type DeploymentId,
  isTerminal,
  type ProjectStatus,
  type Reason,
  type TerminalStatus,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import type { WriteContext } from './context.ts';
import type { DeploymentReads } from './deployments.ts';
import { endedAlready, type TransitionWrites } from './transitions.ts';

/** What another system reports about a deployment that it carries out. */
export interface Report {
  id: DeploymentId;
  status: 'running' | 'succeeded' | 'failed';
  message: string | null;
  outputs: Record<string, string> | null;
}

/** How many overdue deployments one transaction ends, so that it stays short. */
const OVERDUE_AT_ONCE = 100;

/** A clock that is set is noticed sooner, as the loop looks twice a second. */
const NOTICED_WITHIN_MS = 10_000;

/** A setting of the clock, by a minute or more. */
export interface NoticedSetting extends ClockSetting {
  /** The newest deployment when the clock was looked at before. */
  lastSeq: number;
}

/** Reports on deployments of projects without a command, which another system carries out. */
export function reportWrites(
  { database, effects, changed }: WriteContext,
  reads: DeploymentReads,
  transitions: TransitionWrites,
) {
  const circumstances = database.prepare<[string], { reported: number; project_status: ProjectStatus }>(`
    SELECT d.reported, p.status AS project_status
      FROM deployments d JOIN projects p ON p.id = d.project_id
     WHERE d.id = +?`);
  const note = database.prepare(
    'UPDATE deployments SET message = :message, outputs = :outputs WHERE id = +:id AND finished_at IS NULL',
  );
  const overdue = database
    .prepare<{ dueByMs: number }, DeploymentId>(`
      SELECT id FROM deployments
       WHERE reported = 1 AND finished_at IS NULL AND report_due_at IS NOT NULL AND report_due_at <= +:dueByMs
       ORDER BY report_due_at LIMIT ${OVERDUE_AT_ONCE}`)
    .pluck();
  // All that were created before the clock was set. Those since the last look at it, half a second ago, are told apart by
  // when they were created: what came later seems a minute older or younger. Not in steps: 200,000 take 0.25 s.
  const moveDue = database.prepare(`
    UPDATE deployments SET report_due_at = report_due_at + :byMs
     WHERE reported = 1 AND finished_at IS NULL AND report_due_at IS NOT NULL
       AND (seq <= +:lastSeq OR created_at BETWEEN +:beforeMs - ${NOTICED_WITHIN_MS} AND +:beforeMs)`);

  return {
    /**
     * Records a report. Repeating the report of an end changes nothing and is no error; `failed` ends a deployment that
     * is `canceling` as `canceled`. Throws `not_found`, and `conflict` where davit runs the command itself, the
     * deployment has ended otherwise, or it would start although its project is paused or archived.
     */
    report({ id, status, message, outputs }: Report): Deployment {
      const deployment = reads.existing(id);
      const circumstance = circumstances.get(id);
      if (circumstance?.reported !== 1) {
        throw new AppError('conflict', 'davit itself runs this deployment: it takes no reports');
      }
      if (isTerminal(deployment.status)) return repeated(deployment, deployment.status, status);
      const told = {
        ...deployment,
        message: message ?? deployment.message,
        outputs: outputs ?? deployment.outputs,
      };
      if (status === 'running') goOn(told, circumstance.project_status);
      else end(told, status, status === 'failed' ? 'reported' : null);
      return reads.existing(id);
    },

    /**
     * Ends deployments whose report was due by `dueByMs`, at most a hundred, and returns how many. A clock that is set
     * ahead while this waits for the writer makes no more of them overdue.
     */
    endOverdue({ dueByMs }: { dueByMs: number }): number {
      const late = overdue.all({ dueByMs: Math.min(dueByMs, effects.now()) });
      for (const id of late) {
        end({ ...reads.existing(id), message: 'nobody reported how it went' }, 'failed', 'report_timeout');
      }
      return late.length;
    },

    /**
     * Corrects when reports are due after the clock was set: those that are awaited are due as much later or, if it was
     * set back, earlier.
     */
    moveReportsDue({ byMs, atMs, lastSeq }: NoticedSetting): void {
      moveDue.run({ byMs, beforeMs: atMs - byMs, lastSeq });
    },
  };

  function goOn(deployment: Deployment, projectStatus: ProjectStatus): void {
    const { id, status, message, outputs } = deployment;
    if (status === 'queued') {
      if (projectStatus !== 'active') {
        throw new AppError('conflict', `the project is ${projectStatus}: report again once it is active`);
      }
      transitions.start(deployment, effects.now());
    }
    note.run({ id, message, outputs: JSON.stringify(outputs) });
    changed(id);
  }

  /** `failed` ends a deployment that is `canceling` as `canceled`. */
  function end(
    { id, status: before, message, outputs }: Deployment,
    status: 'succeeded' | 'failed',
    reason: Reason | null,
  ): void {
    const isCanceled = status === 'failed' && before === 'canceling';
    transitions.finish({
      id,
      status: isCanceled ? 'canceled' : status,
      reason: isCanceled ? 'user' : reason,
      message,
      exitCode: null,
      signal: null,
      outputs,
    });
  }
}

function repeated(deployment: Deployment, ended: TerminalStatus, reported: Report['status']): Deployment {
  const same = ended === reported || (ended === 'canceled' && reported === 'failed');
  if (!same) throw endedAlready(ended);
  return deployment;
}
