import { type DeploymentStatus, isTerminal } from '../domain.ts';
import type { Database } from './database.ts';
import { DEPLOYMENT_COLUMNS, DEPLOYMENTS, type DeploymentRow } from './deployment-rows.ts';
import type { Caller } from './keys.ts';
import { type ListPage, pageOf } from './list-page.ts';
import { VISIBLE_PROJECT, viewer } from './projects.ts';

/** The filters of a list; null: no such filter. */
export interface DeploymentFilter {
  projectId: string | null;
  statuses: readonly DeploymentStatus[] | null;
  ref: string | null;
  /** Both bounds are exclusive. */
  createdAfterMs: number | null;
  createdBeforeMs: number | null;
}

/**
 * How many deployments one page scans, which takes 15 ms and blocks the thread. A filter that skips more gives pages
 * that have fewer items than requested, or none, and a cursor to continue.
 */
const SCANNED_MAX = 50_000;

/**
 * How many characters the messages and outputs of a page may have in total; those of one deployment may have 68,000. A
 * page of 200 such deployments took 150 ms, and 33 MB until its client had read it; a page of 15 takes 12 ms.
 */
const TEXT_MAX = 1024 * 1024;

/** With more projects than this, a key's deployments are filtered from all: those are dense enough for that. */
const SEPARATE_PROJECTS_MAX = 50;

/**
 * Returns a function that reads the caller's deployments before `beforeSeq`, at most `limit`, newest first. Among a
 * million deployments it finds those of a small project in 0.2 ms; filtering all of them took 300 ms.
 */
export function deploymentPages(
  database: Database,
  { scannedMax = SCANNED_MAX, separateProjectsMax = SEPARATE_PROJECTS_MAX, textMax = TEXT_MAX } = {},
) {
  const scanOf = (source: ScanSource) => prepareScan(database, source, textMax);
  const ofAll = scanOf({
    from: 'deployments d',
    where: '1',
    floor: `
      SELECT f.seq FROM (SELECT min(:beforeSeq, (SELECT max(seq) FROM deployments) + 1) - :depth AS seq) f
       WHERE f.seq > (SELECT min(seq) FROM deployments)`,
  });
  const unfinished = scanOf({
    from: 'deployments d INDEXED BY deployments_unfinished',
    where: 'd.finished_at IS NULL',
    floor: `
      SELECT seq FROM deployments INDEXED BY deployments_unfinished
       WHERE finished_at IS NULL AND seq < +:beforeSeq ORDER BY seq DESC LIMIT 1 OFFSET :depth - 1`,
  });
  // The floor is the highest seq at which one of the projects reaches its share of the depth.
  const ofProjects = scanOf({
    from: 'json_each(:projectIds) p CROSS JOIN deployments d',
    where: 'd.project_id = p.value',
    floor: `
      SELECT max((SELECT n.seq FROM deployments n
                   WHERE n.project_id = p.value AND n.seq < +:beforeSeq
                   ORDER BY n.seq DESC LIMIT 1 OFFSET :depth - 1))
        FROM json_each(:projectIds) p`,
  });
  const projectsOfKey = database
    .prepare<{ keyId: string; limit: number }, string>(
      'SELECT project_id FROM key_projects WHERE key_id = +:keyId LIMIT :limit',
    )
    .pluck();
  const isVisible = database
    .prepare<{ projectId: string; allProjects: number; keyId: string }, number>(
      `SELECT ${VISIBLE_PROJECT(':projectId')}`,
    )
    .pluck();

  return (
    caller: Caller,
    filter: DeploymentFilter,
    beforeSeq: number,
    limit: number,
  ): ListPage<DeploymentRow> => {
    const projectIds = separateProjects(caller, filter);
    const parameters = { ...viewer(caller), ...filter, beforeSeq, limit };
    if (filter.statuses?.every((status) => !isTerminal(status))) {
      return unfinished({ ...parameters, projectIds: null, depth: scannedMax });
    }
    if (projectIds === null) return ofAll({ ...parameters, projectIds, depth: scannedMax });
    const ofEach = Math.max(1, Math.floor(scannedMax / Math.max(1, projectIds.length)));
    return ofProjects({ ...parameters, projectIds, depth: mayExclude(filter) ? ofEach : limit + 1 });
  };

  /** The projects whose deployments are read separately; null: read all deployments and filter. */
  function separateProjects(caller: Caller, { projectId }: DeploymentFilter): string[] | null {
    if (projectId !== null) {
      return isVisible.get({ projectId, ...viewer(caller) }) === 1 ? [projectId] : [];
    }
    if (caller.allProjects) return null;
    const ids = projectsOfKey.all({ keyId: caller.keyId, limit: separateProjectsMax + 1 });
    return ids.length > separateProjectsMax ? null : ids;
  }
}

/** Whether the filter may exclude some of a project's deployments. */
function mayExclude({ projectId, ...narrowing }: DeploymentFilter): boolean {
  return Object.values(narrowing).some((value) => value !== null);
}

interface ScanParameters extends DeploymentFilter {
  allProjects: number;
  keyId: string;
  projectIds: string[] | null;
  beforeSeq: number;
  limit: number;
  /** How many rows are scanned; by `ofProjects`, of each project. */
  depth: number;
}

/** Which deployments a scan reads. */
interface ScanSource {
  from: string;
  where: string;
  /** Selects the seq of the last row that `depth` allows to scan; null: there are fewer rows. */
  floor: string;
}

function prepareScan(database: Database, { from, where, floor }: ScanSource, textMax: number) {
  const floorSeq = database.prepare<Record<string, unknown>, number | null>(floor).pluck();
  // The inner query sorts only seqs, the outer one reads the columns. Sorting ten thousand rows of 50 projects with all
  // columns, long outputs among them, took 1.5 s.
  const rows = database.prepare<Record<string, unknown>, DeploymentRow>(`
    SELECT ${DEPLOYMENT_COLUMNS} FROM ${DEPLOYMENTS}
     WHERE d.seq IN (
             SELECT d.seq FROM ${from}
              WHERE ${where}
                AND d.seq < +:beforeSeq AND d.seq >= +:floorSeq
                AND ${VISIBLE_PROJECT('d.project_id')}
                AND (:projectId IS NULL OR d.project_id = +:projectId)
                AND (:statuses IS NULL OR d.status IN (SELECT value FROM json_each(:statuses)))
                AND (:ref IS NULL OR d.ref = +:ref)
                AND (:createdAfterMs IS NULL OR d.created_at > +:createdAfterMs)
                AND (:createdBeforeMs IS NULL OR d.created_at < +:createdBeforeMs)
              ORDER BY d.seq DESC LIMIT :limit + 1)
     ORDER BY d.seq DESC`);

  return ({ statuses, projectIds, ...rest }: ScanParameters): ListPage<DeploymentRow> => {
    const parameters = { ...rest, statuses: asJson(statuses), projectIds: asJson(projectIds) };
    const goOnAtFloor = floorSeq.get(parameters) ?? null;
    const found = rows.all({ ...parameters, floorSeq: goOnAtFloor ?? 0 });
    const { items, goOnAt } = pageOf(found, Math.min(rest.limit, fitting(found, textMax)), (row) => row);
    return { items, goOnAt: goOnAt ?? goOnAtFloor };
  };
}

/** How many rows, from the first on, fit into a page: at least one. */
function fitting(rows: readonly DeploymentRow[], textMax: number): number {
  let length = 0;
  const first = rows.findIndex(({ message, outputs }) => {
    length += (message?.length ?? 0) + outputs.length;
    return length > textMax;
  });
  return first === -1 ? rows.length : Math.max(1, first);
}

function asJson(list: readonly string[] | null): string | null {
  return list === null ? null : JSON.stringify(list);
}
