import type { AttemptTrigger, DeliveryId, EventId, WebhookId } from '../domain.ts';
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';

/** A webhook that has only failed for so long is disabled. */
const DISABLE_AFTER_FAILING_MS = 5 * 24 * 60 * 60 * 1000;

/** A delivery whose time has come, with all that sending it takes. */
export interface DueDelivery {
  id: DeliveryId;
  event_id: EventId;
  webhook_id: WebhookId;
  url: string;
  payload: string;
  /** Attempts on the ladder that it stands on now. */
  ladder_attempts: number;
  ladder_started_at: number;
  ladder_trigger: Exclude<AttemptTrigger, 'ping'>;
}

/** A webhook that has something pending: the moment of its first. */
export interface PendingWebhook {
  webhook_id: WebhookId;
  next_attempt_at: number;
  consecutive_failures: number;
}

/** One attempt that was made, and where its delivery stands after it. */
export interface Settlement {
  deliveryId: DeliveryId;
  webhookId: WebhookId;
  attempt: {
    atMs: number;
    statusCode: number | null;
    error: string | null;
    durationMs: number;
    remoteAddress: string | null;
    responseBody: string | null;
    trigger: Exclude<AttemptTrigger, 'ping'>;
  };
  next: { kind: 'delivered' } | { kind: 'retry'; atMs: number } | { kind: 'exhausted' };
  ladderAttempts: number;
  ladderStartedAtMs: number;
  /** Why the webhook is to be disabled with it; null: it is not. */
  disableReason: string | null;
}

/** What is due, as the dispatcher claims it. */
export function outboxReads(database: Database) {
  // Skips from webhook to webhook in the partial index: one seek for each, however much is pending.
  const pendingWebhooks = database.prepare<[], PendingWebhook>(`
    WITH RECURSIVE pending (webhook_id) AS (
      SELECT min(webhook_id) FROM deliveries WHERE status = 'pending'
       UNION ALL
      SELECT (SELECT min(webhook_id) FROM deliveries WHERE status = 'pending' AND webhook_id > pending.webhook_id)
        FROM pending
       WHERE pending.webhook_id IS NOT NULL
    )
    SELECT w.id AS webhook_id,
           (SELECT min(next_attempt_at) FROM deliveries WHERE status = 'pending' AND webhook_id = w.id) AS next_attempt_at,
           w.consecutive_failures
      FROM pending JOIN webhooks w ON w.id = pending.webhook_id
     WHERE w.status = 'enabled' AND w.deleted_at IS NULL
     ORDER BY next_attempt_at`);
  const dueOf = database.prepare<{ webhookId: WebhookId; nowMs: number; limit: number }, DueDelivery>(`
    SELECT d.id, d.event_id, d.webhook_id, w.url, e.payload,
           -- What was held while the webhook was disabled begins a new ladder when it is enabled.
           iif(d.ladder_started_at < w.enabled_at, 0, d.ladder_attempts) AS ladder_attempts,
           max(d.ladder_started_at, w.enabled_at) AS ladder_started_at,
           d.ladder_trigger
      FROM deliveries d
      JOIN webhooks w ON w.id = d.webhook_id
      JOIN events e ON e.id = d.event_id
     WHERE d.webhook_id = :webhookId AND d.status = 'pending' AND d.next_attempt_at <= :nowMs
     ORDER BY d.next_attempt_at, d.seq
     LIMIT :limit`);

  return {
    /** The enabled webhooks that have something pending, the first due first. */
    pendingWebhooks: (): PendingWebhook[] => pendingWebhooks.all(),

    /** The first `limit` deliveries of a webhook that are due, those under way included. */
    dueOf: (webhookId: WebhookId, nowMs: number, limit: number): DueDelivery[] =>
      dueOf.all({ webhookId, nowMs, limit }),
  };
}

/** What came of attempts. */
export function outboxWrites({ database, changed }: WriteContext) {
  const insertAttempt = database.prepare(`
    INSERT INTO attempts (delivery_id, number, at, status_code, error, duration_ms, remote_address, response_body, trigger)
    SELECT id, attempt_count + 1, :atMs, :statusCode, :error, :durationMs, :remoteAddress, :responseBody, :trigger
      FROM deliveries WHERE id = :deliveryId`);
  const updateDelivery = database.prepare(`
    UPDATE deliveries
       SET status = :status, next_attempt_at = :nextAttemptAt, delivered_at = :deliveredAt,
           attempt_count = attempt_count + 1, ladder_attempts = :ladderAttempts, ladder_started_at = :ladderStartedAt
     WHERE id = :deliveryId AND (:status = 'delivered' OR ladder_started_at <= :ladderStartedAt)`);
  const countAttempt = database.prepare(
    'UPDATE deliveries SET attempt_count = attempt_count + 1 WHERE id = :deliveryId',
  );
  const succeeded = database.prepare(`
    UPDATE webhooks SET last_success_at = :atMs, consecutive_failures = 0, failing_since = NULL WHERE id = :webhookId`);
  const failed = database.prepare(`
    UPDATE webhooks
       SET last_failure_at = :atMs, consecutive_failures = consecutive_failures + 1,
           failing_since = coalesce(failing_since, :atMs)
     WHERE id = :webhookId`);
  const disableLongFailing = database.prepare(`
    UPDATE webhooks SET status = 'disabled', status_reason = 'every delivery failed for 5 days'
     WHERE id = :webhookId AND status = 'enabled' AND failing_since <= :atMs - ${DISABLE_AFTER_FAILING_MS}`);
  const disable = database.prepare(`
    UPDATE webhooks SET status = 'disabled', status_reason = :reason WHERE id = :webhookId AND status = 'enabled'`);

  return {
    /** The attempt and what follows from it for the delivery and its webhook, together. */
    settle({
      deliveryId,
      webhookId,
      attempt,
      next,
      ladderAttempts,
      ladderStartedAtMs,
      disableReason,
    }: Settlement): void {
      if (insertAttempt.run({ deliveryId, ...attempt }).changes === 0) return; // pruned meanwhile
      const endedAtMs = attempt.atMs + attempt.durationMs;
      const { changes } = updateDelivery.run({
        deliveryId,
        status: next.kind === 'retry' ? 'pending' : next.kind,
        nextAttemptAt: next.kind === 'retry' ? next.atMs : null,
        deliveredAt: next.kind === 'delivered' ? endedAtMs : null,
        ladderAttempts,
        ladderStartedAt: ladderStartedAtMs,
      });
      // A redelivery or replay was asked for while it was under way: its failure does not end the new ladder.
      if (changes === 0) countAttempt.run({ deliveryId });
      if (next.kind === 'delivered') {
        succeeded.run({ webhookId, atMs: endedAtMs });
      } else {
        failed.run({ webhookId, atMs: endedAtMs });
        disableLongFailing.run({ webhookId, atMs: endedAtMs });
      }
      if (disableReason !== null) disable.run({ webhookId, reason: disableReason });
      changed('outbox');
    },
  };
}
