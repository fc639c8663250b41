import { type Deployment, type KeyId, optionalTimestamp, timestamp } from '../domain.ts';

/** A row of the table, with the name of the key that created the deployment. */
export interface DeploymentRow extends Omit<Deployment, Converted> {
  seq: number;
  reported: number;
  created_by_key_id: KeyId | null;
  created_by_name: string | null;
  created_at: number;
  started_at: number | null;
  finished_at: number | null;
  outputs: string;
  log_truncated: number;
}

type Converted =
  | 'created_by'
  | 'created_at'
  | 'started_at'
  | 'finished_at'
  | 'duration_ms'
  | 'queue_position'
  | 'outputs'
  | 'log_truncated';

/** The columns and tables that a DeploymentRow is selected from. */
export const DEPLOYMENT_COLUMNS = `
  d.seq, d.id, d.project_id, d.ref, d.status, d.reason, d.message, d.reported, d.trigger,
  d.created_by_key_id, k.name AS created_by_name, d.redeploy_of, d.superseded_by,
  d.created_at, d.started_at, d.finished_at, d.exit_code, d.signal, d.outputs, d.log_bytes, d.log_truncated`;
export const DEPLOYMENTS = 'deployments d LEFT JOIN keys k ON k.id = d.created_by_key_id';

/** `queuePosition`: 1 is the next of its project; null unless the deployment waits for the executor. */
export function toDeployment(
  row: Omit<DeploymentRow, 'seq' | 'reported'>,
  queuePosition: number | null,
): Deployment {
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
