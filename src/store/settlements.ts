import type { AttemptTrigger, WebhookId } from '../domain.ts';
import { DAY_MS } from '../durations.ts';
import type { WriteContext } from './context.ts';
import { ATTEMPTS_MAX, BODIES_SHOWN_MAX, type StoredStatus } from './deliveries.ts';

/** A webhook is disabled when all of its attempts have failed for this long. */
export const DISABLE_AFTER_FAILING_MS = 5 * DAY_MS;

/**
 * After this long without an attempt, as davit was off or nothing happened, `failing_since` starts over: earlier
 * failures say nothing about the time in between. Longer than a weekend, and than any of the default retry delays.
 */
export const FAILING_RESTARTS_AFTER_MS = 3 * DAY_MS;

/** The result of an attempt, and what follows from it for the delivery. */
export interface Settlement {
  /** The delivery's seq. */
  seq: number;
  webhookId: WebhookId;
  /**
   * The webhook's url and `enabled_at` when the attempt was made. If either has changed since, or the webhook was
   * deleted, the result does not count for the webhook; if it was enabled again, a failure does not count for the
   * delivery's ladder either.
   */
  url: string;
  enabledAtMs: number;
  attempt: {
    atMs: number;
    statusCode: number | null;
    error: string | null;
    durationMs: number;
    remoteAddress: string | null;
    responseBody: string | null;
    trigger: Exclude<AttemptTrigger, 'ping'>;
  };
  /** By the clock as it is when this is settled, which may have been set since the attempt began. */
  endedAtMs: number;
  next: { kind: 'delivered' } | { kind: 'retry'; atMs: number } | { kind: 'exhausted' };
  /** Attempts of the delivery in all, including this one. */
  attemptCount: number;
  ladderAttempts: number;
  ladderStartedAtMs: number;
  /** How much the clock skipped at most, as it was set ahead: in the last five days that really passed, in the last three. */
  neverPassedMs: { inFiveDays: number; inThreeDays: number };
  /** Why the webhook is to be disabled now; null: it is not. */
  disableReason: string | null;
}

/**
 * The delivery's state after a settlement. `exhausted`: also if the settlement has a retry, but the delivery has
 * `ATTEMPTS_MAX` attempts. `onNewerLadder`: the attempt failed, but while it was under way a redelivery, a replay or
 * enabling the webhook began a new ladder, which is due already. `gone`: the delivery was pruned meanwhile.
 */
export type Settled = StoredStatus | 'onNewerLadder' | 'gone';

/** A failure that disabled the webhook, and why. */
export interface SettledAndDisabled {
  delivery: Settled;
  disabledFor: string;
}

/** How far the clock was set back, and where to continue. */
interface SetBack {
  byMs: number;
  /** The longest time from now that a retry may be planned for. */
  furthestMs: number;
  /** Null: from the beginning. */
  after: PendingPosition | null;
}

/** The keyset position of a pending delivery, in the order of the index deliveries_pending. */
export interface PendingPosition {
  webhookId: string;
  nextAttemptAtMs: number;
  seq: number;
}

/** The webhook whose retries become due now, and where to continue. */
interface RetryNow {
  webhookId: WebhookId;
  /** Null: from the beginning. */
  after: PendingPosition | null;
}

/** Before all pending deliveries. */
const FIRST_PENDING: PendingPosition = { webhookId: '', nextAttemptAtMs: 0, seq: 0 };

/**
 * A step occupies the writer for about 4 ms. A million rows in one transaction took 3 s and 200 MB. The next one continues
 * after the last of so many rows; fewer were the rest.
 */
const STEP_ROWS = 128;

/** Records the results of attempts, and reschedules retries. */
export function settlementWrites({ database, effects, changed }: WriteContext) {
  const delivered = database.prepare(`
    UPDATE deliveries
       SET status = 'delivered', next_attempt_at = NULL, delivered_at = :atMs, attempt_count = attempt_count + 1,
           ladder_attempts = :ladderAttempts, ladder_started_at = :ladderStartedAtMs
     WHERE seq = +:seq`);
  // Needed although ladders end, as each time that the webhook is enabled another one begins.
  const isSpent = `attempt_count + 1 >= ${ATTEMPTS_MAX}`;
  const missed = database.prepare(`
    UPDATE deliveries
       SET status = iif(${isSpent}, 'exhausted', :status), next_attempt_at = iif(${isSpent}, NULL, :nextAttemptAt),
           attempt_count = attempt_count + 1,
           ladder_attempts = :ladderAttempts, ladder_started_at = :ladderStartedAtMs
     WHERE seq = +:seq AND ladder_started_at <= +:ladderStartedAtMs
       AND (SELECT enabled_at FROM webhooks WHERE id = deliveries.webhook_id) = +:enabledAtMs`);
  const statusOf = database
    .prepare<[number], StoredStatus>('SELECT status FROM deliveries WHERE seq = +?')
    .pluck();
  const counted = database.prepare('UPDATE deliveries SET attempt_count = attempt_count + 1 WHERE seq = +?');
  // Reads the number from the row that was updated: with RETURNING, SQLite creates a temporary table and copies each
  // change into it.
  const insertAttempt = database.prepare(`
    INSERT INTO attempts (delivery_id, number, at, status_code, error, duration_ms, remote_address, response_body, trigger)
    SELECT id, attempt_count, :atMs, :statusCode, :error, :durationMs, :remoteAddress, :responseBody, :trigger
      FROM deliveries WHERE seq = +:seq`);
  // Replays filled the disk with bodies that nobody is shown: 5 MB a second by one key.
  const forgetBody = database.prepare(`
    UPDATE attempts SET response_body = NULL
     WHERE (delivery_id, number) = (SELECT id, attempt_count - ${BODIES_SHOWN_MAX} FROM deliveries WHERE seq = +:seq)`);
  const isSameReceiver =
    'id = +:webhookId AND url = +:url AND enabled_at = +:enabledAtMs AND deleted_at IS NULL';
  // Of two attempts, the one that ended first may be settled last, as a success is settled only when its body has been
  // read. A time after now is one from before the clock was set back.
  const isLater = (column: string) => `(${column} > +:atMs AND ${column} <= +:nowMs)`;
  const succeeded = database.prepare(`
    UPDATE webhooks
       SET last_success_at = iif(${isLater('last_success_at')}, last_success_at, :atMs),
           consecutive_failures = iif(${isLater('last_failure_at')},
                                      iif(failing_since > +:atMs, consecutive_failures, 1), 0),
           failing_since = iif(${isLater('last_failure_at')},
                               iif(failing_since > +:atMs, failing_since, last_failure_at), NULL)
     WHERE ${isSameReceiver}`);
  const failed = database.prepare(`
    UPDATE webhooks
       SET last_failure_at = iif(${isLater('last_failure_at')}, last_failure_at, :atMs),
           consecutive_failures = consecutive_failures + iif(${isLater('last_success_at')}, 0, 1),
           failing_since = iif(${isLater('last_success_at')}
                                 OR (failing_since <= +:atMs
                                     AND last_failure_at >= +:atMs - ${FAILING_RESTARTS_AFTER_MS} - +:inThreeDays),
                               failing_since, :atMs)
     WHERE ${isSameReceiver}`);
  const disable = database.prepare(`
    UPDATE webhooks SET status = 'disabled', status_reason = :reason
     WHERE ${isSameReceiver} AND status = 'enabled'
       AND (+:isAtOnce OR failing_since <= +:atMs - ${DISABLE_AFTER_FAILING_MS} - +:inFiveDays)`);
  const pendingAfter = database.prepare<PendingPosition, PendingPosition>(`
    SELECT webhook_id AS webhookId, next_attempt_at AS nextAttemptAtMs, seq FROM deliveries
     WHERE status = 'pending' AND (webhook_id, next_attempt_at, seq) > (+:webhookId, +:nextAttemptAtMs, +:seq)
     ORDER BY webhook_id, next_attempt_at, seq
     LIMIT ${STEP_ROWS}`);
  const waitingAfter = database.prepare<PendingPosition, PendingPosition & { wasHeld: number }>(`
    SELECT d.webhook_id AS webhookId, d.next_attempt_at AS nextAttemptAtMs, d.seq,
           d.ladder_started_at < w.enabled_at AS wasHeld
      FROM deliveries d JOIN webhooks w ON w.id = d.webhook_id
     WHERE d.webhook_id = +:webhookId AND d.status = 'pending'
       AND (d.next_attempt_at, d.seq) > (+:nextAttemptAtMs, +:seq)
     ORDER BY d.next_attempt_at, d.seq
     LIMIT ${STEP_ROWS}`);
  const planAt = database.prepare('UPDATE deliveries SET next_attempt_at = :atMs WHERE seq = +:seq');

  return {
    /**
     * Records an attempt and what follows from it for the delivery and its webhook. Records nothing if the delivery is
     * gone.
     */
    settle(settlement: Settlement): Settled | SettledAndDisabled {
      const { seq, webhookId, url, enabledAtMs, attempt, endedAtMs: atMs, attemptCount, next } = settlement;
      const settled = settleDelivery(settlement, atMs);
      if (settled === 'gone') return settled;
      insertAttempt.run({ seq, ...attempt });
      if (attemptCount > BODIES_SHOWN_MAX) forgetBody.run({ seq });
      changed('settled');
      const receiver = { webhookId, url, enabledAtMs };
      const nowMs = effects.now();
      if (next.kind === 'delivered') {
        succeeded.run({ ...receiver, atMs, nowMs });
        return settled;
      }
      const { neverPassedMs, disableReason } = settlement;
      const { inFiveDays, inThreeDays } = neverPassedMs;
      failed.run({ ...receiver, atMs, nowMs, inThreeDays });
      const reason = disableReason ?? 'every delivery failed for 5 days';
      const isAtOnce = disableReason === null ? 0 : 1;
      const { changes } = disable.run({ ...receiver, reason, isAtOnce, atMs, inFiveDays });
      return changes === 0 ? settled : { delivery: settled, disabledFor: reason };
    },

    /**
     * Reschedules retries after the clock was set back by `byMs`: they become due that much earlier, and at once if
     * they would still be further away than `furthestMs`. Does one step, and returns where the next one continues;
     * null: it was the last. A rescheduled delivery moves to before its place in the index, so no later step meets it
     * again. A retry that was planned after the clock was set, before the walk reaches it, is moved too: it comes early
     * once.
     */
    setBack({ byMs, furthestMs, after }: SetBack): PendingPosition | null {
      const nowMs = effects.now();
      const rows = pendingAfter.all(after ?? FIRST_PENDING);
      for (const { nextAttemptAtMs, seq } of rows) {
        if (nextAttemptAtMs <= nowMs) continue;
        const earlierMs = Math.max(nowMs, nextAttemptAtMs - byMs);
        planAt.run({ seq, atMs: earlierMs > nowMs + furthestMs ? nowMs : earlierMs });
      }
      const last = rows[STEP_ROWS - 1] ?? null;
      if (last === null) changed('outbox');
      return last;
    },

    /**
     * Makes the retries of a webhook that was enabled due now, as its held deliveries are, each on a new ladder. Those
     * that have failed since it was enabled keep their time. Does one step, from `after` on, and returns as `setBack` does.
     */
    retryNow({ webhookId, after }: RetryNow): PendingPosition | null {
      const nowMs = effects.now();
      const from = after ?? { webhookId, nextAttemptAtMs: nowMs, seq: LAST_SEQ };
      const rows = waitingAfter.all(from);
      for (const { seq, wasHeld } of rows) if (wasHeld === 1) planAt.run({ seq, atMs: nowMs });
      changed(webhookId);
      return rows[STEP_ROWS - 1] ?? null;
    },
  };

  function settleDelivery(settlement: Settlement, atMs: number): Settled {
    const { seq, enabledAtMs, next, ladderAttempts, ladderStartedAtMs } = settlement;
    const ladder = { seq, ladderAttempts, ladderStartedAtMs };
    if (next.kind === 'delivered')
      return delivered.run({ ...ladder, atMs }).changes > 0 ? 'delivered' : 'gone';
    const { changes } = missed.run({
      ...ladder,
      enabledAtMs,
      status: next.kind === 'retry' ? 'pending' : 'exhausted',
      nextAttemptAt: next.kind === 'retry' ? next.atMs : null,
    });
    if (changes > 0) return statusOf.get(seq) ?? 'gone';
    // There is a newer ladder: the failure only counts as an attempt.
    return counted.run(seq).changes > 0 ? 'onNewerLadder' : 'gone';
  }
}

const LAST_SEQ = Number.MAX_SAFE_INTEGER;
