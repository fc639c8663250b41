import type { AttemptTrigger, DeliveryId, EventId, KeyId, WebhookId } from '../domain.ts';
import { type Database, inSnapshot } from './database.ts';
import { type Recipient, recipientReads } from './recipients.ts';

/**
 * How many deliveries of a webhook a claim reads beyond those that it returns. Without that, each claim read past all
 * that are under way: with 200 busy webhooks that took 4 of the 45 µs that the dispatcher needs for a delivery.
 */
const READ_AHEAD = 32;

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
  /** The first of the current series of failures, see settlements.ts; null: the last attempt did not fail. */
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
  const stillWaiting = database
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

    /** Whether `retryNow` is not finished for the webhook, as davit ended after the webhook was enabled. */
    isRetryNowUnfinished: (webhookId: WebhookId, nowMs: number): boolean =>
      stillWaiting.get({ webhookId, nowMs }) !== undefined,

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
      // Deliveries that are held are not read: they may be many, and a webhook may be disabled since its claim was due.
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
