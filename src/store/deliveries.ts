import {
  type Attempt,
  type Delivery,
  type DeliveryId,
  type DeliveryStatus,
  type DeploymentEvent,
  type EventType,
  optionalTimestamp,
  timestamp,
  type Webhook,
  type WebhookId,
  type WebhookStatus,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import { inTurn as inTurnOfThread } from '../turns.ts';
import type { WriteContext } from './context.ts';
import { type Database, inSnapshot } from './database.ts';
import type { Caller } from './keys.ts';
import { type ListPage, pageOf, type Searching, SLICE_ROWS, search } from './list-page.ts';

/** A delivery with its payload and all of its attempts. */
export interface DeliveryDetails extends Delivery {
  payload: DeploymentEvent;
  attempts: Attempt[];
}

/** The filters of a list; null: no such filter. */
export interface DeliveryFilter {
  statuses: readonly DeliveryStatus[] | null;
  eventTypes: readonly EventType[] | null;
  createdAfterMs: number | null;
  createdBeforeMs: number | null;
}

/** The statuses in the table. `held` is not stored: it is a pending delivery of a disabled webhook. */
export type StoredStatus = Exclude<DeliveryStatus, 'held'>;

/**
 * The stored statuses of the deliveries that are shown with one of `statuses`, given the webhook's status. Empty: no
 * delivery of the webhook can be shown with them.
 */
export function storedStatuses(
  statuses: readonly DeliveryStatus[],
  webhookStatus: WebhookStatus,
): StoredStatus[] {
  const waiting = webhookStatus === 'disabled' ? 'held' : 'pending';
  return statuses.flatMap((status): StoredStatus[] => {
    if (status === 'delivered' || status === 'exhausted') return [status];
    return status === waiting ? ['pending'] : [];
  });
}

/**
 * After this many attempts a delivery is not sent again. A key could cause 36,000 within an hour, and each read of such
 * a delivery delayed all other requests by 0.4 s.
 */
export const ATTEMPTS_MAX = 1_000;

/**
 * Response bodies are shown for this many of a delivery's attempts, the latest. The default ladder has 11 attempts; with
 * the bodies of 100 one answer had 2.6 MB, and with those of a thousand it would have 24 MB.
 */
export const BODIES_SHOWN_MAX = 20;

interface DeliveryRow extends Omit<Delivery, 'status' | 'next_attempt_at' | 'created_at' | 'delivered_at'> {
  status: StoredStatus;
  next_attempt_at: number | null;
  created_at: number;
  delivered_at: number | null;
  webhook_status: WebhookStatus;
}

type AttemptRow = Omit<Attempt, 'at'> & { at: number };

/** Deliveries, as the key that registered their webhook sees them. */
export function deliveryReads(database: Database, searching: Searching = {}) {
  const { inTurn = inTurnOfThread } = searching;
  const rows = `
    SELECT d.id, d.event_id, d.event_type, d.webhook_id, d.status, d.attempt_count, d.next_attempt_at,
           d.created_at, d.delivered_at, w.status AS webhook_status
      FROM deliveries d
      JOIN webhooks w ON w.id = d.webhook_id`;
  const one = `${rows} WHERE d.id = +:id AND w.deleted_at IS NULL`;
  const byId = database.prepare<{ id: string }, DeliveryRow>(one);
  const ofKey = database.prepare<{ id: string; keyId: string }, DeliveryRow>(`${one} AND w.key_id = +:keyId`);
  const bySeqs = database.prepare<{ seqs: string }, DeliveryRow>(`
    ${rows} WHERE d.seq IN (SELECT value FROM json_each(:seqs)) ORDER BY d.seq DESC`);
  const payloadOf = database.prepare<[string], string>('SELECT payload FROM events WHERE id = +?').pluck();
  const attemptsOf = database.prepare<{ id: DeliveryId; bodiesAfter: number }, AttemptRow>(`
    SELECT number, at, status_code, error, duration_ms, remote_address,
           CASE WHEN number > +:bodiesAfter THEN response_body END AS response_body, trigger
      FROM attempts WHERE delivery_id = +:id ORDER BY number`);
  const lastResult = database
    .prepare<[string], string | number>(
      'SELECT coalesce(error, status_code) FROM attempts WHERE delivery_id = +? ORDER BY number DESC LIMIT 1',
    )
    .pluck();
  const sliceEnd = database
    .prepare<{ webhookId: WebhookId; beforeSeq: number }, number>(`
      SELECT seq FROM deliveries
       WHERE webhook_id = +:webhookId AND seq < +:beforeSeq
       ORDER BY seq DESC LIMIT 1 OFFSET ${SLICE_ROWS - 1}`)
    .pluck();
  const sliceOf = (from: string, where: string) =>
    database.prepare<Record<string, unknown>, { seq: number }>(`
      SELECT d.seq FROM ${from}
       WHERE d.webhook_id = +:webhookId AND d.seq < +:beforeSeq AND d.seq >= +:endSeq AND ${where}
         AND (:eventTypes IS NULL OR d.event_type IN (SELECT value FROM json_each(:eventTypes)))
         AND (:createdAfterMs IS NULL OR d.created_at > +:createdAfterMs)
         AND (:createdBeforeMs IS NULL OR d.created_at < +:createdBeforeMs)
       ORDER BY d.seq DESC LIMIT :limit + 1`);
  const slice = sliceOf(
    'deliveries d',
    '(:statuses IS NULL OR d.status IN (SELECT value FROM json_each(:statuses)))',
  );
  // All of them, each time sorted: with an index in the order of the list, creating and ending a delivery would take more
  // than a third longer.
  const pendingSlice = sliceOf('deliveries d INDEXED BY deliveries_pending', "d.status = 'pending'");
  const manyPending = database
    .prepare<[WebhookId], number>(`
      SELECT 1 FROM deliveries WHERE webhook_id = +? AND status = 'pending' LIMIT 1 OFFSET ${SLICE_ROWS}`)
    .pluck();

  return {
    get(id: string): Delivery | undefined {
      const row = byId.get({ id });
      return row && toDelivery(row);
    },

    /** Undefined if its webhook is not the caller's, or is deleted. */
    visibleTo(caller: Caller, id: string): Delivery | undefined {
      const row = ofKey.get({ id, keyId: caller.keyId });
      return row && toDelivery(row);
    },

    /** With the payload and all attempts, in one snapshot; undefined as for `visibleTo`. */
    detailsVisibleTo(caller: Caller, id: string): DeliveryDetails | undefined {
      return inSnapshot(database, () => {
        const row = ofKey.get({ id, keyId: caller.keyId });
        return row && toDetails(row);
      });
    },

    /** The result of a delivery's last attempt: a status code or an error; null before the first attempt. */
    lastResult(id: DeliveryId): string | null {
      const result = lastResult.get(id);
      return result === undefined ? null : String(result);
    },

    /** The webhook's deliveries before `beforeSeq`, at most `limit`, read in the caller's turns. */
    async page(
      { keyId }: Caller,
      webhook: Webhook,
      filter: DeliveryFilter,
      beforeSeq: number,
      limit: number,
    ): Promise<ListPage<Delivery>> {
      const { statuses, eventTypes, createdAfterMs, createdBeforeMs } = filter;
      const stored = statuses === null ? null : storedStatuses(statuses, webhook.status);
      if (stored?.length === 0) return { items: [], goOnAt: null };
      const isPendingOnly = stored?.every((status) => status === 'pending') ?? false;
      const parameters = {
        webhookId: webhook.id,
        statuses: stored === null ? null : JSON.stringify(stored),
        eventTypes: eventTypes === null ? null : JSON.stringify(eventTypes),
        createdAfterMs,
        createdBeforeMs,
      };
      const found = await search(
        (before, wanted) => {
          // A million others take 260 ms. Many pending ones are searched for like other statuses, in slices.
          if (isPendingOnly && manyPending.get(webhook.id) === undefined) {
            const toEnd = { beforeSeq: before, endSeq: 0, limit: wanted };
            return { rows: pendingSlice.all({ ...parameters, ...toEnd }), endSeq: null };
          }
          const endSeq = sliceEnd.get({ webhookId: webhook.id, beforeSeq: before }) ?? null;
          const within = { beforeSeq: before, endSeq: endSeq ?? 0, limit: wanted };
          return { rows: slice.all({ ...parameters, ...within }), endSeq };
        },
        keyId,
        beforeSeq,
        limit,
        searching,
      );
      const { items: seqs, goOnAt } = pageOf(found.rows, limit, ({ seq }) => seq);
      // Read again, with the webhook's status now: by the end of a search it may be another one than at its beginning.
      const read = await inTurn(() => bySeqs.all({ seqs: JSON.stringify(seqs) }), keyId);
      const items = read.map(toDelivery).filter(({ status }) => statuses?.includes(status) ?? true);
      return { items, goOnAt: goOnAt ?? found.endSeq };
    },
  };

  function toDetails(row: DeliveryRow): DeliveryDetails {
    return {
      ...toDelivery(row),
      payload: JSON.parse(payloadOf.get(row.event_id) ?? 'null') as DeploymentEvent,
      attempts: attemptsOf
        .all({ id: row.id, bodiesAfter: row.attempt_count - BODIES_SHOWN_MAX })
        .map((attempt) => ({ ...attempt, at: timestamp(attempt.at) })),
    };
  }
}

/**
 * The assignments of an UPDATE that begins a new ladder for a delivery, due at `:at`. There is still one row for the
 * event and the webhook: the first attempt that succeeds, of the new ladder or an earlier one, ends both.
 * `ladder_started_at` is later than that of any earlier ladder, so that the result of an attempt that is under way is
 * not taken for one of the new ladder.
 */
export const REARM = `
  status = 'pending', next_attempt_at = :at, delivered_at = NULL, ladder_attempts = 0,
  ladder_started_at = max(:at, ladder_started_at + 1,
                          (SELECT enabled_at + 1 FROM webhooks WHERE id = deliveries.webhook_id))`;

/** Redeliveries, which users request. The dispatcher's writes are in settlements.ts. */
export function deliveryWrites({ database, effects, changed }: WriteContext) {
  const reads = deliveryReads(database);
  const rearm = database.prepare(
    `UPDATE deliveries SET ${REARM}, ladder_trigger = 'redeliver' WHERE id = +:id`,
  );

  return {
    /**
     * Makes the delivery due now, on a new ladder, whatever its status. Throws `not_found`, and `conflict` if it
     * already has `ATTEMPTS_MAX` attempts.
     */
    redeliver({ id }: { id: DeliveryId }): Delivery {
      if (existing(id).attempt_count >= ATTEMPTS_MAX) {
        throw new AppError(
          'conflict',
          `the delivery has ${ATTEMPTS_MAX} attempts already: it is not sent again`,
        );
      }
      rearm.run({ id, at: effects.now() });
      changed('outbox');
      return existing(id);
    },
  };

  function existing(id: string): Delivery {
    const delivery = reads.get(id);
    if (delivery === undefined) throw new AppError('not_found', 'there is no such delivery');
    return delivery;
  }
}

function toDelivery(row: DeliveryRow): Delivery {
  const isHeld = row.status === 'pending' && row.webhook_status === 'disabled';
  return {
    id: row.id,
    event_id: row.event_id,
    event_type: row.event_type,
    webhook_id: row.webhook_id,
    status: isHeld ? 'held' : row.status,
    attempt_count: row.attempt_count,
    next_attempt_at: isHeld ? null : optionalTimestamp(row.next_attempt_at),
    created_at: timestamp(row.created_at),
    delivered_at: optionalTimestamp(row.delivered_at),
  };
}
