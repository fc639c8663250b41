import type { AttemptTrigger, DeliveryId, EventId, KeyId, WebhookId } from '../domain.ts';
import { DAY_MS } from '../durations.ts';
import type { WriteContext } from './context.ts';
import { type Database, inSnapshot } from './database.ts';
import { ATTEMPTS_MAX, BODIES_SHOWN_MAX } from './deliveries.ts';
import { type Recipient, recipientReads } from './recipients.ts';

/**
 * How many deliveries of a webhook a claim reads beyond those that it returns. Without that, each claim read past all
 * that are under way: with 200 busy webhooks that took 4 of the 45 µs that the dispatcher needs for a delivery.
 */
const READ_AHEAD = 32;

/** A webhook is disabled when all of its attempts have failed for this long. */
export const DISABLE_AFTER_FAILING_MS = 5 * DAY_MS;

/**
 * After this long without an attempt, as davit was off or nothing happened, `failing_since` starts over: earlier
 * failures say nothing about the time in between. Longer than a weekend, and than any of the default retry delays.
 */
const FAILING_RESTARTS_AFTER_MS = 3 * DAY_MS;

/** A delivery that is due, with what is needed to send it except the secrets. */
export interface DueDelivery {
  seq: number;
  id: DeliveryId;
  event_id: EventId;
  webhook_id: WebhookId;
  url: string;
  /** When the webhook was last enabled. */
  enabled_at: number;
  payload: string;
  /** How many attempts were made in all. */
  attempt_count: number;
  /** How many attempts were made on the current ladder. */
  ladder_attempts: number;
  ladder_started_at: number;
  ladder_trigger: Exclude<AttemptTrigger, 'ping'>;
}

/** Whose webhook it is, and the recorded results of its attempts. */
export interface WebhookHistory {
  /** The key that registered it; null: the webhook is gone. */
  key_id: KeyId | null;
  /**
   * The first of the current series of failures, see FAILING_RESTARTS_AFTER_MS; null: the last attempt did not fail.
   */
  failing_since: number | null;
  /** Null: no attempt ever succeeded. */
  last_success_at: number | null;
}

/** A webhook with pending deliveries, and when the first of them is due. */
export interface PendingWebhook extends WebhookHistory {
  webhook_id: WebhookId;
  /** Of its pending deliveries, the nearest. */
  next_attempt_at: number;
  /** The furthest. */
  last_attempt_at: number;
}

/** Asks for the next deliveries of one webhook. */
export interface ClaimRequest {
  webhookId: WebhookId;
  /** How many at most. */
  limit: number;
  /** The seqs of deliveries that are being attempted: they are still pending, but must not be claimed again. */
  underWay: readonly number[];
  /**
   * The seqs of due deliveries that an earlier claim read ahead, the first due first. A claim takes from it and refills
   * it. The caller passes the same array to the webhook's next claim, and empties it when deliveries become due in
   * another order. Deliveries in it that may not be sent any more are left out of the claim.
   */
  ahead: number[];
}

export interface Claim {
  /** Empty if the webhook is disabled or deleted. */
  due: DueDelivery[];
  /** The signing secrets, the newest first. */
  secrets: readonly string[];
  /** When the next delivery after these is due; null: there is none, or the webhook is disabled or deleted. */
  nextAtMs: number | null;
}

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
  next: { kind: 'delivered' } | { kind: 'retry'; atMs: number } | { kind: 'exhausted' };
  /** Attempts of the delivery in all, including this one. */
  attemptCount: number;
  ladderAttempts: number;
  ladderStartedAtMs: number;
  /** How much the clock skipped, as it was set ahead, in the last five days that really passed. */
  neverPassedMs: number;
  /** Why the webhook is to be disabled now; null: it is not. */
  disableReason: string | null;
}

/**
 * The delivery's state after a settlement. `exhausted`: also if the settlement has a retry, but the delivery has
 * `ATTEMPTS_MAX` attempts. `onNewerLadder`: the attempt failed, but while it was under way a redelivery, a replay or
 * enabling the webhook began a new ladder, which is due already. `gone`: the delivery was pruned meanwhile.
 */
export type Settled = 'pending' | 'delivered' | 'exhausted' | 'onNewerLadder' | 'gone';

/** A failure that disabled the webhook, and why. */
export interface SettledLast {
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
interface Hurry {
  webhookId: WebhookId;
  /** Null: from the beginning. */
  after: PendingPosition | null;
}

/** Before all pending deliveries. */
const FIRST_PENDING: PendingPosition = { webhookId: '', nextAttemptAtMs: 0, seq: 0 };

/** A step occupies the writer for about 4 ms. A million rows in one transaction took 3 s and 200 MB. */
const STEP_ROWS = 128;

/** What is to be delivered, and to whom. */
export function outboxReads(database: Database) {
  // Seeks from webhook to webhook in the partial index: three seeks for each, however many deliveries are pending.
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
           (SELECT max(next_attempt_at) FROM deliveries WHERE status = 'pending' AND webhook_id = w.id) AS last_attempt_at,
           w.key_id, w.failing_since, w.last_success_at
      FROM pending JOIN webhooks w ON w.id = pending.webhook_id
     WHERE w.status = 'enabled' AND w.deleted_at IS NULL
     ORDER BY next_attempt_at`);
  const firstPending = database
    .prepare<[WebhookId, number], [seq: number, nextAttemptAt: number]>(`
      SELECT seq, next_attempt_at FROM deliveries
       WHERE webhook_id = +? AND status = 'pending'
       ORDER BY next_attempt_at, seq
       LIMIT +?`)
    .raw();
  // In the order of the list, as CROSS JOIN fixes the order of the loops. Without those that are no longer due.
  const rowsOf = database
    .prepare<[seqs: string, nowMs: number], DeliveryRow>(`
      SELECT d.seq, d.id, d.event_id, e.payload, d.attempt_count, d.ladder_attempts, d.ladder_started_at,
             d.ladder_trigger
        FROM json_each(?) wanted
       CROSS JOIN deliveries d ON d.seq = wanted.value AND d.status = 'pending' AND d.next_attempt_at <= +?
       CROSS JOIN events e ON e.id = d.event_id`)
    .raw();
  // `enabled_at <> created_at` skips webhooks that were never enabled again, as most are: scanning a million retries of
  // such a webhook took 1.6 s at each start.
  const unhurried = database
    .prepare<{ webhookId: WebhookId; nowMs: number }, number>(`
      SELECT 1 FROM webhooks w
       CROSS JOIN deliveries d ON d.webhook_id = w.id AND d.status = 'pending' AND d.next_attempt_at > +:nowMs
       WHERE w.id = +:webhookId AND w.enabled_at <> w.created_at
         AND d.ladder_started_at < w.enabled_at
       LIMIT 1`)
    .pluck();
  const { recipients } = recipientReads(database);
  const history = database.prepare<[WebhookId], WebhookHistory>(
    'SELECT key_id, failing_since, last_success_at FROM webhooks WHERE id = +?',
  );

  return {
    /** The enabled webhooks with pending deliveries, the first due first. */
    pendingWebhooks: (): PendingWebhook[] => pendingWebhooks.all(),

    /** Whether `hurry` is not finished for the webhook, as davit ended after the webhook was enabled. */
    isUnhurried: (webhookId: WebhookId, nowMs: number): boolean =>
      unhurried.get({ webhookId, nowMs }) !== undefined,

    /** What is recorded of a webhook; of an unknown one, nothing. */
    history: (webhookId: WebhookId): WebhookHistory =>
      history.get(webhookId) ?? { key_id: null, failing_since: null, last_success_at: null },

    /**
     * The deliveries that are due at `nowMs`, for each request. Costs 2 to 3 µs for a delivery, with a thousand pending
     * or a million.
     */
    claim,

    /** The webhook if it may be sent to at `nowMs`, with its live secrets; undefined: it may not. */
    recipient: (webhookId: WebhookId, nowMs: number): Recipient | undefined =>
      inSnapshot(database, () => recipients([webhookId], nowMs)).get(webhookId),
  };

  function claim(requests: readonly ClaimRequest[], nowMs: number): Claim[] {
    // In one snapshot the reads are consistent, and cost a third of what they do in separate ones.
    return inSnapshot(database, () => claimNow(requests, nowMs));
  }

  function claimNow(requests: readonly ClaimRequest[], nowMs: number): Claim[] {
    const found = recipients(
      requests.map(({ webhookId }) => webhookId),
      nowMs,
    );
    const picks = requests.map((request) => ({
      webhookId: request.webhookId,
      // Deliveries that are held are not read, as each new event of a disabled webhook causes a claim, too.
      ...(found.has(request.webhookId) ? pick(request, nowMs) : NOTHING_DUE),
    }));
    const rows = rowsOf.all(JSON.stringify(picks.flatMap(({ seqs }) => seqs)), nowMs);
    let place = 0;
    return picks.map(({ webhookId, seqs, nextAtMs }) => {
      const recipient = found.get(webhookId);
      const claim: Claim = {
        due: [],
        secrets: recipient?.secrets ?? [],
        nextAtMs,
      };
      for (const seq of seqs) {
        const row = rows[place];
        if (row?.[0] !== seq) continue;
        place += 1;
        if (recipient !== undefined) claim.due.push(toDueDelivery(webhookId, row, recipient));
      }
      return claim;
    });
  }

  /** Takes the next deliveries from what was read ahead, after refilling that from the index if necessary. */
  function pick(request: ClaimRequest, nowMs: number) {
    const { limit, ahead } = request;
    const nextAtMs = ahead.length > limit ? nowMs : readAhead(request, nowMs);
    const seqs = ahead.splice(0, limit);
    return { seqs, nextAtMs: ahead.length > 0 ? nowMs : nextAtMs };
  }

  /** Refills `ahead`. Returns when the next delivery that is not yet due will be; null: it found none. */
  function readAhead({ webhookId, limit, underWay, ahead }: ClaimRequest, nowMs: number): number | null {
    ahead.length = 0;
    for (const [seq, nextAttemptAt] of firstPending.all(webhookId, underWay.length + limit + READ_AHEAD)) {
      if (underWay.includes(seq)) continue;
      if (nextAttemptAt > nowMs) return nextAttemptAt;
      ahead.push(seq);
    }
    return null;
  }
}

const NOTHING_DUE = { seqs: [], nextAtMs: null };

type DeliveryRow = [
  seq: number,
  id: DeliveryId,
  eventId: EventId,
  payload: string,
  attemptCount: number,
  ladderAttempts: number,
  ladderStartedAt: number,
  ladderTrigger: DueDelivery['ladder_trigger'],
];

function toDueDelivery(
  webhook_id: WebhookId,
  row: DeliveryRow,
  { url, enabledAtMs }: Recipient,
): DueDelivery {
  const [seq, id, event_id, payload, attempt_count, ladderAttempts, ladderStartedAt, ladder_trigger] = row;
  return {
    seq,
    id,
    event_id,
    webhook_id,
    url,
    enabled_at: enabledAtMs,
    payload,
    attempt_count,
    // Enabling the webhook begins a new ladder for the deliveries that were held.
    ladder_attempts: ladderStartedAt < enabledAtMs ? 0 : ladderAttempts,
    ladder_started_at: Math.max(ladderStartedAt, enabledAtMs),
    ladder_trigger,
  };
}

/** Records the results of attempts, and reschedules retries. */
export function outboxWrites({ database, effects, changed }: WriteContext) {
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
    .prepare<[number], 'pending' | 'delivered' | 'exhausted'>('SELECT status FROM deliveries WHERE seq = +?')
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
                                     AND last_failure_at >= +:atMs - ${FAILING_RESTARTS_AFTER_MS} - +:neverPassedMs),
                               failing_since, :atMs)
     WHERE ${isSameReceiver}`);
  const disable = database.prepare(`
    UPDATE webhooks SET status = 'disabled', status_reason = :reason
     WHERE ${isSameReceiver} AND status = 'enabled'
       AND (+:isAtOnce OR failing_since <= +:atMs - ${DISABLE_AFTER_FAILING_MS} - +:neverPassedMs)`);
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
    settle(settlement: Settlement): Settled | SettledLast {
      const { seq, webhookId, url, enabledAtMs, attempt, attemptCount, next } = settlement;
      const atMs = attempt.atMs + attempt.durationMs;
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
      failed.run({ ...receiver, atMs, nowMs, neverPassedMs });
      const reason = disableReason ?? 'every delivery failed for 5 days';
      const isAtOnce = disableReason === null ? 0 : 1;
      const { changes } = disable.run({ ...receiver, reason, isAtOnce, atMs, neverPassedMs });
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
      const last = endOfStep(rows);
      if (last === null) changed('outbox');
      return last;
    },

    /**
     * Makes the retries of a webhook that was enabled due now, as its held deliveries are, each on a new ladder. Those
     * that have failed since it was enabled keep their time. Does one step, from `after` on, and returns as `setBack` does.
     */
    hurry({ webhookId, after }: Hurry): PendingPosition | null {
      const nowMs = effects.now();
      const from = after ?? { webhookId, nextAttemptAtMs: nowMs, seq: LAST_SEQ };
      const rows = waitingAfter.all(from);
      for (const { seq, wasHeld } of rows) if (wasHeld === 1) planAt.run({ seq, atMs: nowMs });
      changed(webhookId);
      return endOfStep(rows);
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

/** Where the step after these rows continues; null: they are the last. */
function endOfStep(rows: readonly PendingPosition[]): PendingPosition | null {
  return rows.length === STEP_ROWS ? (rows.at(-1) ?? null) : null;
}
