import {
  type DeliveryStatus,
  type KeyId,
  type Timestamp,
  timestamp,
  type Webhook,
  type WebhookId,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import { inSpareTurn as inSpareTurnOfThread } from '../turns.ts';
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';
import { ATTEMPTS_MAX, REARM, type StoredStatus, storedStatuses } from './deliveries.ts';
import { SLICE_ROWS } from './list-page.ts';
import { webhookReads } from './webhooks.ts';

/** Which deliveries of a webhook a replay sends again: those created from `sinceMs` to `untilMs`, both inclusive. */
export interface ReplaySelection {
  webhookId: WebhookId;
  sinceMs: number;
  untilMs: number;
  /** Null: any status. */
  storedStatus: StoredStatus | null;
  /** When the replay was requested: see `Latest`. */
  lastSeq: number;
}

export interface NewReplay extends ReplaySelection, Latest {
  /** The requested status, only for the response. */
  status: DeliveryStatus | null;
  /** How many deliveries are selected; or of what there are too many replays, so that they were not counted. */
  count: number | TooMany;
}

/** What there is when a replay is requested: clocks, which can be set, do not tell what came later. */
interface Latest {
  /** The seq of the webhook's last delivery; 0: it has none. */
  lastSeq: number;
  /** The rowid of the last attempt of all; 0: there is none. */
  lastAttempt: number;
}

/** `ofWebhook`: open ones; `ofKey`: those that are being counted. */
type TooMany = 'ofWebhook' | 'ofKey';

/** The response to the request for a replay. */
export interface Replay {
  webhook_id: WebhookId;
  since: Timestamp;
  until: Timestamp;
  status: DeliveryStatus | null;
  /** How many deliveries were selected when it was requested. */
  count: number;
}

/** An unfinished replay, the oldest one of its webhook. */
export interface OpenReplay extends ReplaySelection {
  seq: number;
  /** Deliveries up to this one have begun their new ladder. */
  doneSeq: number;
}

/** A slice of a webhook's deliveries, in the order of seq. */
interface ReplaySlice {
  /** The selected deliveries in it. */
  seqs: number[];
  /** The last delivery that was scanned; null: there are none after these. */
  endSeq: number | null;
}

/** How many replays of one webhook may be open at a time. */
const OPEN_REPLAYS_MAX = 10;

/** How many replays of one key are counted at a time: 600 at once, for 60 webhooks, took 27 s. */
const COUNTED_OF_KEY_MAX = 10;

/** Unfinished replays, and the deliveries that they select. */
export function replayReads(database: Database, { inSpareTurn = inSpareTurnOfThread } = {}) {
  const fits = `
    created_at BETWEEN +:sinceMs AND +:untilMs AND (:storedStatus IS NULL OR status = +:storedStatus)
    AND attempt_count < ${ATTEMPTS_MAX}`;
  const isFull = fullness(database);
  const webhooks = webhookReads(database);
  /** Replays whose deliveries are being counted; without a key, the webhook was deleted. */
  const counting = new Set<{ keyId: KeyId | undefined }>();
  const latest = database.prepare<[WebhookId], Latest>(`
    SELECT coalesce((SELECT max(seq) FROM deliveries WHERE webhook_id = +?), 0) AS lastSeq,
           coalesce((SELECT max(rowid) FROM attempts), 0) AS lastAttempt`);
  const sliceEnd = database
    .prepare<{ webhookId: WebhookId; afterSeq: number; lastSeq: number }, number>(`
      SELECT seq FROM deliveries
       WHERE webhook_id = +:webhookId AND seq > +:afterSeq AND seq < +:lastSeq
       ORDER BY seq LIMIT 1 OFFSET ${SLICE_ROWS - 1}`)
    .pluck();
  const within = 'webhook_id = +:webhookId AND seq > +:afterSeq AND seq <= +:endSeq';
  type Within = ReplaySelection & { afterSeq: number; endSeq: number };
  const countWithin = database
    .prepare<Within, number>(`SELECT count(*) FROM deliveries WHERE ${within} AND ${fits}`)
    .pluck();
  const seqsWithin = database
    .prepare<Within & { limit: number }, number>(`
      SELECT seq FROM deliveries WHERE ${within} AND ${fits} ORDER BY seq LIMIT :limit`)
    .pluck();
  const openOnes = database.prepare<[], OpenReplay>(`
    SELECT r.seq, r.webhook_id AS webhookId, r.since AS sinceMs, r.until AS untilMs,
           r.delivery_status AS storedStatus, r.last_seq AS lastSeq, r.done_seq AS doneSeq
      FROM (SELECT min(seq) AS seq FROM replays WHERE finished_at IS NULL GROUP BY webhook_id) AS first
      JOIN replays r ON r.seq = first.seq
      JOIN webhooks w ON w.id = r.webhook_id
     WHERE w.status = 'enabled'
     ORDER BY r.seq`);
  const dueAtPosition = database
    .prepare<{ webhookId: WebhookId; nowMs: number; offset: number }, number>(`
      SELECT 1 FROM deliveries
       WHERE webhook_id = +:webhookId AND status = 'pending' AND next_attempt_at <= +:nowMs
       LIMIT 1 OFFSET :offset`)
    .pluck();

  return {
    /**
     * The input of `replays.create` for the deliveries of a webhook that were created from `sinceMs` to `untilMs` and,
     * unless `status` is null, are shown with that status now. `latest`: what there was when it was requested. Counts
     * them unless the webhook or its key has too many replays.
     */
    async plan(
      webhook: Webhook,
      { sinceMs, untilMs, status }: { sinceMs: number; untilMs: number; status: DeliveryStatus | null },
      latest = latestOf(webhook.id),
    ): Promise<NewReplay> {
      const [storedStatus = null] = status === null ? [] : storedStatuses([status], webhook.status);
      const selection = { webhookId: webhook.id, sinceMs, untilMs, storedStatus, ...latest };
      const fitsNothing = status !== null && storedStatus === null;
      return { ...selection, status, count: fitsNothing ? 0 : await countUnlessTooMany(selection) };
    },

    latest: latestOf,

    /** How many deliveries are selected. Scans all of the webhook's, in slices; a million take a third of a second. */
    count,

    /** The oldest open replay of each enabled webhook, the oldest first. Replays of disabled webhooks wait. */
    open: (): OpenReplay[] => openOnes.all(),

    /** At most `limit` of the selected deliveries after `afterSeq`. */
    slice(replay: OpenReplay, afterSeq: number, limit: number): ReplaySlice {
      const endSeq = endOfSlice(replay, afterSeq);
      const seqs = seqsWithin.all({ ...replay, afterSeq, endSeq, limit });
      const lastLookedAt = seqs.length === limit ? (seqs.at(-1) ?? endSeq) : endSeq;
      return { seqs, endSeq: lastLookedAt >= replay.lastSeq ? null : lastLookedAt };
    },

    /** Whether at least `count` deliveries of the webhook are due. */
    isBusy: (webhookId: WebhookId, nowMs: number, count: number): boolean =>
      dueAtPosition.get({ webhookId, nowMs, offset: count - 1 }) !== undefined,
  };

  function latestOf(webhookId: WebhookId): Latest {
    return latest.get(webhookId) ?? { lastSeq: 0, lastAttempt: 0 };
  }

  /** Counts for no more requests than can be granted: 600 at once counted 200,000 deliveries each, for 72 s. */
  async function countUnlessTooMany(selection: ReplaySelection): Promise<NewReplay['count']> {
    const { webhookId } = selection;
    if (isFull(webhookId)) return 'ofWebhook';
    const own = { keyId: webhooks.addressOf(webhookId)?.keyId };
    const ofKey = [...counting].filter(({ keyId }) => keyId === own.keyId);
    if (ofKey.length >= COUNTED_OF_KEY_MAX) return 'ofKey';
    counting.add(own);
    try {
      return await count(selection);
    } finally {
      counting.delete(own);
    }
  }

  async function count(selection: ReplaySelection): Promise<number> {
    const keyId = webhooks.addressOf(selection.webhookId)?.keyId ?? null;
    let count = 0;
    for (let afterSeq = 0; ; ) {
      const from = afterSeq;
      afterSeq = await inSpareTurn(() => {
        const endSeq = endOfSlice(selection, from);
        count += countWithin.get({ ...selection, afterSeq: from, endSeq }) ?? 0;
        return endSeq;
      }, keyId);
      if (afterSeq === selection.lastSeq) return count;
    }
  }

  function endOfSlice({ webhookId, lastSeq }: ReplaySelection, afterSeq: number): number {
    return sliceEnd.get({ webhookId, afterSeq, lastSeq }) ?? lastSeq;
  }
}

/** Returns a function that tells whether a webhook has as many open replays as it may. */
function fullness(database: Database): (webhookId: WebhookId) => boolean {
  const countOpen = database
    .prepare<[string], number>('SELECT count(*) FROM replays WHERE webhook_id = +? AND finished_at IS NULL')
    .pluck();
  return (webhookId) => (countOpen.get(webhookId) ?? 0) >= OPEN_REPLAYS_MAX;
}

/** Creates replays, and carries them out in steps. */
export function replayWrites({ database, effects, changed }: WriteContext) {
  const webhooks = webhookReads(database);
  const isFull = fullness(database);
  // While the deliveries were counted, retention may have removed the last attempts: the next ones get their rowids.
  const insert = database.prepare(`
    INSERT INTO replays (webhook_id, since, until, delivery_status, last_seq, created_at, last_attempt)
    VALUES (:webhookId, :sinceMs, :untilMs, :storedStatus, :lastSeq, :at,
            min(:lastAttempt, (SELECT coalesce(max(rowid), 0) FROM attempts)))`);
  const openReplay = database.prepare<
    [number],
    { webhook_id: WebhookId; delivery_status: StoredStatus | null; last_attempt: number }
  >(`
    SELECT webhook_id, delivery_status, last_attempt FROM replays WHERE seq = +? AND finished_at IS NULL`);
  // A success is the last attempt of its delivery.
  const rearm = database.prepare(`
    UPDATE deliveries SET ${REARM}, ladder_trigger = 'replay'
     WHERE seq IN (SELECT value FROM json_each(:seqs)) AND webhook_id = +:webhookId
       AND (:storedStatus IS NULL OR status = +:storedStatus) AND attempt_count < ${ATTEMPTS_MAX}
       AND NOT (status = 'delivered'
                AND EXISTS (SELECT 1 FROM attempts a
                             WHERE a.delivery_id = deliveries.id AND a.number = deliveries.attempt_count
                               AND a.rowid > +:lastAttempt))`);
  const advance = database.prepare(
    'UPDATE replays SET done_seq = max(done_seq, :doneSeq), finished_at = :finishedAt WHERE seq = +:seq',
  );

  return {
    /**
     * Has the selected deliveries sent again, each on a new ladder. Throws `not_found`, `conflict` if the webhook's key
     * was revoked, and `rate_limited` if there are too many replays.
     */
    create({ status, count, ...replay }: NewReplay): Replay {
      const { webhookId, sinceMs, untilMs } = replay;
      const webhook = webhooks.get(webhookId);
      if (webhook === undefined) throw new AppError('not_found', 'there is no such webhook');
      webhooks.refuseOfRevokedKey(webhookId);
      if (typeof count === 'string') throw tooMany(count, webhook);
      if (count > 0 && isFull(webhookId)) throw tooMany('ofWebhook', webhook);
      if (count > 0) {
        insert.run({ ...replay, at: effects.now() });
        changed('outbox');
      }
      return { webhook_id: webhookId, since: timestamp(sinceMs), until: timestamp(untilMs), status, count };
    },

    /**
     * Begins a new ladder for these deliveries, and records the replay's progress; `doneSeq` null: it is finished.
     * Skips deliveries that are no longer selected, and those that succeeded since the request: what was held, or
     * waited for its first attempt, would be sent twice. Does nothing if the replay was ended meanwhile.
     */
    step({ seq, seqs, doneSeq }: { seq: number; seqs: number[]; doneSeq: number | null }): void {
      const replay = openReplay.get(seq);
      if (replay === undefined) return;
      const at = effects.now();
      rearm.run({
        seqs: JSON.stringify(seqs),
        webhookId: replay.webhook_id,
        storedStatus: replay.delivery_status,
        lastAttempt: replay.last_attempt,
        at,
      });
      advance.run({ seq, doneSeq: doneSeq ?? 0, finishedAt: doneSeq === null ? at : null });
      changed('outbox');
    },
  };
}

const RETRY_AFTER_SECONDS = 30;

function tooMany(which: TooMany, { status }: Webhook): AppError {
  const replays = which === 'ofKey' ? 'of this key are being counted' : 'of this webhook are open';
  const areHeld = which === 'ofWebhook' && status === 'disabled';
  const remedy = areHeld ? 'they wait until it is enabled' : 'wait for them';
  return new AppError('rate_limited', `too many replays ${replays}: ${remedy}`, {
    retryAfterSeconds: RETRY_AFTER_SECONDS,
  });
}
