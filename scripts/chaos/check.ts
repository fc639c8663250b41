import type { Database } from 'better-sqlite3';
import { EXPECTED_ENDS } from './commands.ts';
import type { KnownDeployment, Violation, WriteEntry, WriteFate } from './ledger.ts';

/*
 * Checks of davit's file, by SQL of our own on a read-only connection: that it is consistent, and that it agrees with
 * the ledger. Each returns the promises that were broken.
 */

/** Enough examples to see what is wrong. */
const EXAMPLES_MAX = 10;

/** What must hold whatever was written: SQLite's own checks, and that rows that belong together are all there. */
export function checkFile(file: Database): Violation[] {
  return [
    ...checkIntegrity(file),
    ...STRUCTURE.flatMap(({ rule, sql }) => each(rule, file.prepare(`${sql} LIMIT ${EXAMPLES_MAX}`).all())),
  ];
}

function checkIntegrity(file: Database): Violation[] {
  const integrity = file.pragma(`integrity_check(${EXAMPLES_MAX})`) as { integrity_check: string }[];
  return [
    ...integrity
      .filter(({ integrity_check }) => integrity_check !== 'ok')
      .map(({ integrity_check }) => ({ rule: 'integrity_check is ok', detail: integrity_check })),
    ...each('foreign_key_check is ok', file.pragma('foreign_key_check') as object[]),
  ];
}

const TERMINAL = `('deployment.succeeded', 'deployment.failed', 'deployment.canceled')`;

/** Without those of deleted webhooks, which are removed in steps, the attempts of a delivery before the delivery. */
const KEPT_DELIVERIES = `(SELECT * FROM deliveries
   WHERE webhook_id IN (SELECT id FROM webhooks WHERE deleted_at IS NULL))`;

/** Each statement finds rows that break its rule. */
const STRUCTURE: { rule: string; sql: string }[] = [
  {
    rule: 'a finished deployment has one terminal event, and an unfinished one none',
    sql: `
      SELECT d.id, d.status, count(e.id) AS terminal_events
        FROM deployments d LEFT JOIN events e ON e.deployment_id = d.id AND e.type IN ${TERMINAL}
       GROUP BY d.id HAVING count(e.id) <> (d.finished_at IS NOT NULL)`,
  },
  {
    rule: 'the terminal event says how the deployment ended',
    sql: `
      SELECT d.id, d.status, e.type FROM deployments d JOIN events e ON e.deployment_id = d.id
       WHERE e.type IN ${TERMINAL} AND e.type <> 'deployment.' || d.status`,
  },
  {
    rule: 'a deployment has one event of its creation',
    sql: `
      SELECT d.id, count(e.id) AS created_events
        FROM deployments d LEFT JOIN events e ON e.deployment_id = d.id AND e.type = 'deployment.created'
       GROUP BY d.id HAVING count(e.id) <> 1`,
  },
  {
    rule: 'a deployment has one event of its start if it was started',
    sql: `
      SELECT d.id, d.status, d.started_at, count(e.id) AS started_events
        FROM deployments d LEFT JOIN events e ON e.deployment_id = d.id AND e.type = 'deployment.started'
       GROUP BY d.id HAVING count(e.id) <> (d.started_at IS NOT NULL)`,
  },
  {
    rule: 'an event tells of a deployment that is there, in the documented form',
    sql: `
      SELECT e.id, e.payload FROM events e LEFT JOIN deployments d ON d.id = e.deployment_id
       WHERE e.payload IS NOT json_object(
               'id', e.id, 'type', e.type,
               'created_at', strftime('%Y-%m-%dT%H:%M:%S', e.created_at / 1000, 'unixepoch') || printf('.%03dZ', e.created_at % 1000),
               'data', json_object('deployment_id', d.id, 'project_id', d.project_id, 'ref', d.ref))`,
  },
  {
    rule: 'every attempt of a delivery is recorded, once',
    sql: `
      SELECT d.id, d.attempt_count, count(a.number) AS attempts, max(a.number) AS last
        FROM ${KEPT_DELIVERIES} d LEFT JOIN attempts a ON a.delivery_id = d.id
       GROUP BY d.id HAVING count(a.number) <> d.attempt_count OR coalesce(max(a.number), 0) <> d.attempt_count`,
  },
  {
    rule: 'what is delivered was answered with a 2xx, and what is exhausted was tried',
    sql: `
      SELECT d.id, d.status, d.attempt_count FROM ${KEPT_DELIVERIES} d
       WHERE (d.status = 'delivered'
              AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.delivery_id = d.id AND a.status_code BETWEEN 200 AND 299))
          OR (d.status = 'exhausted' AND d.attempt_count = 0)`,
  },
  {
    rule: 'an event has one delivery for a webhook',
    sql: `
      SELECT event_id, webhook_id, count(*) AS deliveries FROM deliveries
       GROUP BY event_id, webhook_id HAVING count(*) > 1`,
  },
  {
    rule: 'the count of what waits in a project is true',
    sql: `
      SELECT p.id, p.queued_count, count(d.id) AS queued
        FROM projects p LEFT JOIN deployments d ON d.project_id = p.id AND d.status = 'queued' AND d.reported = 0
       GROUP BY p.id HAVING p.queued_count <> count(d.id)`,
  },
];

interface DeploymentRow {
  id: string;
  project_id: string;
  ref: string;
  trigger: string;
  created_by_key_id: string | null;
  redeploy_of: string | null;
  created_at: number;
  started_at: number | null;
  finished_at: number | null;
  status: string;
  reason: string | null;
  exit_code: number | null;
  outputs: string;
  log_bytes: number;
  reported: number;
}

/**
 * Acknowledged deployments are there with the acknowledged values, and so are answers to requests with an
 * Idempotency-Key.
 */
export function checkAcknowledged(
  file: Database,
  deployments: Iterable<KnownDeployment>,
  writes: Iterable<WriteEntry>,
): Violation[] {
  return [...checkDeployments(file, deployments), ...checkAnswers(file, writes)];
}

function checkDeployments(file: Database, deployments: Iterable<KnownDeployment>): Violation[] {
  const find = file.prepare<[string], DeploymentRow>('SELECT * FROM deployments WHERE id = ?');
  const violations: Violation[] = [];
  for (const known of deployments) {
    const row = find.get(known.id);
    if (row === undefined) {
      violations.push({ rule: 'an acknowledged deployment is there', detail: JSON.stringify(known) });
      continue;
    }
    const expected = {
      project_id: known.projectId,
      ref: known.ref,
      trigger: known.trigger,
      created_by_key_id: known.keyId,
      redeploy_of: known.redeployOf,
      created_at: Date.parse(known.createdAt),
      ...(known.end === null
        ? {}
        : {
            status: known.end.status,
            reason: known.end.reason,
            finished_at: Date.parse(known.end.finishedAt ?? ''),
          }),
    };
    violations.push(...differences('acknowledged values stay', known.id, expected, { ...row }));
  }
  return violations;
}

function checkAnswers(file: Database, writes: Iterable<WriteEntry>): Violation[] {
  const find = file.prepare<[string, string], { status_code: number; location: string | null; body: string }>(
    'SELECT status_code, location, body FROM idempotency_keys WHERE key_id = ? AND idempotency_key = ?',
  );
  const violations: Violation[] = [];
  for (const { answer, keyId, idempotencyKey, method, path } of writes) {
    if (answer === null || idempotencyKey === null) continue;
    const row = find.get(keyId, idempotencyKey);
    const name = `${method} ${path} with the key ${idempotencyKey}`;
    if (row === undefined) {
      violations.push({ rule: 'an acknowledged answer is remembered', detail: name });
      continue;
    }
    const expected = { status_code: answer.status, location: answer.location, body: answer.body };
    violations.push(...differences('an acknowledged answer is remembered', name, expected, row));
  }
  return violations;
}

/** Projects and keys that admin commands created are there under their names. */
export function checkMade(
  file: Database,
  made: readonly { kind: 'projects' | 'keys'; id: string; name: string }[],
): Violation[] {
  const missing = made.filter(
    ({ kind, id, name }) =>
      file.prepare(`SELECT 1 FROM ${kind} WHERE id = ? AND name = ?`).get(id, name) === undefined,
  );
  return each('what an admin command made is there', missing);
}

/** Of each ref there are as many deployments as the fate of its request says. */
export function checkRefs(file: Database, refs: ReadonlyMap<string, WriteFate>): Violation[] {
  const counts = new Map(
    file
      .prepare('SELECT ref, count(*) FROM deployments WHERE redeploy_of IS NULL GROUP BY ref')
      .raw()
      .all() as [string, number][],
  );
  const unknown = [...counts.keys()].filter((ref) => !refs.has(ref));
  const wrong = [...refs].filter(([ref, fate]) => {
    const count = counts.get(ref) ?? 0;
    if (fate === 'acknowledged') return count !== 1;
    return fate === 'refused' ? count !== 0 : count > 1;
  });
  return [
    ...unknown.map((ref) => ({ rule: 'nothing is deployed that nobody asked for', detail: ref })),
    ...wrong.map(([ref, fate]) => ({
      rule: 'one deployment for each Idempotency-Key',
      detail: `the request for ${ref} is ${fate}, and there are ${counts.get(ref) ?? 0} deployments of it`,
    })),
  ];
}

/** Redeployments have the ref of another: there are no more unknown ones than doubtful requests. */
export function checkRedeployments(
  file: Database,
  deployments: ReadonlyMap<string, KnownDeployment>,
  doubtful: number,
): Violation[] {
  const unknown = file
    .prepare<[], string>('SELECT id FROM deployments WHERE redeploy_of IS NOT NULL')
    .pluck()
    .all()
    .filter((id) => !deployments.has(id));
  if (unknown.length <= doubtful) return [];
  const detail = `${doubtful} requests to redeploy are doubtful, and there are ${unknown.length} unknown: ${unknown}`;
  return [{ rule: 'one deployment for each Idempotency-Key', detail }];
}

/**
 * Commands ran once, and only if they should. `runs`: the deployments whose commands recorded that they ran, in order.
 */
export function checkRuns(
  file: Database,
  runs: readonly string[],
  deployments: ReadonlyMap<string, KnownDeployment>,
): Violation[] {
  const find = file.prepare<[string], DeploymentRow>('SELECT * FROM deployments WHERE id = ?');
  const violations: Violation[] = [];
  const seen = new Set<string>();
  for (const id of runs) {
    if (seen.has(id)) violations.push({ rule: 'no command is run twice', detail: id });
    seen.add(id);
    const row = find.get(id);
    if (row === undefined || row.started_at === null) {
      violations.push({
        rule: 'what runs is recorded as started',
        detail: `${id} ran, and is ${row?.status ?? 'not there'}`,
      });
    }
    if (deployments.get(id)?.canceledInQueue === true) {
      violations.push({ rule: 'what is canceled in the queue never runs', detail: id });
    }
  }
  const succeeded = file
    .prepare<[], string>("SELECT id FROM deployments WHERE status = 'succeeded' AND reported = 0")
    .pluck()
    .all();
  for (const id of succeeded) {
    if (!seen.has(id)) violations.push({ rule: 'what succeeded has run', detail: id });
  }
  return violations;
}

/** Each deployment ended as its command does, or was canceled or interrupted. */
export function checkEnds(file: Database, deployments: ReadonlyMap<string, KnownDeployment>): Violation[] {
  const rows = file.prepare<[], DeploymentRow>(
    'SELECT * FROM deployments WHERE finished_at IS NOT NULL AND reported = 0',
  );
  const violations: Violation[] = [];
  for (const row of rows.iterate()) {
    const problem = endProblem(row, deployments.get(row.id));
    if (problem !== undefined) {
      const { id, ref, status, reason, exit_code, log_bytes, outputs } = row;
      const shown = { id, ref, status, reason, exit_code, log_bytes, outputs };
      violations.push({
        rule: 'a deployment ends as its command does',
        detail: `${problem}: ${JSON.stringify(shown)}`,
      });
    }
  }
  return violations;
}

function endProblem(row: DeploymentRow, known: KnownDeployment | undefined): string | undefined {
  // Of a deployment that is not in the ledger it is not known whether its cancellation was requested.
  if (row.status === 'canceled') {
    if (row.reason === 'superseded') return undefined;
    return known?.cancelAsked === false ? 'nobody canceled it' : undefined;
  }
  if (row.reason === 'interrupted') return undefined;
  const kind = row.ref.slice(0, row.ref.indexOf('/'));
  const expected = EXPECTED_ENDS[kind as keyof typeof EXPECTED_ENDS];
  if (expected === undefined) return 'it is of no known kind';
  if (
    row.status !== expected.status ||
    row.reason !== expected.reason ||
    row.exit_code !== expected.exitCode
  ) {
    return `it should have ended as ${JSON.stringify(expected)}`;
  }
  if (expected.logBytes !== null && row.log_bytes !== expected.logBytes) return 'its log has another length';
  if (kind === 'outputs' && row.outputs !== JSON.stringify({ ref: row.ref })) return 'its outputs are others';
  return undefined;
}

/** Once davit has been left alone for long enough, nothing waits that could go on. */
export function checkIdle(file: Database): Violation[] {
  const stuck = file
    .prepare('SELECT id, ref, status, process_id FROM deployments WHERE finished_at IS NULL AND reported = 0')
    .all();
  const undelivered = file
    .prepare(`
      SELECT d.id, d.event_id, w.url, d.attempt_count, d.next_attempt_at
        FROM deliveries d JOIN webhooks w ON w.id = d.webhook_id
       WHERE d.status = 'pending' AND w.status = 'enabled' AND w.deleted_at IS NULL`)
    .all();
  return [...each('no deployment is stuck', stuck), ...each('no delivery is stuck', undelivered)];
}

/** A violation for each row that breaks the rule. */
function each(rule: string, rows: readonly unknown[]): Violation[] {
  return rows.map((row) => ({ rule, detail: JSON.stringify(row) }));
}

/** A violation for each field of `expected` that differs in `actual`. */
export function differences(
  rule: string,
  name: string,
  expected: Record<string, unknown>,
  actual: Record<string, unknown>,
): Violation[] {
  return Object.entries(expected)
    .filter(([field, value]) => actual[field] !== value)
    .map(([field, value]) => ({
      rule,
      detail: `${name}: ${field} should be ${JSON.stringify(value)} and is ${JSON.stringify(actual[field])}`,
    }));
}
