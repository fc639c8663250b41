import type { DeliveryId, DeploymentId, EventId, WebhookId } from '../domain.ts';
import { HOUR_MS } from '../durations.ts';
import type { WriteContext } from './context.ts';
import { pragmaNumber, type Statement } from './database.ts';
import { walBytesOf } from './wal.ts';

/*
 * What is finished is removed after a while; what is unfinished never is, however old it may be:
 *
 *   deployments  that finished longer ago than the retention, with their logs; except the one of each project that
 *                succeeded last, which is the DEPLOY_PREVIOUS_REF of the next
 *   deliveries   that were delivered or exhausted longer ago than that, with their attempts. Pending ones stay, even
 *                those of a webhook that has long been disabled: davit promises to hold them until the webhook is enabled
 *                or deleted. So do those that an open replay has yet to send.
 *   events       older than that, once no delivery refers to them
 *
 * and, independently of the retention:
 *
 *   deleted webhooks   with all their deliveries, pending ones too
 *   idempotency keys   after 72 h, those of a revoked key sooner: nobody can repeat its requests, and some answers hold
 *                      signing secrets
 *   finished replays and expired secrets, which nothing reads any more
 */

/** In the order of their first turns: referring rows before those that they refer to. */
export const PRUNED = [
  'idempotencyKeys',
  'replays',
  'secrets',
  'deletedWebhooks',
  'deployments',
  'events',
  'unusedPages',
] as const;
export type Pruned = (typeof PRUNED)[number];

/** The keyset position where a step begins: with this row, or the first one after it. */
export interface PrunePosition {
  atMs: number;
  seq: number;
  /** Where to begin among the deliveries of the event with this seq. */
  deliverySeq: number;
}

/** Before all rows. */
export const START: PrunePosition = { atMs: 0, seq: 0, deliverySeq: 0 };

export interface PruneStep {
  what: Pruned;
  from: PrunePosition;
  /** What expires after this time is left to the next pass: under load a pass would otherwise never end. */
  untilMs: number;
  /** How long deployments, events and deliveries are kept once they are finished; null: for ever. */
  retentionMs: number | null;
  /** How long the step works. It removes or scans something, however short that is. */
  workMs: number;
}

export interface PruneResult {
  /** How many rows of each kind were removed; `logBytes` and `fileBytes`: how many bytes were freed. */
  removed: Removed;
  /** Where the next step continues; null: nothing of this kind is left. */
  next: PrunePosition | null;
  walBytes: number;
}

export type Removed = Partial<
  Record<
    | 'idempotencyKeys'
    | 'replays'
    | 'secrets'
    | 'webhooks'
    | 'deployments'
    | 'logBytes'
    | 'events'
    | 'deliveries'
    | 'attempts'
    | 'fileBytes',
    number
  >
>;

/** How long the answers to idempotent requests are kept; 24 h are promised. */
const IDEMPOTENCY_MEMORY_MS = 72 * HOUR_MS;

/**
 * How many rows are read at once, or removed by one statement, between two looks at the clock. With 64, removing
 * deliveries took a twentieth less.
 */
const PORTION = 16;

/**
 * How many unused pages stay in the file: an eighth of those in use, at least 4 MiB. New rows will need them, and
 * shrinking the file first would only move pages.
 */
const UNUSED_SHARE = 1 / 8;
const UNUSED_PAGES_MIN = 1_024;

/** What a step has removed, and when it ends, on the monotonic clock. */
interface Work {
  removed: Removed;
  untilMs: number;
}

/** Removes what has expired, in steps that last as long as they are told to. */
export function retentionWrites({ database, effects }: WriteContext) {
  const forgetAnswers = database.prepare(`
    DELETE FROM idempotency_keys
     WHERE rowid IN (SELECT rowid FROM idempotency_keys WHERE created_at < +:beforeMs ORDER BY created_at LIMIT ${PORTION})`);
  // The next four scan whole tables, which are small: rows are created by users, and those of the last three removed here
  // when finished.
  const forgetAnswersToRevoked = database.prepare(`
    DELETE FROM idempotency_keys
     WHERE rowid IN (SELECT idempotency_keys.rowid
                       FROM keys CROSS JOIN idempotency_keys ON idempotency_keys.key_id = keys.id
                      WHERE keys.revoked_at IS NOT NULL LIMIT ${PORTION})`);
  const removeReplays = database.prepare(`
    DELETE FROM replays WHERE seq IN (SELECT seq FROM replays WHERE finished_at IS NOT NULL LIMIT ${PORTION})`);
  const removeSigningSecrets = database.prepare(`
    DELETE FROM webhook_secrets
     WHERE (webhook_id, secret) IN (SELECT webhook_id, secret FROM webhook_secrets WHERE expires_at <= +:nowMs LIMIT ${PORTION})`);
  const removeKeySecrets = database.prepare(`
    DELETE FROM key_secrets WHERE hash IN (SELECT hash FROM key_secrets WHERE expires_at <= +:nowMs LIMIT ${PORTION})`);

  const deletedWebhook = database.prepare<{ seq: number; nowMs: number }, { seq: number; id: WebhookId }>(
    'SELECT seq, id FROM webhooks WHERE deleted_at <= +:nowMs AND seq >= +:seq ORDER BY seq LIMIT 1',
  );
  const deliveriesOfWebhook = database.prepare<[WebhookId], { seq: number; id: DeliveryId }>(
    `SELECT seq, id FROM deliveries WHERE webhook_id = +? ORDER BY seq LIMIT ${PORTION}`,
  );
  const removeWebhook = database.prepare(`
    DELETE FROM webhooks
     WHERE seq = +:seq AND NOT EXISTS (SELECT 1 FROM replays WHERE replays.webhook_id = webhooks.id)`);

  const oldDeployments = database.prepare<
    FromPosition,
    { seq: number; id: DeploymentId; at: number; is_needed: number }
  >(
    inOrderOfAge(
      'deployments d',
      'finished_at',
      `seq, id, finished_at AS at,
       status = 'succeeded' AND NOT EXISTS (
         SELECT 1 FROM deployments later
          WHERE later.project_id = +d.project_id AND later.status = 'succeeded' AND later.seq > d.seq) AS is_needed`,
    ),
  );
  const chunksOf = database.prepare<[DeploymentId], LogChunk>(`
    SELECT rowid AS chunk, length(bytes) AS byte_count FROM log_chunks
     WHERE deployment_id = +? ORDER BY start LIMIT ${PORTION}`);
  const removeChunk = database.prepare('DELETE FROM log_chunks WHERE rowid = +?');
  const removeDeployment = database.prepare('DELETE FROM deployments WHERE id = +?');

  const oldEvents = database.prepare<FromPosition, { seq: number; id: EventId; at: number }>(
    inOrderOfAge('events', 'created_at', 'seq, id, created_at AS at'),
  );
  // Only its last attempt tells when an exhausted delivery ended. For `+d.webhook_id` see database.ts.
  const deliveriesOfEvent = database.prepare<
    { eventId: EventId; fromSeq: number; beforeMs: number },
    { seq: number; id: DeliveryId; is_over: number }
  >(`
    SELECT d.seq, d.id,
           d.status <> 'pending'
           AND max(d.ladder_started_at, coalesce(d.delivered_at, 0),
                   coalesce((SELECT a.at FROM attempts a
                              WHERE a.delivery_id = d.id AND a.number = d.attempt_count), 0)) < +:beforeMs
           AND NOT EXISTS (SELECT 1 FROM replays r
                            WHERE r.webhook_id = +d.webhook_id AND r.finished_at IS NULL
                              AND d.seq > r.done_seq AND d.seq <= r.last_seq
                              AND d.created_at BETWEEN r.since AND r.until) AS is_over
      FROM deliveries d
     WHERE d.event_id = +:eventId AND d.seq >= +:fromSeq
     ORDER BY d.seq LIMIT ${PORTION}`);
  // Of one delivery all at once: ATTEMPTS_MAX bounds them. A LIMIT needs a subquery, and so a temporary table for each
  // delivery: removing one with its attempt took 26 µs, like this 14.
  const removeAttempts = database.prepare('DELETE FROM attempts WHERE delivery_id = +?');
  const removeDelivery = database.prepare('DELETE FROM deliveries WHERE seq = +?');
  // The next attempt gets the rowid after the last one that is left.
  const forgetLastAttempt = database.prepare(`
    UPDATE replays SET last_attempt = (SELECT coalesce(max(rowid), 0) FROM attempts)
     WHERE finished_at IS NULL AND last_attempt > (SELECT coalesce(max(rowid), 0) FROM attempts)`);
  const removeEvent = database.prepare(`
    DELETE FROM events
     WHERE seq = +? AND NOT EXISTS (SELECT 1 FROM deliveries WHERE deliveries.event_id = events.id)`);

  return {
    /**
     * Removes some of what has expired, until its time is over. A step can be repeated, after a restart for instance.
     */
    step({ what, from, untilMs, retentionMs, workMs }: PruneStep): PruneResult {
      const work: Work = { removed: {}, untilMs: effects.monotonicMs() + workMs };
      const next = prune(what, from, Math.min(untilMs, effects.now()), retentionMs, work);
      if (work.removed.attempts !== undefined) forgetLastAttempt.run();
      return { removed: work.removed, next, walBytes: walBytesOf(database.name) };
    },
  };

  function prune(
    what: Pruned,
    from: PrunePosition,
    nowMs: number,
    retentionMs: number | null,
    work: Work,
  ): PrunePosition | null {
    switch (what) {
      case 'idempotencyKeys': {
        const beforeMs = nowMs - IDEMPOTENCY_MEMORY_MS;
        return (
          removeAll(work, what, () => forgetAnswers.run({ beforeMs })) ??
          removeAll(work, what, () => forgetAnswersToRevoked.run())
        );
      }
      case 'replays':
        return removeAll(work, what, () => removeReplays.run());
      case 'secrets':
        return (
          removeAll(work, what, () => removeSigningSecrets.run({ nowMs })) ??
          removeAll(work, what, () => removeKeySecrets.run({ nowMs }))
        );
      case 'deletedWebhooks':
        return pruneDeletedWebhooks(from, nowMs, work);
      case 'deployments':
        return retentionMs === null ? null : pruneDeployments(from, nowMs - retentionMs, work);
      case 'events':
        return retentionMs === null ? null : pruneEvents(from, nowMs - retentionMs, work);
      case 'unusedPages':
        return freePages(work);
      default:
        return what satisfies never;
    }
  }

  /** Calls `removeSome` until no row is left or the step's time is over. */
  function removeAll(
    work: Work,
    kind: keyof Removed,
    removeSome: () => { changes: number },
  ): PrunePosition | null {
    for (;;) {
      const { changes } = removeSome();
      count(work, kind, changes);
      if (changes < PORTION) return null;
      if (isOver(work)) return START;
    }
  }

  function pruneDeletedWebhooks(from: PrunePosition, nowMs: number, work: Work): PrunePosition | null {
    for (let { seq } = from; ; ) {
      const webhook = deletedWebhook.get({ seq, nowMs });
      if (webhook === undefined) return null;
      const read = () => deliveriesOfWebhook.all(webhook.id);
      if (!removeEach(read, removeWithAttempts, work)) return { ...START, seq: webhook.seq };
      count(work, 'webhooks', removeWebhook.run({ seq: webhook.seq }).changes);
      seq = webhook.seq + 1;
      if (isOver(work)) return { ...START, seq };
    }
  }

  function pruneDeployments(from: PrunePosition, beforeMs: number, work: Work): PrunePosition | null {
    return walk(oldDeployments, from, beforeMs, work, ({ seq, id, at, is_needed }) =>
      is_needed === 1 || removeWithLog(id, work) ? null : { ...START, atMs: at, seq },
    );
  }

  /** Removes a deployment with its log; false: the step's time was over before. */
  function removeWithLog(id: DeploymentId, work: Work): boolean {
    if (!removeEach(() => chunksOf.all(id), removeChunkOfLog, work)) return false;
    count(work, 'deployments', removeDeployment.run(id).changes);
    return true;
  }

  function removeChunkOfLog({ chunk, byte_count }: LogChunk, work: Work): void {
    removeChunk.run(chunk);
    count(work, 'logBytes', byte_count);
  }

  function pruneEvents(from: PrunePosition, beforeMs: number, work: Work): PrunePosition | null {
    return walk(oldEvents, from, beforeMs, work, ({ seq, id, at }) => {
      const deliverySeq = pruneDeliveriesOf(id, seq === from.seq ? from.deliverySeq : 0, beforeMs, work);
      if (deliverySeq !== null) return { atMs: at, seq, deliverySeq };
      count(work, 'events', removeEvent.run(seq).changes);
      return null;
    });
  }

  /** Where to continue, if the step's time is over; null: all were scanned, and the event may be removed, too. */
  function pruneDeliveriesOf(eventId: EventId, from: number, beforeMs: number, work: Work): number | null {
    for (let fromSeq = from; ; ) {
      const deliveries = deliveriesOfEvent.all({ eventId, fromSeq, beforeMs });
      for (const delivery of deliveries) {
        if (delivery.is_over === 1) removeWithAttempts(delivery, work);
        fromSeq = delivery.seq + 1;
        if (isOver(work)) return fromSeq;
      }
      if (deliveries.length < PORTION) return null;
    }
  }

  function removeWithAttempts({ seq, id }: { seq: number; id: DeliveryId }, work: Work): void {
    count(work, 'attempts', removeAttempts.run(id).changes);
    count(work, 'deliveries', removeDelivery.run(seq).changes);
  }

  /** Removes all that `read` returns, a portion of rows each time; false: the step's time is over. */
  function removeEach<Row>(
    read: () => Row[],
    removeRow: (row: Row, work: Work) => void,
    work: Work,
  ): boolean {
    for (;;) {
      const rows = read();
      for (const row of rows) {
        removeRow(row, work);
        if (isOver(work)) return false;
      }
      if (rows.length < PORTION) return true;
    }
  }

  /** Shrinks the file: SQLite moves pages from its end into unused pages, and truncates it. */
  function freePages(work: Work): PrunePosition | null {
    const before = pageCounts();
    const kept = Math.max(UNUSED_PAGES_MIN, Math.floor((before.pages - before.unused) * UNUSED_SHARE));
    for (let left = before.unused - kept; left > 0; left--) {
      database.pragma('incremental_vacuum(1)');
      if (isOver(work)) break;
    }
    const { pages, unused } = pageCounts();
    if (pages === before.pages) return null;
    work.removed.fileBytes = (before.pages - pages) * pragmaNumber(database, 'page_size');
    return unused > kept ? START : null;
  }

  function pageCounts(): { pages: number; unused: number } {
    return {
      pages: pragmaNumber(database, 'page_count'),
      unused: pragmaNumber(database, 'freelist_count'),
    };
  }

  /** Calls `visit` for old rows, until that returns a position to continue at or the step's time is over. */
  function walk<Row extends { at: number; seq: number }>(
    old: Statement<FromPosition, Row>,
    from: PrunePosition,
    beforeMs: number,
    work: Work,
    visit: (row: Row) => PrunePosition | null,
  ): PrunePosition | null {
    for (let position = from; ; ) {
      const rows = old.all({ ...position, beforeMs });
      for (const row of rows) {
        const stoppedAt = visit(row);
        if (stoppedAt !== null) return stoppedAt;
        position = { ...START, atMs: row.at, seq: row.seq + 1 };
        if (isOver(work)) return position;
      }
      if (rows.length < PORTION) return null;
    }
  }

  function isOver({ untilMs }: Work): boolean {
    return effects.monotonicMs() >= untilMs;
  }
}

interface LogChunk {
  chunk: number;
  byte_count: number;
}

interface FromPosition extends PrunePosition {
  beforeMs: number;
}

/**
 * Selects a portion of a table's rows whose `moment` is before `:beforeMs`, from a position on, the oldest first. As a
 * union of two queries, because for a comparison of the pair (moment, seq) SQLite would scan all rows of the same moment.
 */
function inOrderOfAge(table: string, moment: string, columns: string): string {
  return `
    SELECT ${columns} FROM ${table} WHERE ${moment} = +:atMs AND :atMs < +:beforeMs AND seq >= +:seq
     UNION ALL
    SELECT ${columns} FROM ${table} WHERE ${moment} > +:atMs AND ${moment} < +:beforeMs
     ORDER BY at, seq LIMIT ${PORTION}`;
}

function count(work: Work, kind: keyof Removed, removed: number): void {
  if (removed > 0) work.removed[kind] = (work.removed[kind] ?? 0) + removed;
}
