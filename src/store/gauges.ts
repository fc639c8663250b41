import type { DeploymentStatus, Reason, TerminalStatus } from '../domain.ts';
import { type Database, inSnapshot } from './database.ts';

/** Deliveries that are due, including those that are being attempted. */
export interface DueDeliveries {
  /** At most `COUNTED_MAX`. */
  count: number;
  /** Milliseconds since 1970; null: nothing is due. */
  oldestAtMs: number | null;
}

/** A count of due deliveries, in steps that do not block the thread for long. */
export interface DueCount {
  /** What was counted so far: `failing` for webhooks whose last attempt failed, `healthy` for all others. */
  due: Record<'healthy' | 'failing', DueDeliveries>;
  /** Counts the next webhooks; false: there were none left. */
  step(): boolean;
}

interface UnfinishedDeployments {
  status: Exclude<DeploymentStatus, TerminalStatus>;
  /** Whether another system carries them out. */
  reported: boolean;
  count: number;
}

/** An event; if it is terminal, with how its deployment ended. */
export interface EventEnd {
  seq: number;
  status: TerminalStatus | null;
  reason: Reason | null;
  started_at: number | null;
  finished_at: number | null;
}

/** The count stops here: a million due deliveries would take 45 ms at best. */
export const COUNTED_MAX = 10_000;

/** How many webhooks a step counts, which takes about 2 ms. */
const WEBHOOKS_OF_STEP = 200;

/** How many unfinished deployments, the oldest, are searched for those that other systems carry out. */
export const SEARCHED_MAX = 10_000;

/** The gauges of the metrics, each read at a bounded cost, however much waits. */
export function gaugeReads(database: Database) {
  // Seeks from webhook to webhook in the partial index, as `pendingWebhooks` in outbox.ts does.
  const pendingAfter = database.prepare<
    { after: string },
    {
      webhook_id: string;
      next_attempt_at: number;
      enabled_at: number;
      is_sent_to: 0 | 1;
      failing_since: number | null;
    }
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
           w.enabled_at,
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
             WHERE finished_at IS NULL ORDER BY seq LIMIT ${SEARCHED_MAX})
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
    /** Begins a count of the deliveries that are due at `nowMs`. */
    beginDueCount,

    /**
     * Deployments by status. Those of other systems are counted only among the `SEARCHED_MAX` oldest unfinished ones.
     */
    unfinished: (): UnfinishedDeployments[] =>
      inSnapshot(database, () => [
        { status: 'queued', reported: false, count: countQueued.get() ?? 0 },
        { status: 'running', reported: false, count: countRunning.get('running') ?? 0 },
        { status: 'canceling', reported: false, count: countRunning.get('canceling') ?? 0 },
        ...reported.all().map((row) => ({ ...row, reported: true })),
      ]),

    /** The seq of the newest event; 0 if there is none. */
    lastEventSeq: (): number => lastEventSeq.get() ?? 0,

    /** The first `limit` events after `seq`, in the order in which they were committed. */
    eventsAfter: (seq: number, limit: number): EventEnd[] => eventEnds.all(seq, limit),
  };

  function beginDueCount(nowMs: number): DueCount {
    const due: DueCount['due'] = {
      healthy: { count: 0, oldestAtMs: null },
      failing: { count: 0, oldestAtMs: null },
    };
    let after = '';

    function step(): boolean {
      const webhooks = pendingAfter.all({ after });
      for (const { webhook_id, next_attempt_at, enabled_at, is_sent_to, failing_since } of webhooks) {
        after = webhook_id;
        if (is_sent_to === 0 || next_attempt_at > nowMs) continue;
        const group = due[failing_since === null ? 'healthy' : 'failing'];
        // One that was held is due from when its webhook was enabled, not from its own time. If that is to come, the
        // clock was set back since.
        const dueSinceMs = enabled_at > nowMs ? next_attempt_at : Math.max(next_attempt_at, enabled_at);
        group.oldestAtMs = Math.min(group.oldestAtMs ?? dueSinceMs, dueSinceMs);
        const limit = COUNTED_MAX - group.count;
        if (limit > 0) group.count += countDue.get({ webhookId: webhook_id, nowMs, limit }) ?? 0;
      }
      return webhooks.length > 0;
    }

    return { due, step: () => inSnapshot(database, step) };
  }
}
