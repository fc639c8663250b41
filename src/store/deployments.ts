import {
  type Deployment,
  type DeploymentId,
  type DeploymentStatus,
  type KeyId,
  newId,
  optionalTimestamp,
  type ProjectId,
  type Reason,
  type Ref,
  type TerminalStatus,
  type Trigger,
  timestamp,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';
import { eventWrites } from './events.ts';
import type { Caller } from './keys.ts';
import { projectReads, VISIBLE_PROJECT, viewer } from './projects.ts';

export interface NewDeployment {
  projectId: ProjectId;
  ref: Ref;
  trigger: Trigger;
  /** Null: made on the machine. */
  keyId: KeyId | null;
  redeployOf: DeploymentId | null;
  /** How many may wait in one project; null: any number. */
  maxQueued: number | null;
}

/** What the executor needs to carry a deployment out. */
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
  /** The ref that succeeded last in this project. */
  previous_ref: Ref | null;
}

/** The three together name one process for ever; a process id alone is reused. */
export interface StoredProcess {
  processId: number;
  /** Clock ticks since boot. */
  processStartedAt: number;
  bootId: string;
}

export interface DeploymentEnd {
  id: DeploymentId;
  status: TerminalStatus;
  reason: Reason | null;
  message: string | null;
  exitCode: number | null;
  signal: string | null;
  outputs: Record<string, string>;
}

/** What an earlier run of the service left behind. */
export interface UnfinishedDeployment {
  id: DeploymentId;
  status: 'running' | 'canceling';
  process: StoredProcess | null;
}

interface DeploymentRow {
  seq: number;
  id: DeploymentId;
  project_id: ProjectId;
  ref: Ref;
  status: DeploymentStatus;
  reason: Reason | null;
  message: string | null;
  reported: number;
  trigger: Trigger;
  created_by_key_id: KeyId | null;
  created_by_name: string | null;
  redeploy_of: DeploymentId | null;
  superseded_by: DeploymentId | null;
  created_at: number;
  started_at: number | null;
  finished_at: number | null;
  exit_code: number | null;
  signal: string | null;
  outputs: string;
  log_bytes: number;
  log_truncated: number;
}

const DEPLOYMENT_COLUMNS = `
  d.seq, d.id, d.project_id, d.ref, d.status, d.reason, d.message, d.reported, d.trigger,
  d.created_by_key_id, k.name AS created_by_name, d.redeploy_of, d.superseded_by,
  d.created_at, d.started_at, d.finished_at, d.exit_code, d.signal, d.outputs, d.log_bytes, d.log_truncated`;
const DEPLOYMENTS = 'deployments d LEFT JOIN keys k ON k.id = d.created_by_key_id';

/** Until the queue moves on: nobody can say better how long a deployment takes. */
const QUEUE_FULL_RETRY_SECONDS = 30;

export function deploymentReads(database: Database) {
  const byId = database.prepare<[string], DeploymentRow>(
    `SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS} WHERE d.id = ?`,
  );
  const visible = database.prepare<{ id: string; allProjects: number; keyId: string }, DeploymentRow>(`
    SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS}
     WHERE d.id = :id AND ${VISIBLE_PROJECT('d.project_id')}`);
  const queuedBefore = database
    .prepare<{ projectId: ProjectId; seq: number }, number>(`
      SELECT count(*) FROM deployments
       WHERE project_id = :projectId AND status = 'queued' AND reported = 0 AND seq < :seq`)
    .pluck();
  const unfinished = database.prepare<
    [],
    {
      id: DeploymentId;
      status: 'running' | 'canceling';
      process_id: number | null;
      process_started_at: number | null;
      boot_id: string | null;
    }
  >(`
    SELECT id, status, process_id, process_started_at, boot_id FROM deployments
     WHERE status IN ('running', 'canceling') AND reported = 0
     ORDER BY seq`);

  return {
    get(id: string): Deployment | undefined {
      const row = byId.get(id);
      return row === undefined ? undefined : toDeployment(row, queuePosition(row));
    },

    /** As this caller sees it; undefined if it is not there or its project is not the caller's. */
    visibleTo(caller: Caller, id: string): Deployment | undefined {
      const row = visible.get({ id, ...viewer(caller) });
      return row === undefined ? undefined : toDeployment(row, queuePosition(row));
    },

    /** What the executor has begun and not ended, oldest first. After a start that is what a crash interrupted. */
    unfinished: (): UnfinishedDeployment[] =>
      unfinished.all().map((row) => ({
        id: row.id,
        status: row.status,
        process:
          row.process_id === null || row.process_started_at === null || row.boot_id === null
            ? null
            : { processId: row.process_id, processStartedAt: row.process_started_at, bootId: row.boot_id },
      })),
  };

  function queuePosition(row: DeploymentRow): number | null {
    if (row.status !== 'queued' || row.reported === 1) return null;
    return (queuedBefore.get({ projectId: row.project_id, seq: row.seq }) ?? 0) + 1;
  }
}

export function deploymentWrites(context: WriteContext) {
  const { database, effects, changed } = context;
  const reads = deploymentReads(database);
  const projects = projectReads(database);
  const events = eventWrites(context);

  const projectForNew = database.prepare<
    [string],
    {
      status: string;
      command: string | null;
      policy: string;
      report_timeout_ms: number | null;
      queued_count: number;
    }
  >('SELECT status, command, policy, report_timeout_ms, queued_count FROM projects WHERE id = ?');
  const insert = database.prepare(`
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_by_key_id, redeploy_of,
                             created_at, report_due_at)
    VALUES (:id, :projectId, :ref, 'queued', :reported, :trigger, :keyId, :redeployOf, :createdAt, :reportDueAt)`);
  const queuedIds = database
    .prepare<{ projectId: ProjectId; id: DeploymentId }, DeploymentId>(`
      SELECT id FROM deployments
       WHERE project_id = :projectId AND status = 'queued' AND reported = 0 AND id <> :id
       ORDER BY seq`)
    .pluck();
  const keyName = database.prepare<[string], string>('SELECT name FROM keys WHERE id = ?').pluck();
  const supersede = database.prepare('UPDATE deployments SET superseded_by = :by WHERE id = :id');

  // The project whose turn it is, skipping those that run one already.
  const nextQueued = database.prepare<
    [],
    {
      seq: number;
      id: DeploymentId;
      ref: Ref;
      project_id: ProjectId;
      project_name: string;
      command: string;
      directory: string | null;
      timeout_ms: number | null;
      idle_timeout_ms: number | null;
    }
  >(`
    SELECT d.seq, d.id, d.ref, d.project_id, p.name AS project_name, p.command, p.directory, p.timeout_ms, p.idle_timeout_ms
      FROM projects p INDEXED BY projects_waiting
      JOIN deployments d
        ON d.seq = (SELECT min(q.seq) FROM deployments q
                     WHERE q.project_id = p.id AND q.status = 'queued' AND q.reported = 0)
     WHERE p.queued_count > 0 AND p.status = 'active' AND p.command IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM deployments r
                        WHERE r.project_id = p.id AND r.status IN ('running', 'canceling') AND r.reported = 0)
     ORDER BY p.last_started_at, p.seq
     LIMIT 1`);
  const previousRef = database
    .prepare<{ projectId: ProjectId; seq: number }, Ref>(`
      SELECT ref FROM deployments
       WHERE project_id = :projectId AND seq < :seq AND status = 'succeeded'
       ORDER BY seq DESC LIMIT 1`)
    .pluck();
  const markRunning = database.prepare(
    `UPDATE deployments SET status = 'running', started_at = :at WHERE id = :id AND status = 'queued'`,
  );
  const setProcess = database.prepare(`
    UPDATE deployments SET process_id = :processId, process_started_at = :processStartedAt, boot_id = :bootId
     WHERE id = :id AND finished_at IS NULL`);
  const finish = database.prepare(`
    UPDATE deployments
       SET status = :status, reason = :reason, message = :message, exit_code = :exitCode, signal = :signal,
           outputs = :outputs, finished_at = max(created_at, coalesce(started_at, 0), :at)
     WHERE id = :id AND finished_at IS NULL`);

  return {
    /**
     * Queues a deployment of `ref`. Throws `not_found` (no such project), `conflict` (archived) and
     * `rate_limited` (as many wait as may).
     */
    create(input: NewDeployment): Deployment {
      const project = projectForNew.get(input.projectId);
      if (project === undefined) throw new AppError('not_found', 'there is no such project');
      if (project.status === 'archived') {
        throw new AppError('conflict', 'the project is archived and takes no new deployments');
      }
      const reported = project.command === null;
      if (!reported && project.policy === 'queue') refuseFullQueue(project.queued_count, input.maxQueued);
      const id = newId('dpl', effects.randomBytes);
      const createdAt = effects.now();
      const { lastInsertRowid } = insert.run({
        id,
        projectId: input.projectId,
        ref: input.ref,
        reported: reported ? 1 : 0,
        trigger: input.trigger,
        keyId: input.keyId,
        redeployOf: input.redeployOf,
        createdAt,
        reportDueAt:
          reported && project.report_timeout_ms !== null ? createdAt + project.report_timeout_ms : null,
      });
      events.record('deployment.created', { id, project_id: input.projectId, ref: input.ref }, createdAt);
      const superseded = !reported && project.policy === 'latest' ? supersedeOlder(input.projectId, id) : 0;
      changed('queue');
      // What was just written is known: reading it back would cost as much as writing it.
      return toDeployment(
        {
          seq: Number(lastInsertRowid),
          id,
          project_id: input.projectId,
          ref: input.ref,
          status: 'queued',
          reason: null,
          message: null,
          reported: reported ? 1 : 0,
          trigger: input.trigger,
          created_by_key_id: input.keyId,
          created_by_name: input.keyId === null ? null : (keyName.get(input.keyId) ?? null),
          redeploy_of: input.redeployOf,
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
        reported ? null : project.queued_count - superseded + 1,
      );
    },

    /**
     * Takes the next deployment that may start, or null: of the active projects that run none, the one whose
     * last start is the longest ago, and of that its oldest. It is `running` once this is committed.
     */
    claim(): ClaimedDeployment | null {
      const next = nextQueued.get();
      if (next === undefined) return null;
      const at = effects.now();
      markRunning.run({ id: next.id, at });
      events.record('deployment.started', next, at);
      changed(next.id);
      return {
        id: next.id,
        ref: next.ref,
        project_id: next.project_id,
        project_name: next.project_name,
        command: JSON.parse(next.command) as [string, ...string[]],
        directory: next.directory,
        timeout_ms: next.timeout_ms,
        idle_timeout_ms: next.idle_timeout_ms,
        variables: projects.variables(next.project_id),
        previous_ref: previousRef.get({ projectId: next.project_id, seq: next.seq }) ?? null,
      };
    },

    setProcess(input: StoredProcess & { id: DeploymentId }): void {
      setProcess.run(input);
    },

    /**
     * Writes the end with its event and outbox rows. The first end stays: a later one changes nothing.
     * The process tree must be gone.
     */
    finish(end: DeploymentEnd): Deployment {
      finishOnce(end);
      const deployment = reads.get(end.id);
      if (deployment === undefined) throw new AppError('not_found', 'there is no such deployment');
      return deployment;
    },
  };

  function refuseFullQueue(queuedCount: number, maxQueued: number | null): void {
    if (maxQueued === null || queuedCount < maxQueued) return;
    throw new AppError(
      'rate_limited',
      `${queuedCount} deployments of this project wait already: try again when one has finished`,
      { retryAfterSeconds: QUEUE_FULL_RETRY_SECONDS },
    );
  }

  function supersedeOlder(projectId: ProjectId, by: DeploymentId): number {
    const older = queuedIds.all({ projectId, id: by });
    for (const id of older) {
      supersede.run({ id, by });
      finishOnce({
        id,
        status: 'canceled',
        reason: 'superseded',
        message: null,
        exitCode: null,
        signal: null,
        outputs: {},
      });
    }
    return older.length;
  }

  function finishOnce(end: DeploymentEnd): void {
    const at = effects.now();
    const { id, status, reason, message, exitCode, signal } = end;
    const outputs = JSON.stringify(end.outputs);
    if (finish.run({ id, status, reason, message, exitCode, signal, outputs, at }).changes === 0) return;
    const deployment = reads.get(id);
    if (deployment === undefined) throw new Error('a deployment vanished while it was finished');
    events.record(`deployment.${status}`, deployment, at);
    changed('queue');
    changed(id);
  }
}

function toDeployment(row: DeploymentRow, queuePosition: number | null): Deployment {
  return {
    id: row.id,
    project_id: row.project_id,
    ref: row.ref,
    status: row.status,
    reason: row.reason,
    message: row.message,
    created_at: timestamp(row.created_at),
    started_at: optionalTimestamp(row.started_at),
    finished_at: optionalTimestamp(row.finished_at),
    duration_ms:
      row.started_at === null || row.finished_at === null ? null : row.finished_at - row.started_at,
    exit_code: row.exit_code,
    signal: row.signal,
    queue_position: queuePosition,
    trigger: row.trigger,
    created_by:
      row.created_by_key_id === null
        ? null
        : { key_id: row.created_by_key_id, name: row.created_by_name ?? '' },
    redeploy_of: row.redeploy_of,
    superseded_by: row.superseded_by,
    outputs: JSON.parse(row.outputs) as Record<string, string>,
    log_bytes: row.log_bytes,
    log_truncated: row.log_truncated === 1,
  };
}
