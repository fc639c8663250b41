import {
  type Deployment,
  type DeploymentId,
  type DeploymentStatus,
  type KeyId,
  optionalTimestamp,
  type ProjectId,
  type Reason,
  type Ref,
  type Trigger,
  timestamp,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import type { Database } from './database.ts';
import type { Caller } from './keys.ts';
import { VISIBLE_PROJECT, viewer } from './projects.ts';

/** The three together name one process for ever; a process id alone is reused. */
export interface StoredProcess {
  processId: number;
  /** Clock ticks since boot. */
  processStartedAt: number;
  bootId: string;
}

/** What an earlier run of the service left behind. */
export interface UnfinishedDeployment {
  id: DeploymentId;
  status: 'running' | 'canceling';
  process: StoredProcess | null;
}

/** As it stands in the table, with the name of the key that made it. */
export interface DeploymentRow {
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

/** What a list shows; what is left out does not narrow it. */
export interface DeploymentFilter {
  projectId: string | null;
  statuses: DeploymentStatus[] | null;
  ref: string | null;
  createdAfterMs: number | null;
  createdBeforeMs: number | null;
}

/** Deployments as people see them, and as recovery needs them. */
export function deploymentReads(database: Database) {
  const byId = database.prepare<[string], DeploymentRow>(
    `SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS} WHERE d.id = ?`,
  );
  const visible = database.prepare<{ id: string; allProjects: number; keyId: string }, DeploymentRow>(`
    SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS}
     WHERE d.id = :id AND ${VISIBLE_PROJECT('d.project_id')}`);
  const narrowed = (place: string) => `
    SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS}
     WHERE d.seq < :beforeSeq AND ${place}
       AND ${VISIBLE_PROJECT('d.project_id')}
       AND (:statuses IS NULL OR d.status IN (SELECT value FROM json_each(:statuses)))
       AND (:ref IS NULL OR d.ref = :ref)
       AND (:createdAfterMs IS NULL OR d.created_at > :createdAfterMs)
       AND (:createdBeforeMs IS NULL OR d.created_at < :createdBeforeMs)
     ORDER BY d.seq DESC LIMIT :limit`;
  const page = {
    all: database.prepare<Record<string, unknown>, DeploymentRow>(narrowed(':projectId IS NULL')),
    ofProject: database.prepare<Record<string, unknown>, DeploymentRow>(
      narrowed('d.project_id = :projectId'),
    ),
  };
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
    get,

    /** Throws `not_found`. */
    existing(id: string): Deployment {
      const deployment = get(id);
      if (deployment === undefined) throw new AppError('not_found', 'there is no such deployment');
      return deployment;
    },

    /** As this caller sees it; undefined if it is not there or its project is not the caller's. */
    visibleTo(caller: Caller, id: string): Deployment | undefined {
      const row = visible.get({ id, ...viewer(caller) });
      return row === undefined ? undefined : toDeployment(row, queuePosition(row));
    },

    /** The caller's deployments before `beforeSeq`, newest first, with the seq to go on from. */
    page(
      caller: Caller,
      filter: DeploymentFilter,
      beforeSeq: number,
      limit: number,
    ): { seq: number; item: Deployment }[] {
      const statuses = filter.statuses === null ? null : JSON.stringify(filter.statuses);
      const rows = (filter.projectId === null ? page.all : page.ofProject).all({
        ...filter,
        ...viewer(caller),
        statuses,
        beforeSeq,
        limit,
      });
      return rows.map((row) => ({ seq: row.seq, item: toDeployment(row, queuePosition(row)) }));
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

  function get(id: string): Deployment | undefined {
    const row = byId.get(id);
    return row === undefined ? undefined : toDeployment(row, queuePosition(row));
  }

  function queuePosition(row: DeploymentRow): number | null {
    if (row.status !== 'queued' || row.reported === 1) return null;
    return (queuedBefore.get({ projectId: row.project_id, seq: row.seq }) ?? 0) + 1;
  }
}

/** `queuePosition`: 1 is the next of its project; null where none applies. */
export function toDeployment(row: DeploymentRow, queuePosition: number | null): Deployment {
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
