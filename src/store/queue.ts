import {
  type Deployment,
  type DeploymentId,
  isTerminal,
  type KeyId,
  newId,
  type ProjectId,
  type ProjectStatus,
  type QueuePolicy,
  type Ref,
  type Trigger,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import type { ProcessIdentity } from '../process-identity.ts';
import type { WriteContext } from './context.ts';
import { toDeployment } from './deployment-rows.ts';
import type { DeploymentReads } from './deployments.ts';
import type { EventWrites } from './events.ts';
import { type ProjectDetails, type ProjectWrites, projectReads } from './projects.ts';
import { endedAlready, PROJECT_ARCHIVED, type TransitionWrites } from './transitions.ts';

export interface NewDeployment {
  projectId: ProjectId;
  ref: Ref;
  trigger: Trigger;
  /** Null: created by `davit admin`. */
  keyId: KeyId | null;
  redeployOf: DeploymentId | null;
  /** How many deployments may wait in the project; null: any number. */
  maxQueued: number | null;
}

/** What the executor needs to run a deployment. */
export interface ClaimedDeployment {
  id: DeploymentId;
  ref: Ref;
  project_id: ProjectId;
  project_name: string;
  command: [string, ...string[]];
  directory: string | null;
  timeout_ms: number | null;
  idle_timeout_ms: number | null;
  variables: Record<string, string>;
  /** The ref that succeeded last in this project; null: none did. */
  previous_ref: Ref | null;
}

interface ClaimRow extends Omit<ClaimedDeployment, 'command' | 'variables' | 'previous_ref'> {
  command: string;
}

/** What decides about a new deployment of a project, and who creates it. */
interface ProjectForNew {
  status: ProjectStatus;
  command: string | null;
  policy: QueuePolicy;
  report_timeout_ms: number | null;
  queued_count: number;
  /** Null: `davit admin` does. */
  key_name: string | null;
}

/** A guess, as it depends on when a deployment ends. */
const QUEUE_FULL_RETRY_SECONDS = 30;

/** Whether a new deployment is refused when too many wait, and whether it replaces those that wait. */
const POLICIES: Record<QueuePolicy, { isBounded: boolean; supersedes: boolean }> = {
  queue: { isBounded: true, supersedes: false },
  latest: { isBounded: false, supersedes: true },
};

/** Creates, claims and cancels deployments: how they enter and leave the queue of their project. */
export function queueWrites(
  { database, effects, changed }: WriteContext,
  reads: DeploymentReads,
  { setStatus }: Pick<ProjectWrites, 'setStatus'>,
  events: EventWrites,
  transitions: TransitionWrites,
) {
  const projects = projectReads(database);

  const projectForNew = database.prepare<{ projectId: ProjectId; keyId: KeyId | null }, ProjectForNew>(`
    SELECT status, command, policy, report_timeout_ms, queued_count,
           (SELECT name FROM keys WHERE id = +:keyId) AS key_name
      FROM projects WHERE id = +:projectId`);
  const insert = database.prepare(`
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_by_key_id, redeploy_of,
                             created_at, report_due_at)
    VALUES (:id, :projectId, :ref, 'queued', :reported, :trigger, :keyId, :redeployOf, :createdAt, :reportDueAt)`);
  // A trigger takes it back once the deployment waits no longer.
  const joinQueue = database.prepare('UPDATE projects SET queued_count = queued_count + 1 WHERE id = +?');
  const queued = database
    .prepare<[string], DeploymentId>(
      `SELECT id FROM deployments WHERE project_id = +? AND status = 'queued' AND reported = 0 ORDER BY seq`,
    )
    .pluck();
  const supersede = database.prepare('UPDATE deployments SET superseded_by = :by WHERE id = +:id');
  const markCanceling = database.prepare(`UPDATE deployments SET status = 'canceling' WHERE id = +?`);

  // The oldest deployment of the project whose turn it is, among those that have none running.
  const nextQueued = database.prepare<[], ClaimRow>(`
    SELECT d.id, d.ref, d.project_id, p.name AS project_name, p.command, p.directory, p.timeout_ms, p.idle_timeout_ms
      FROM projects p INDEXED BY projects_waiting
      JOIN deployments d
        ON d.seq = (SELECT min(q.seq) FROM deployments q
                     WHERE q.project_id = p.id AND q.status = 'queued' AND q.reported = 0)
     WHERE p.queued_count > 0 AND p.status = 'active' AND p.command IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM deployments r
                        WHERE r.project_id = p.id AND r.status IN ('running', 'canceling') AND r.reported = 0)
     ORDER BY p.last_started_at, p.seq
     LIMIT 1`);
  // Corrects starts in the future, recorded before the clock was set back: such a project would get no turn until that
  // time while other projects have deployments waiting.
  const forgetLaterStarts = database.prepare(`
    UPDATE projects INDEXED BY projects_waiting SET last_started_at = :at
     WHERE queued_count > 0 AND status = 'active' AND last_started_at > +:at`);
  const previousRef = database
    .prepare<[ProjectId], Ref>(`
      SELECT ref FROM deployments
       WHERE project_id = +? AND status = 'succeeded'
       ORDER BY seq DESC LIMIT 1`)
    .pluck();
  const setProcess = database.prepare(`
    UPDATE deployments SET process_id = :processId, process_started_at = :processStartedAt, boot_id = :bootId
     WHERE id = +:id AND finished_at IS NULL`);

  return {
    create,

    /**
     * Deploys the ref of a deployment again, with the project's current settings. Throws as `create`, and `not_found`.
     */
    redeploy(input: { id: DeploymentId; keyId: KeyId | null; maxQueued: number | null }): Deployment {
      const { id, project_id: projectId, ref } = reads.existing(input.id);
      const { keyId, maxQueued } = input;
      return create({ projectId, ref, trigger: 'redeploy', keyId, redeployOf: id, maxQueued });
    },

    /**
     * Cancels a deployment: at once if it is queued; a running one is `canceling` until its command has ended, or the
     * other system has reported. Throws `not_found`, and `conflict` for one that has ended.
     */
    cancel({ id }: { id: DeploymentId }): Deployment {
      const { status } = reads.existing(id);
      if (isTerminal(status)) throw endedAlready(status);
      if (status === 'queued') {
        transitions.finish({ id, status: 'canceled', reason: 'user', ...NOTHING_RAN });
      } else if (status === 'running') {
        markCanceling.run(id);
        changed('queue');
        changed(id);
      }
      return reads.existing(id);
    },

    /** Archives a project and cancels the deployments that wait in it, with their events. Throws `not_found`. */
    archive({ id }: { id: ProjectId }): { project: ProjectDetails; canceledIds: DeploymentId[] } {
      const project = setStatus({ id, status: 'archived' });
      const canceledIds = queued.all(id);
      for (const canceledId of canceledIds) {
        transitions.finish({
          id: canceledId,
          status: 'canceled',
          reason: 'user',
          ...NOTHING_RAN,
          message: PROJECT_ARCHIVED,
        });
      }
      return { project: { ...project, queued_count: 0 }, canceledIds };
    },

    /**
     * Makes the next deployment that may start `running`, and returns it; null: there is none. It is the oldest one of
     * the project with the earliest last start, among the active projects that have none running.
     */
    claim(): ClaimedDeployment | null {
      const at = effects.now();
      forgetLaterStarts.run({ at });
      const next = nextQueued.get();
      if (next === undefined) return null;
      transitions.start(next, at);
      const { command, ...claimed } = next;
      return {
        ...claimed,
        command: JSON.parse(command) as ClaimedDeployment['command'],
        variables: projects.variables(next.project_id),
        previous_ref: previousRef.get(next.project_id) ?? null,
      };
    },

    /** Records the process of a claimed deployment, for the recovery after a crash. */
    setProcess(input: ProcessIdentity & { id: DeploymentId }): void {
      setProcess.run(input);
    },
  };

  /**
   * Queues a deployment of `ref`. Throws `not_found` (no such project), `conflict` (archived) and `rate_limited` (the
   * queue is full).
   */
  function create(input: NewDeployment): Deployment {
    const { projectId, ref, trigger, keyId, redeployOf } = input;
    const project = projectForNew.get({ projectId, keyId });
    if (project === undefined) throw new AppError('not_found', 'there is no such project');
    if (project.status === 'archived') {
      throw new AppError('conflict', 'the project is archived and takes no new deployments');
    }
    const isReported = project.command === null;
    const { isBounded, supersedes } = POLICIES[project.policy];
    if (!isReported && isBounded) refuseFullQueue(project, input.maxQueued);
    const id = newId('dpl', effects);
    const createdAt = effects.now();
    const reportDueAt =
      isReported && project.report_timeout_ms !== null ? createdAt + project.report_timeout_ms : null;
    insert.run({
      id,
      projectId,
      ref,
      reported: isReported ? 1 : 0,
      trigger,
      keyId,
      redeployOf,
      createdAt,
      reportDueAt,
    });
    if (!isReported) joinQueue.run(projectId);
    events.record('deployment.created', { id, project_id: projectId, ref }, createdAt);
    const superseded = !isReported && supersedes ? supersedeOlder(projectId, id) : 0;
    if (!isReported) changed('queue');
    // Not read from the database: that would cost as much as the write.
    return toDeployment(
      {
        id,
        project_id: projectId,
        ref,
        status: 'queued',
        reason: null,
        message: null,
        trigger,
        created_by_key_id: keyId,
        created_by_name: project.key_name,
        redeploy_of: redeployOf,
        superseded_by: null,
        created_at: createdAt,
        started_at: null,
        finished_at: null,
        exit_code: null,
        signal: null,
        outputs: '{}',
        log_bytes: 0,
        log_truncated: 0,
      },
      isReported ? null : project.queued_count - superseded + 1,
    );
  }

  function refuseFullQueue({ queued_count, status }: ProjectForNew, maxQueued: number | null): void {
    if (maxQueued === null || queued_count < maxQueued) return;
    const waiting = `${queued_count} ${queued_count === 1 ? 'deployment waits' : 'deployments wait'}`;
    throw new AppError(
      'rate_limited',
      status === 'paused'
        ? `${waiting} in this project already, which is paused: try again once it is active`
        : `${waiting} in this project already: try again when one has finished`,
      { retryAfterSeconds: QUEUE_FULL_RETRY_SECONDS },
    );
  }

  function supersedeOlder(projectId: ProjectId, by: DeploymentId): number {
    const older = queued.all(projectId).filter((id) => id !== by);
    for (const id of older) {
      supersede.run({ id, by });
      transitions.finish({ id, status: 'canceled', reason: 'superseded', ...NOTHING_RAN });
    }
    return older.length;
  }
}

const NOTHING_RAN = { message: null, exitCode: null, signal: null, outputs: {} };
