import { type Deployment, type DeploymentId, type ProjectId, type Timestamp, timestamp } from '../domain.ts';
import { AppError } from '../errors.ts';
import type { ProcessIdentity } from '../process-identity.ts';
import type { Database } from './database.ts';
import { deploymentPages } from './deployment-pages.ts';
import { DEPLOYMENT_COLUMNS, DEPLOYMENTS, type DeploymentRow, toDeployment } from './deployment-rows.ts';
import type { Caller } from './keys.ts';
import { VISIBLE_PROJECT, type Viewer, viewer } from './projects.ts';

/** A deployment that the executor has begun, perhaps in an earlier run of the service. */
export interface RunningDeployment {
  id: DeploymentId;
  status: 'running' | 'canceling';
  started_at: Timestamp;
  process: ProcessIdentity | null;
}

/** How far a deployment has come. */
export type DeploymentProgress = Pick<Deployment, 'id' | 'status' | 'log_bytes'>;

export type DeploymentReads = ReturnType<typeof deploymentReads>;

/** Deployments, as users see them and as recovery needs them. */
export function deploymentReads(database: Database) {
  const byId = database.prepare<[string], DeploymentRow>(
    `SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS} WHERE d.id = +?`,
  );
  const visible = database.prepare<{ id: string } & Viewer, DeploymentRow>(`
    SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS}
     WHERE d.id = +:id AND ${VISIBLE_PROJECT('d.project_id')}`);
  const progress = database.prepare<[string], DeploymentProgress>(
    'SELECT id, status, log_bytes FROM deployments WHERE id = +?',
  );
  const visibleProgress = database.prepare<{ id: string } & Viewer, DeploymentProgress>(`
    SELECT d.id, d.status, d.log_bytes FROM deployments d
     WHERE d.id = +:id AND ${VISIBLE_PROJECT('d.project_id')}`);
  const queuedBetween = database
    .prepare<{ projectId: ProjectId; fromSeq: number; beforeSeq: number }, number>(`
      SELECT count(*) FROM deployments
       WHERE project_id = +:projectId AND status = 'queued' AND reported = 0
         AND seq >= +:fromSeq AND seq < +:beforeSeq`)
    .pluck();
  // With INDEXED BY, as the planner would rather scan the table in the order of seq: 170 ms with a million rows.
  const running = database.prepare<
    [],
    {
      id: DeploymentId;
      status: 'running' | 'canceling';
      started_at: number;
      process_id: number | null;
      process_started_at: number | null;
      boot_id: string | null;
    }
  >(`
    SELECT id, status, started_at, process_id, process_started_at, boot_id
      FROM deployments INDEXED BY one_running_deployment_per_project
     WHERE status IN ('running', 'canceling') AND reported = 0
     ORDER BY seq`);

  const nextReportDueAt = database
    .prepare<[], number | null>(`
      SELECT min(report_due_at) FROM deployments
       WHERE reported = 1 AND finished_at IS NULL AND report_due_at IS NOT NULL`)
    .pluck();

  const newestSeq = database.prepare<[], number | null>('SELECT max(seq) FROM deployments').pluck();

  const countAwaited = database
    .prepare<[string], number>(`
      SELECT count(*) FROM deployments INDEXED BY deployments_unfinished
       WHERE project_id = +? AND reported = 1 AND finished_at IS NULL`)
    .pluck();

  const countUnlimited = database
    .prepare<{ createdByMs: number }, number>(`
      SELECT count(*)
        FROM deployments d INDEXED BY deployments_unfinished
       CROSS JOIN projects p ON p.id = d.project_id
       WHERE d.reported = 1 AND d.finished_at IS NULL AND d.report_due_at IS NULL
         AND (d.created_at <= +:createdByMs OR p.status = 'archived')`)
    .pluck();

  return {
    get,

    /** Throws `not_found`. */
    existing(id: string): Deployment {
      const deployment = get(id);
      if (deployment === undefined) throw new AppError('not_found', 'there is no such deployment');
      return deployment;
    },

    /** Those of these deployments that exist, in the same order. */
    existingOf(ids: readonly DeploymentId[]): Deployment[] {
      return toDeployments(ids.flatMap((id) => byId.get(id) ?? []));
    },

    /** Undefined if there is no such deployment, or the caller does not see its project. */
    visibleTo(caller: Caller, id: string): Deployment | undefined {
      const row = visible.get({ id, ...viewer(caller) });
      return row === undefined ? undefined : toDeployment(row, queuePosition(row));
    },

    /**
     * A part of what `get` returns: behind 100,000 that wait it takes 3 ms to count the queue position, and 0.1 ms to
     * parse long outputs.
     */
    progress: (id: string): DeploymentProgress | undefined => progress.get(id),

    /** The same part of what `visibleTo` returns. */
    progressVisibleTo: (caller: Caller, id: string): DeploymentProgress | undefined =>
      visibleProgress.get({ id, ...viewer(caller) }),

    /** See `deploymentPages`. */
    page: deploymentPages(database, toDeployments),

    /** When the next report is overdue; null: no report with a time limit is expected. */
    nextReportDueAt: (): number | null => nextReportDueAt.get() ?? null,

    /** 0: there is no deployment. */
    newestSeq: (): number => newestSeq.get() ?? 0,

    /** How many deployments of a project another system carries out and has not reported the end of. */
    reportsAwaited: (projectId: ProjectId): number => countAwaited.get(projectId) ?? 0,

    /**
     * How many deployments only a report of another system ends: those without a time limit that were created by
     * `createdByMs` or whose project is archived.
     */
    reportsAwaitedForEver: (createdByMs: number): number => countUnlimited.get({ createdByMs }) ?? 0,

    /** What the executor has begun and not ended, oldest first. After a start, these were interrupted by a crash. */
    running: (): RunningDeployment[] =>
      running.all().map((row) => ({
        id: row.id,
        status: row.status,
        started_at: timestamp(row.started_at),
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

  /**
   * In the same order. For the queue positions it counts only the deployments between one row and the next of the same
   * project: with 100,000 waiting, counting all before each row took 900 ms for a page.
   */
  function toDeployments(rows: readonly DeploymentRow[]): Deployment[] {
    const positions = new Map<DeploymentId, number | null>();
    const olderOf = new Map<ProjectId, KnownPosition>();
    for (const row of rows.toSorted((one, other) => one.seq - other.seq)) {
      const position = queuePosition(row, olderOf.get(row.project_id));
      if (position !== null) olderOf.set(row.project_id, { seq: row.seq, position });
      positions.set(row.id, position);
    }
    return rows.map((row) => toDeployment(row, positions.get(row.id) ?? null));
  }

  /** `older`: an older deployment in the same queue whose position is known. */
  function queuePosition(row: DeploymentRow, older: KnownPosition = FRONT): number | null {
    if (row.status !== 'queued' || row.reported === 1) return null;
    const between = { projectId: row.project_id, fromSeq: older.seq, beforeSeq: row.seq };
    return older.position + (queuedBetween.get(between) ?? 0);
  }
}

/** The position of a deployment in its project's queue. */
interface KnownPosition {
  seq: number;
  position: number;
}

/** Before the first deployment of any queue. */
const FRONT: KnownPosition = { seq: 0, position: 1 };
