import {
  type Deployment,
  type DeploymentId,
  type KeyId,
  optionalTimestamp,
  type ProjectId,
  type ProjectStatus,
  type Timestamp,
  timestamp,
  type Webhook,
  type WebhookId,
} from '../domain.ts';
import { type Database, inSnapshot } from './database.ts';
import type { DeploymentReads } from './deployments.ts';
import type { WebhookReads } from './webhooks.ts';

/** All unfinished work, in one snapshot. */
export interface Backlog {
  running: Excerpt<Deployment & { project_name: string }>;
  /** In the order in which they will presumably start; those of paused projects last. */
  waiting: Excerpt<WaitingDeployment>;
  /** Deployments that another system carries out and has not reported the end of, oldest first. */
  reported: Excerpt<ReportedDeployment>;
  deliveries: { pending_count: number; due_count: number; held_count: number };
  /** Webhooks with pending or held deliveries, those with the earliest attempt first and disabled ones last. */
  webhooks: Excerpt<WebhookBacklog>;
  replays: Excerpt<ReplayBacklog>;
}

/** The first items of a list, and how many the whole list has. */
export interface Excerpt<Item> {
  count: number;
  items: Item[];
}

export interface WaitingDeployment extends Deployment {
  project_name: string;
  project_status: ProjectStatus;
  /** The deployment that is running in its project; null: none. */
  project_runs: DeploymentId | null;
}

export interface ReportedDeployment extends Deployment {
  project_name: string;
  report_due_at: Timestamp | null;
}

/** A webhook as the administrator sees it, with its unfinished deliveries. */
export interface WebhookBacklog extends Webhook {
  /** Once its key has expired, it gets no new events. */
  created_by: { key_id: KeyId; name: string; expires_at: Timestamp | null };
  failing_since: Timestamp | null;
  /** Deliveries that are being attempted or will be. */
  pending_count: number;
  /** The pending deliveries whose next attempt is due. */
  due_count: number;
  /** Deliveries that wait until the webhook is enabled. */
  held_count: number;
  /** May be in the past: the attempt is under way then, or no service runs to make it. */
  next_attempt_at: Timestamp | null;
  /** How the latest attempt of an unfinished delivery failed: a status code, or an attempt's `error`. */
  last_error: string | null;
}

export interface ReplayBacklog {
  webhook_id: WebhookId;
  since: Timestamp;
  until: Timestamp;
  created_at: Timestamp;
}

/** How many pending deliveries of a webhook are searched for one with an attempt. */
const SEARCHED_FOR_ATTEMPT_MAX = 1_000;

/** What runs, waits and is retried in the whole file, for the administrator. */
export function backlogReads(database: Database, deployments: DeploymentReads, webhooks: WebhookReads) {
  const projectOf = database.prepare<[string], { name: string; status: ProjectStatus }>(
    'SELECT name, status FROM projects WHERE id = +?',
  );
  const runningIn = database
    .prepare<[string], DeploymentId>(`
      SELECT id FROM deployments
       WHERE project_id = +? AND status IN ('running', 'canceling') AND reported = 0`)
    .pluck();
  const countWaiting = database.prepare<[], number>('SELECT total(queued_count) FROM projects').pluck();
  // Projects take turns, so the first deployment of each project comes before the second of any. Of each project no more
  // are read than can be shown.
  const waiting = database
    .prepare<{ limit: number }, DeploymentId>(`
      SELECT d.id
        FROM projects p
        JOIN deployments d
          ON d.seq IN (SELECT q.seq FROM deployments q
                        WHERE q.project_id = p.id AND q.status = 'queued' AND q.reported = 0
                        ORDER BY q.seq LIMIT :limit)
       WHERE p.queued_count > 0
       ORDER BY p.status <> 'active', row_number() OVER (PARTITION BY p.id ORDER BY d.seq),
                p.last_started_at, p.seq
       LIMIT :limit`)
    .pluck();
  const openReports =
    'FROM deployments INDEXED BY deployments_unfinished WHERE finished_at IS NULL AND reported = 1';
  const countReported = database.prepare<[], number>(`SELECT count(*) ${openReports}`).pluck();
  const reported = database.prepare<{ limit: number }, { id: DeploymentId; report_due_at: number | null }>(
    `SELECT id, report_due_at ${openReports} ORDER BY seq LIMIT :limit`,
  );

  const registration = database.prepare<
    [string],
    { key_id: KeyId; name: string; expires_at: number | null; failing_since: number | null }
  >(`
    SELECT w.key_id, k.name, k.expires_at, w.failing_since
      FROM webhooks w JOIN keys k ON k.id = w.key_id WHERE w.id = +?`);
  // A delivery that was held is due from when its webhook was enabled, not from its own time. If that is to come, the
  // clock was set back since.
  const unsettled = database.prepare<
    { id: string; nowMs: number },
    { count: number; due: number; next_attempt_at: number | null }
  >(`
    SELECT count(*) AS count, total(next_attempt_at <= :nowMs) AS due,
           max(min(next_attempt_at), (SELECT iif(enabled_at > +:nowMs, 0, enabled_at) FROM webhooks WHERE id = +:id))
             AS next_attempt_at
      FROM deliveries WHERE webhook_id = +:id AND status = 'pending'`);
  // The last attempt of an unfinished delivery was a success if the delivery was requested again since.
  const lastError = database
    .prepare<[string], string | number>(`
      SELECT coalesce(a.error, a.status_code)
        FROM (SELECT id, attempt_count FROM deliveries
               WHERE webhook_id = +? AND status = 'pending'
               ORDER BY next_attempt_at DESC LIMIT ${SEARCHED_FOR_ATTEMPT_MAX}) d
        JOIN attempts a ON a.delivery_id = d.id AND a.number = d.attempt_count
                       AND (a.error IS NOT NULL OR a.status_code NOT BETWEEN 200 AND 299)
       ORDER BY a.at DESC LIMIT 1`)
    .pluck();
  const countReplays = database
    .prepare<[], number>('SELECT count(*) FROM replays WHERE finished_at IS NULL')
    .pluck();
  const replays = database.prepare<
    { limit: number },
    { webhook_id: WebhookId; since: number; until: number; created_at: number }
  >(
    'SELECT webhook_id, since, until, created_at FROM replays WHERE finished_at IS NULL ORDER BY seq LIMIT :limit',
  );

  return {
    /** All unfinished work, of each kind the first `limit` items. */
    all: (nowMs: number, limit: number): Backlog => inSnapshot(database, () => backlog(nowMs, limit)),

    /** All webhooks except deleted ones, oldest first. */
    webhooks: (nowMs: number): WebhookBacklog[] => inSnapshot(database, () => everyWebhook(nowMs)),

    /** Undefined if there is no such webhook or it is deleted. */
    webhook: (id: string, nowMs: number): WebhookBacklog | undefined =>
      inSnapshot(database, () => {
        const webhook = webhooks.get(id);
        return webhook === undefined ? undefined : withBacklog(webhook, nowMs);
      }),
  };

  function backlog(nowMs: number, limit: number): Backlog {
    const running = deployments.running().map(({ id }) => deployments.existing(id));
    const unsettledWebhooks = everyWebhook(nowMs)
      .filter(({ pending_count, held_count }) => pending_count + held_count > 0)
      .sort(byNextAttempt);
    return {
      running: {
        count: running.length,
        items: running
          .slice(0, limit)
          .map((deployment) => ({ ...deployment, project_name: nameOf(deployment) })),
      },
      waiting: {
        count: countWaiting.get() ?? 0,
        items: deployments.existingOf(waiting.all({ limit })).map(waitingDeployment),
      },
      reported: {
        count: countReported.get() ?? 0,
        items: reported.all({ limit }).map(({ id, report_due_at }) => {
          const deployment = deployments.existing(id);
          return {
            ...deployment,
            project_name: nameOf(deployment),
            report_due_at: optionalTimestamp(report_due_at),
          };
        }),
      },
      deliveries: {
        pending_count: sumOf(unsettledWebhooks, 'pending_count'),
        due_count: sumOf(unsettledWebhooks, 'due_count'),
        held_count: sumOf(unsettledWebhooks, 'held_count'),
      },
      webhooks: { count: unsettledWebhooks.length, items: unsettledWebhooks.slice(0, limit) },
      replays: {
        count: countReplays.get() ?? 0,
        items: replays.all({ limit }).map(({ webhook_id, since, until, created_at }) => ({
          webhook_id,
          since: timestamp(since),
          until: timestamp(until),
          created_at: timestamp(created_at),
        })),
      },
    };
  }

  function waitingDeployment(deployment: Deployment): WaitingDeployment {
    const { name, status } = existingProject(deployment.project_id);
    return {
      ...deployment,
      project_name: name,
      project_status: status,
      project_runs: runningIn.get(deployment.project_id) ?? null,
    };
  }

  function nameOf({ project_id }: Deployment): string {
    return existingProject(project_id).name;
  }

  function existingProject(id: ProjectId): { name: string; status: ProjectStatus } {
    const project = projectOf.get(id);
    if (project === undefined) throw new Error(`a deployment of no project: ${id}`);
    return project;
  }

  function everyWebhook(nowMs: number): WebhookBacklog[] {
    return webhooks.list().map((webhook) => withBacklog(webhook, nowMs));
  }

  function withBacklog(webhook: Webhook, nowMs: number): WebhookBacklog {
    const { id } = webhook;
    const made = registration.get(id);
    if (made === undefined) throw new Error(`a webhook of no key: ${id}`);
    const { count = 0, due = 0, next_attempt_at = null } = unsettled.get({ id, nowMs }) ?? {};
    const isHeld = webhook.status === 'disabled';
    return {
      ...webhook,
      created_by: {
        key_id: made.key_id,
        name: made.name,
        expires_at: optionalTimestamp(made.expires_at),
      },
      failing_since: optionalTimestamp(made.failing_since),
      pending_count: isHeld ? 0 : count,
      due_count: isHeld ? 0 : due,
      held_count: isHeld ? count : 0,
      next_attempt_at: isHeld ? null : optionalTimestamp(next_attempt_at),
      last_error: count === 0 ? null : String(lastError.get(id) ?? '') || null,
    };
  }
}

function byNextAttempt(one: WebhookBacklog, other: WebhookBacklog): number {
  const atMs = ({ next_attempt_at }: WebhookBacklog) =>
    next_attempt_at === null ? Number.POSITIVE_INFINITY : Date.parse(next_attempt_at);
  return atMs(one) === atMs(other) ? 0 : atMs(one) - atMs(other);
}

function sumOf(
  webhooks: readonly WebhookBacklog[],
  column: 'pending_count' | 'due_count' | 'held_count',
): number {
  return webhooks.reduce((sum, webhook) => sum + webhook[column], 0);
}
