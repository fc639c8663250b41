import { setImmediate as nextTurn } from 'node:timers/promises';
import {
  type Attempt,
  type Delivery,
  type DeliveryId,
  type DeliveryStatus,
  type DeploymentEvent,
  type EventId,
  type EventType,
  optionalTimestamp,
  timestamp,
  type Webhook,
  type WebhookId,
  type WebhookStatus,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import type { WriteContext } from './context.ts';
import { type Database, inSnapshot } from './database.ts';
import type { Caller } from './keys.ts';

/** A delivery with what was sent and everything that came of it. */
export interface DeliveryDetails extends Delivery {
  payload: DeploymentEvent;
  attempts: Attempt[];
}

/** What a list shows; what is null does not narrow it. */
export interface DeliveryFilter {
  statuses: readonly DeliveryStatus[] | null;
  eventTypes: readonly EventType[] | null;
  createdAfterMs: number | null;
  createdBeforeMs: number | null;
}

/** As it is stored: `held` is a pending one of a webhook that is disabled. */
export type StoredStatus = Exclude<DeliveryStatus, 'held'>;

/**
 * The statuses as they are stored, of what is shown with these while the webhook is as it is. None: nothing
 * can be shown so.
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
 * Looking through a long list stops here and lets others have their turn: 2,000 rows take about 1 ms. A
 * filter that fits few of a million costs 0.3 s in all, and never more than that at a time.
 */
export const SLICE_ROWS = 2_000;

interface DeliveryRow {
  seq: number;
  id: DeliveryId;
  event_id: EventId;
  event_type: EventType;
  webhook_id: WebhookId;
  status: StoredStatus;
  attempt_count: number;
  next_attempt_at: number | null;
  created_at: number;
  delivered_at: number | null;
}

type AttemptRow = Omit<Attempt, 'at'> & { at: number };

const DELIVERY_COLUMNS = `
  d.seq, d.id, d.event_id, d.event_type, d.webhook_id, d.status, d.attempt_count, d.next_attempt_at,
  d.created_at, d.delivered_at`;

/** Deliveries as the key sees them that registered their webhook. */
export function deliveryReads(database: Database) {
  const one = `
    SELECT ${DELIVERY_COLUMNS}, w.status AS webhook_status
      FROM deliveries d
      JOIN webhooks w ON w.id = d.webhook_id
     WHERE d.id = +:id AND w.deleted_at IS NULL`;
  type OneRow = DeliveryRow & { webhook_status: WebhookStatus };
  const byId = database.prepare<{ id: string }, OneRow>(one);
  const ofKey = database.prepare<{ id: string; keyId: string }, OneRow>(`${one} AND w.key_id = +:keyId`);
  const payloadOf = database.prepare<[string], string>('SELECT payload FROM events WHERE id = +?').pluck();
  const attemptsOf = database.prepare<[string], AttemptRow>(`
    SELECT number, at, status_code, error, duration_ms, remote_address, response_body, trigger
      FROM attempts WHERE delivery_id = +? ORDER BY number`);
  const sliceEnd = database
    .prepare<{ webhookId: WebhookId; beforeSeq: number }, number>(`
      SELECT seq FROM deliveries
       WHERE webhook_id = +:webhookId AND seq < +:beforeSeq
       ORDER BY seq DESC LIMIT 1 OFFSET ${SLICE_ROWS - 1}`)
    .pluck();
  const slice = database.prepare<Record<string, unknown>, DeliveryRow>(`
    SELECT ${DELIVERY_COLUMNS} FROM deliveries d
     WHERE d.webhook_id = +:webhookId AND d.seq < +:beforeSeq AND d.seq >= +:endSeq
       AND (:statuses IS NULL OR d.status IN (SELECT value FROM json_each(:statuses)))
       AND (:eventTypes IS NULL OR d.event_type IN (SELECT value FROM json_each(:eventTypes)))
       AND (:createdAfterMs IS NULL OR d.created_at > +:createdAfterMs)
       AND (:createdBeforeMs IS NULL OR d.created_at < +:createdBeforeMs)
     ORDER BY d.seq DESC LIMIT :limit`);

  return {
    get(id: string): Delivery | undefined {
      const row = byId.get({ id });
      return row === undefined ? undefined : toDelivery(row, row.webhook_status);
    },

    /** Undefined if its webhook is not the caller's, or is deleted. */
    visibleTo(caller: Caller, id: string): Delivery | undefined {
      const row = ofKey.get({ id, keyId: caller.keyId });
      return row === undefined ? undefined : toDelivery(row, row.webhook_status);
    },

    /** With what was sent and every attempt, all of one moment; undefined as for `visibleTo`. */
    detailsVisibleTo(caller: Caller, id: string): DeliveryDetails | undefined {
      return inSnapshot(database, () => {
        const row = ofKey.get({ id, keyId: caller.keyId });
        return row === undefined ? undefined : toDetails(row);
      });
    },

    /** The webhook's deliveries before `beforeSeq`, newest first, with the seq to go on from. */
    async page(
      webhook: Webhook,
      filter: DeliveryFilter,
      beforeSeq: number,
      limit: number,
    ): Promise<{ seq: number; item: Delivery }[]> {
      const { statuses, eventTypes, createdAfterMs, createdBeforeMs } = filter;
      const stored = statuses === null ? null : storedStatuses(statuses, webhook.status);
      if (stored?.length === 0) return [];
      const parameters = {
        webhookId: webhook.id,
        statuses: stored === null ? null : JSON.stringify(stored),
        eventTypes: eventTypes === null ? null : JSON.stringify(eventTypes),
        createdAfterMs,
        createdBeforeMs,
      };
      const rows: DeliveryRow[] = [];
      for (let before = beforeSeq; ; ) {
        const endSeq = sliceEnd.get({ webhookId: webhook.id, beforeSeq: before }) ?? 0;
        rows.push(...slice.all({ ...parameters, beforeSeq: before, endSeq, limit: limit - rows.length }));
        if (endSeq === 0 || rows.length === limit) break;
        before = endSeq;
        await nextTurn();
      }
      return rows.map((row) => ({ seq: row.seq, item: toDelivery(row, webhook.status) }));
    },
  };

  function toDetails(row: OneRow): DeliveryDetails {
    return {
      ...toDelivery(row, row.webhook_status),
      payload: JSON.parse(payloadOf.get(row.event_id) ?? 'null') as DeploymentEvent,
      attempts: attemptsOf.all(row.id).map((attempt) => ({ ...attempt, at: timestamp(attempt.at) })),
    };
  }
}

/**
 * What puts a delivery at the foot of a new ladder, due at `:at`. It stays the one row of its event and
 * webhook: whichever attempt succeeds first, of this ladder or of the one before, is the last. The ladder begins
 * after any that an attempt under way may belong to, so that its outcome can be told from this one's.
 */
export const REARM = `
  status = 'pending', next_attempt_at = :at, delivered_at = NULL, ladder_attempts = 0,
  ladder_started_at = max(:at, ladder_started_at + 1,
                          (SELECT enabled_at + 1 FROM webhooks WHERE id = deliveries.webhook_id))`;

/** Deliveries begin anew when somebody asks for it. All else is the dispatcher's: see outbox.ts. */
export function deliveryWrites({ database, effects, changed }: WriteContext) {
  const reads = deliveryReads(database);
  const rearm = database.prepare(
    `UPDATE deliveries SET ${REARM}, ladder_trigger = 'redeliver' WHERE id = +:id`,
  );

  return {
    /** Due now, with the whole ladder ahead, whatever became of it before. Throws `not_found`. */
    redeliver({ id }: { id: DeliveryId }): Delivery {
      existing(id);
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

function toDelivery(row: DeliveryRow, webhookStatus: WebhookStatus): Delivery {
  const isHeld = row.status === 'pending' && webhookStatus === 'disabled';
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
