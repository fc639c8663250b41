import type { DeploymentStatus, Reason, TerminalStatus } from '../domain.ts';
import { type Database, inSnapshot } from './database.ts';

/** Deliveries whose time has come, those that are under way among them. */
export interface DueDeliveries {
  /** At most `COUNTED_MAX`. */
  count: number;
  /** Milliseconds since 1970; null: nothing is due. */
  oldestAtMs: number | null;
}

/** A look at what is due, in steps that hold up nothing. */
export interface DueLook {
  /** Of webhooks whose last attempt has failed, and of the others: as far as was looked. */
  due: Record<'healthy' | 'failing', DueDeliveries>;
  /** Looks at the next webhooks; false: those were all. */
  step(): boolean;
}

interface UnfinishedDeployments {
  status: Exclude<DeploymentStatus, TerminalStatus>;
  /** Whether another system carries them out. */
  reported: boolean;
  count: number;
}

/** An event, and how its deployment ended if it tells of an end. */
export interface EventEnd {
  seq: number;
  status: DeploymentStatus | null;
  reason: Reason | null;
  started_at: number | null;
  finished_at: number | null;
}

/** With a million that are due, counting them all would take 45 ms at best. */
export const COUNTED_MAX = 10_000;

/** About 2 ms. */
const WEBHOOKS_OF_STEP = 200;

/** So many deployments that are not over are looked at for those of other systems, the oldest first. */
export const LOOKED_AT_MAX = 10_000;

/** What the metrics tell of the moment, each at a cost that is bounded whatever waits. */
export function gaugeReads(database: Database) {
  // Skips from webhook to webhook in the partial index, as the dispatcher's own look does.
  const pendingAfter = database.prepare<
    { after: string },
    { webhook_id: string; next_attempt_at: number; is_sent_to: 0 | 1; failing_since: number | null }
  >(`
    WITH RECURSIVE pending (webhook_id) AS (
      SELECT min(webhook_id) FROM deliveries WHERE status = 'pending' AND webhook_id > +:after
       UNION ALL
      SELECT (SELECT min(webhook_id) FROM deliveries WHERE status = 'pending' AND webhook_id > pending.webhook_id)
        FROM pending
       WHERE pending.webhook_id IS NOT NULL
       LIMIT ${WEBHOOKS_OF_STEP}
    )
    SELECT w.id AS webhook_id,
           (SELECT min(next_attempt_at) FROM deliveries WHERE status = 'pending' AND webhook_id = w.id) AS next_attempt_at,
           w.status = 'enabled' AND w.deleted_at IS NULL AS is_sent_to,
           w.failing_since
      FROM pending CROSS JOIN webhooks w ON w.id = pending.webhook_id
     ORDER BY w.id`);
  const countDue = database
    .prepare<{ webhookId: string; nowMs: number; limit: number }, number>(`
      SELECT count(*)
        FROM (SELECT 1 FROM deliveries
               WHERE webhook_id = +:webhookId AND status = 'pending' AND next_attempt_at <= +:nowMs
               LIMIT +:limit)`)
    .pluck();
  const countQueued = database.prepare<[], number>('SELECT total(queued_count) FROM projects').pluck();
  const countRunning = database
    .prepare<[string], number>(`
      SELECT count(*) FROM deployments INDEXED BY one_running_deployment_per_project
       WHERE status IN ('running', 'canceling') AND reported = 0 AND status = +?`)
    .pluck();
  const reported = database.prepare<[], { status: UnfinishedDeployments['status']; count: number }>(`
    SELECT status, count(*) AS count
      FROM (SELECT status, reported FROM deployments INDEXED BY deployments_unfinished
             WHERE finished_at IS NULL ORDER BY seq LIMIT ${LOOKED_AT_MAX})
     WHERE reported = 1
     GROUP BY status`);
  const lastEventSeq = database.prepare<[], number>('SELECT coalesce(max(seq), 0) FROM events').pluck();
  const eventEnds = database.prepare<[number, number], EventEnd>(`
    SELECT e.seq, d.status, d.reason, d.started_at, d.finished_at
      FROM events e
      LEFT JOIN deployments d
        ON d.id = e.deployment_id
       AND e.type IN ('deployment.succeeded', 'deployment.failed', 'deployment.canceled')
     WHERE e.seq > +?
     ORDER BY e.seq
     LIMIT +?`);

  return {
    /** What is due at `nowMs`. */
    lookAtDue,

    /** Deployments by state; of those that other systems carry out the oldest are counted. */
    unfinished: (): UnfinishedDeployments[] =>
      inSnapshot(database, () => [
        { status: 'queued', reported: false, count: countQueued.get() ?? 0 },
        { status: 'running', reported: false, count: countRunning.get('running') ?? 0 },
        { status: 'canceling', reported: false, count: countRunning.get('canceling') ?? 0 },
        ...reported.all().map((row) => ({ ...row, reported: true })),
      ]),

    /** Of the newest event; 0 if there is none. */
    lastEventSeq: (): number => lastEventSeq.get() ?? 0,

    /** The first `limit` events after `seq`, in the order in which they were committed. */
    eventsAfter: (seq: number, limit: number): EventEnd[] => eventEnds.all(seq, limit),
  };

  function lookAtDue(nowMs: number): DueLook {
    const due: DueLook['due'] = {
      healthy: { count: 0, oldestAtMs: null },
      failing: { count: 0, oldestAtMs: null },
    };
    let after = '';

    function step(): boolean {
      const webhooks = pendingAfter.all({ after });
      for (const { webhook_id, next_attempt_at, is_sent_to, failing_since } of webhooks) {
        after = webhook_id;
        if (is_sent_to === 0 || next_attempt_at > nowMs) continue;
        const those = due[failing_since === null ? 'healthy' : 'failing'];
        those.oldestAtMs = Math.min(those.oldestAtMs ?? next_attempt_at, next_attempt_at);
        const limit = COUNTED_MAX - those.count;
        if (limit > 0) those.count += countDue.get({ webhookId: webhook_id, nowMs, limit }) ?? 0;
      }
      return webhooks.length > 0;
    }

    return { due, step: () => inSnapshot(database, step) };
  }
}
