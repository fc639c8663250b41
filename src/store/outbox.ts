import type { AttemptTrigger, DeliveryId, EventId, WebhookId } from '../domain.ts';
import { DAY_MS } from '../durations.ts';
import type { WriteContext } from './context.ts';
import { type Database, inSnapshot } from './database.ts';
import { ATTEMPTS_MAX } from './deliveries.ts';
import { type Recipient, recipientReads } from './recipients.ts';

/**
 * So many more of a webhook are looked up with those that are claimed. One by one, each claim read past all that are
 * under way: with 200 busy webhooks that took 4 of the 45 µs that the dispatcher needs for a delivery.
 */
const READ_AHEAD = 32;

/** A webhook that has only failed for so long is disabled. */
export const DISABLE_AFTER_FAILING_MS = 5 * DAY_MS;

/**
 * Nothing was sent for so long, as davit was off or nothing happened: whatever failed before tells nothing of these days,
 * and a webhook that fails then fails anew. Longer than a weekend, and than what lies between two of the usual retries.
 */
const FAILS_ANEW_AFTER_MS = 3 * DAY_MS;

/** A delivery whose time has come, with all that sending it takes but the secrets. */
export interface DueDelivery {
  seq: number;
  id: DeliveryId;
  event_id: EventId;
  webhook_id: WebhookId;
  url: string;
  /** When the webhook was last enabled. */
  enabled_at: number;
  payload: string;
  /** Attempts on the ladder that it stands on now. */
  ladder_attempts: number;
  ladder_started_at: number;
  ladder_trigger: Exclude<AttemptTrigger, 'ping'>;
}

/** How a webhook's attempts went, as far as they are recorded. */
export interface AttemptHistory {
  /** When the first of its failures in a row was, with no rest of days between them; null: its last attempt did not fail. */
  failing_since: number | null;
  /** Null: none ever succeeded. */
  last_success_at: number | null;
}

/** A webhook that has something pending: the moment of its first. */
export interface PendingWebhook extends AttemptHistory {
  webhook_id: WebhookId;
  next_attempt_at: number;
}

/** Asks for the next deliveries of one webhook. */
export interface ClaimRequest {
  webhookId: WebhookId;
  /** How many at most. */
  limit: number;
  /** Those that are under way, by seq: pending still, and not to be claimed again. */
  underWay: readonly number[];
  /**
   * Those that were due beyond the last claim, by seq, the first due first. A claim takes from it and fills it; whoever
   * asks keeps it from claim to claim, and empties it when deliveries became due in another order. Those that may not
   * be sent any more are left out of the claim.
   */
  ahead: number[];
}

export interface Claim {
  /** None if the webhook is disabled or deleted. */
  due: DueDelivery[];
  /** What to sign them with, the newest first. */
  secrets: readonly string[];
  /** When the one after these is due; null: there is none, or none that may be sent. */
  nextAtMs: number | null;
}

/** One attempt that was made, and where its delivery stands after it. */
export interface Settlement {
  /** The delivery's. */
  seq: number;
  webhookId: WebhookId;
  /** As it was sent: what came of it says nothing of a webhook with another url, or that was enabled again since. */
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
  ladderAttempts: number;
  ladderStartedAtMs: number;
  /** What of the last five days never passed, as the clock was set ahead. */
  neverPassedMs: number;
  /** Why the webhook is to be disabled with it; null: it is not. */
  disableReason: string | null;
}

/**
 * Where the delivery stands now. `exhausted` also where the settlement plans a retry, and the delivery has had all
 * attempts that it may have; `onNewerLadder`: at the foot of one, due already, as a redelivery or replay was asked for, or
 * its webhook enabled, while the attempt that failed was under way; `gone`: it was pruned meanwhile.
 */
export type Settled = 'pending' | 'delivered' | 'exhausted' | 'onNewerLadder' | 'gone';

/** A failure with which its webhook was disabled, and why. */
export interface SettledLast {
  delivery: Settled;
  disabledFor: string;
}

/** How far the clock was set back, and where to go on. */
interface SetBack {
  byMs: number;
  /** No retry is planned for later than that from now. */
  furthestMs: number;
  /** Null: the beginning. */
  after: PendingPlace | null;
}

/** Where a walk through all that is pending stands: after this delivery, webhook by webhook. */
export interface PendingPlace {
  webhookId: string;
  nextAttemptAtMs: number;
  seq: number;
}

/** Whose retries are hurried, and where to go on. */
interface Hurry {
  webhookId: WebhookId;
  /** Null: the beginning. */
  after: PendingPlace | null;
}

/** Before all that is pending. */
const FIRST_PENDING: PendingPlace = { webhookId: '', nextAttemptAtMs: 0, seq: 0 };

/** One step keeps the writer from others for about 4 ms. All at once, a million took it 3 s and 200 MB. */
const STEP_ROWS = 128;

/** What is to be delivered, and to whom. */
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
           w.failing_since, w.last_success_at
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
  // In the order of the list, which leads. What has changed since it was looked up is not among them.
  const rowsOf = database
    .prepare<[seqs: string, nowMs: number], DeliveryRow>(`
      SELECT d.seq, d.id, d.event_id, e.payload, d.ladder_attempts, d.ladder_started_at, d.ladder_trigger
        FROM json_each(?) wanted
       CROSS JOIN deliveries d ON d.seq = wanted.value AND d.status = 'pending' AND d.next_attempt_at <= +?
       CROSS JOIN events e ON e.id = d.event_id`)
    .raw();
  // Most were never enabled anew: looking through a million retries of such a one took 1.6 s at each start.
  const unhurried = database
    .prepare<{ webhookId: WebhookId; nowMs: number }, number>(`
      SELECT 1 FROM webhooks w
       CROSS JOIN deliveries d ON d.webhook_id = w.id AND d.status = 'pending' AND d.next_attempt_at > +:nowMs
       WHERE w.id = +:webhookId AND w.enabled_at <> w.created_at
         AND d.ladder_started_at < w.enabled_at
       LIMIT 1`)
    .pluck();
  const { recipients } = recipientReads(database);
  const history = database.prepare<[WebhookId], AttemptHistory>(
    'SELECT failing_since, last_success_at FROM webhooks WHERE id = +?',
  );

  return {
    /** The enabled webhooks that have something pending, the first due first. */
    pendingWebhooks: (): PendingWebhook[] => pendingWebhooks.all(),

    /** Whether some of the webhook's retries were not hurried when it was enabled, as davit ended meanwhile. */
    isUnhurried: (webhookId: WebhookId, nowMs: number): boolean =>
      unhurried.get({ webhookId, nowMs }) !== undefined,

    /** Of one that is not there: nothing has happened. */
    history: (webhookId: WebhookId): AttemptHistory =>
      history.get(webhookId) ?? { failing_since: null, last_success_at: null },

    /**
     * For each request the webhook's next deliveries that are due at `nowMs`. Costs 2 to 3 µs for each delivery, with
     * a million pending as with a thousand.
     */
    claim,
  };

  function claim(requests: readonly ClaimRequest[], nowMs: number): Claim[] {
    // One snapshot: the reads agree with each other, and cost a third of what each alone does.
    return inSnapshot(database, () => claimNow(requests, nowMs));
  }

  function claimNow(requests: readonly ClaimRequest[], nowMs: number): Claim[] {
    const found = recipients(
      requests.map(({ webhookId }) => webhookId),
      nowMs,
    );
    const picks = requests.map((request) => ({
      webhookId: request.webhookId,
      // Of what is held nothing is looked up: each of its events comes by here.
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

  /** Which deliveries are next, from what was looked up before or from the index. */
  function pick(request: ClaimRequest, nowMs: number) {
    const { limit, ahead } = request;
    const nextAtMs = ahead.length > limit ? nowMs : readAhead(request, nowMs);
    const seqs = ahead.splice(0, limit);
    return { seqs, nextAtMs: ahead.length > 0 ? nowMs : nextAtMs };
  }

  /** Fills `ahead` anew. Returns when the first that is not in it will be due; null: it has all that there are. */
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
  ladderAttempts: number,
  ladderStartedAt: number,
  ladderTrigger: DueDelivery['ladder_trigger'],
];

function toDueDelivery(
  webhook_id: WebhookId,
  row: DeliveryRow,
  { url, enabledAtMs }: Recipient,
): DueDelivery {
  const [seq, id, event_id, payload, ladderAttempts, ladderStartedAt, ladder_trigger] = row;
  return {
    seq,
    id,
    event_id,
    webhook_id,
    url,
    enabled_at: enabledAtMs,
    payload,
    // What was held while the webhook was disabled begins a new ladder when it is enabled.
    ladder_attempts: ladderStartedAt < enabledAtMs ? 0 : ladderAttempts,
    ladder_started_at: Math.max(ladderStartedAt, enabledAtMs),
    ladder_trigger,
  };
}

/** What came of attempts. */
export function outboxWrites({ database, effects, changed }: WriteContext) {
  const delivered = database.prepare(`
    UPDATE deliveries
       SET status = 'delivered', next_attempt_at = NULL, delivered_at = :atMs, attempt_count = attempt_count + 1,
           ladder_attempts = :ladderAttempts, ladder_started_at = :ladderStartedAtMs
     WHERE seq = +:seq`);
  // However often its webhook is enabled anew, which begins another ladder each time.
  const isSpent = `attempt_count + 1 >= ${ATTEMPTS_MAX}`;
  const missed = database.prepare(`
    UPDATE deliveries
       SET status = iif(${isSpent}, 'exhausted', :status), next_attempt_at = iif(${isSpent}, NULL, :nextAttemptAt),
           attempt_count = attempt_count + 1,
           ladder_attempts = :ladderAttempts, ladder_started_at = :ladderStartedAtMs
     WHERE seq = +:seq AND ladder_started_at <= +:ladderStartedAtMs
       AND (SELECT enabled_at FROM webhooks WHERE id = deliveries.webhook_id) <= +:enabledAtMs`);
  const statusOf = database
    .prepare<[number], 'pending' | 'delivered' | 'exhausted'>('SELECT status FROM deliveries WHERE seq = +?')
    .pluck();
  const counted = database.prepare('UPDATE deliveries SET attempt_count = attempt_count + 1 WHERE seq = +?');
  // The number by a look of its own: RETURNING would have SQLite make a table and keep copies of all that it changes.
  const insertAttempt = database.prepare(`
    INSERT INTO attempts (delivery_id, number, at, status_code, error, duration_ms, remote_address, response_body, trigger)
    SELECT id, attempt_count, :atMs, :statusCode, :error, :durationMs, :remoteAddress, :responseBody, :trigger
      FROM deliveries WHERE seq = +:seq`);
  const stillSentTo = 'id = +:webhookId AND url = +:url AND enabled_at = +:enabledAtMs';
  const succeeded = database.prepare(`
    UPDATE webhooks SET last_success_at = :atMs, consecutive_failures = 0, failing_since = NULL WHERE ${stillSentTo}`);
  const failed = database.prepare(`
    UPDATE webhooks
       SET last_failure_at = :atMs, consecutive_failures = consecutive_failures + 1,
           failing_since = iif(failing_since <= +:atMs
                                 AND last_failure_at >= +:atMs - ${FAILS_ANEW_AFTER_MS} - +:neverPassedMs,
                               failing_since, :atMs)
     WHERE ${stillSentTo}`);
  const disable = database.prepare(`
    UPDATE webhooks SET status = 'disabled', status_reason = :reason
     WHERE ${stillSentTo} AND status = 'enabled'
       AND (+:isAtOnce OR failing_since <= +:atMs - ${DISABLE_AFTER_FAILING_MS} - +:neverPassedMs)`);
  const pendingAfter = database.prepare<PendingPlace, PendingPlace>(`
    SELECT webhook_id AS webhookId, next_attempt_at AS nextAttemptAtMs, seq FROM deliveries
     WHERE status = 'pending' AND (webhook_id, next_attempt_at, seq) > (+:webhookId, +:nextAttemptAtMs, +:seq)
     ORDER BY webhook_id, next_attempt_at, seq
     LIMIT ${STEP_ROWS}`);
  const waitingAfter = database.prepare<PendingPlace, PendingPlace & { wasHeld: number }>(`
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
     * The attempt and what follows from it for the delivery and its webhook, together. Nothing is recorded of a
     * delivery that is gone.
     */
    settle(settlement: Settlement): Settled | SettledLast {
      const { seq, webhookId, url, enabledAtMs, attempt, next } = settlement;
      const atMs = attempt.atMs + attempt.durationMs;
      const settled = settleDelivery(settlement, atMs);
      if (settled === 'gone') return settled;
      insertAttempt.run({ seq, ...attempt });
      changed('settled');
      const receiver = { webhookId, url, enabledAtMs };
      if (next.kind === 'delivered') {
        succeeded.run({ ...receiver, atMs });
        return settled;
      }
      const { neverPassedMs, disableReason } = settlement;
      failed.run({ ...receiver, atMs, neverPassedMs });
      const reason = disableReason ?? 'every delivery failed for 5 days';
      const isAtOnce = disableReason === null ? 0 : 1;
      const { changes } = disable.run({ ...receiver, reason, isAtOnce, atMs, neverPassedMs });
      return changes === 0 ? settled : { delivery: settled, disabledFor: reason };
    },

    /**
     * The clock was set back by so much: what waits is due that much earlier, and what would wait for longer than
     * `furthestMs` now. A step of it; returns where the next one goes on, null: that was all. What is planned earlier
     * lies before its place then, and is not met again.
     */
    setBack({ byMs, furthestMs, after }: SetBack): PendingPlace | null {
      const nowMs = effects.now();
      const places = pendingAfter.all(after ?? FIRST_PENDING);
      for (const { nextAttemptAtMs, seq } of places) {
        if (nextAttemptAtMs <= nowMs) continue;
        const earlierMs = Math.max(nowMs, nextAttemptAtMs - byMs);
        planAt.run({ seq, atMs: earlierMs > nowMs + furthestMs ? nowMs : earlierMs });
      }
      const last = endOfStep(places);
      if (last === null) changed('outbox');
      return last;
    },

    /**
     * The webhook was enabled: what waited for a retry until then is due now, as what arose meanwhile is. What has
     * failed since keeps its time. A step of it, from `after` on, null: the beginning; returns as `setBack` does.
     */
    hurry({ webhookId, after }: Hurry): PendingPlace | null {
      const nowMs = effects.now();
      const places = waitingAfter.all(after ?? { webhookId, nextAttemptAtMs: nowMs, seq: LAST_SEQ });
      for (const { seq, wasHeld } of places) if (wasHeld === 1) planAt.run({ seq, atMs: nowMs });
      changed(webhookId);
      return endOfStep(places);
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
    // The failure does not end the newer ladder.
    return counted.run(seq).changes > 0 ? 'onNewerLadder' : 'gone';
  }
}

const LAST_SEQ = Number.MAX_SAFE_INTEGER;

/** Where to go on after a step through these; null: they are the last. */
function endOfStep(places: readonly PendingPlace[]): PendingPlace | null {
  return places.length === STEP_ROWS ? (places.at(-1) ?? null) : null;
}
