import { STEP_MS } from '../clock.ts';
import {
  type EventType,
  type KeyId,
  newId,
  optionalTimestamp,
  timestamp,
  type Webhook,
  type WebhookId,
  type WebhookStatus,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import { newSigningSecret } from '../secrets.ts';
import { enabledChange } from './changes.ts';
import type { WriteContext } from './context.ts';
import { type Database, inSnapshot } from './database.ts';
import type { Caller } from './keys.ts';
import { type ListPage, pageOf } from './list-page.ts';

/** How many webhooks a key may have: each adds a row to every event that it subscribes to. */
export const WEBHOOKS_OF_KEY_MAX = 100;

/** How many secrets of a webhook are valid at a time: each adds a signature to every delivery. */
export const LIVE_SECRETS_MAX = 5;

/** The `status_reason` of a webhook that a person disabled. */
export const DISABLED_BY = {
  api: 'disabled through the API',
  admin: 'disabled by the administrator',
} as const;

interface NewWebhook {
  keyId: KeyId;
  /** As parseWebhookUrl normalised it. */
  url: string;
  events: EventType[];
  description: string | null;
}

/** The fields to change. */
export interface WebhookUpdate {
  id: WebhookId;
  url?: string;
  events?: EventType[];
  description?: string | null;
  status?: WebhookStatus;
  /** The `status_reason` if this disables the webhook. */
  disableReason: string;
}

/** A webhook with its new secret, which is never shown again. */
export type WebhookWithSecret = Webhook & { signing_secret: string };

/** Where a webhook is sent to, and which key registered it. */
interface WebhookAddress {
  url: string;
  keyId: KeyId;
}

/** What is needed to ping a webhook. */
export interface PingRecipient extends WebhookAddress {
  /** What to sign with, the newest first; more than one while a rotation overlaps. */
  secrets: readonly string[];
}

interface WebhookRow extends Omit<Webhook, 'events' | 'created_at' | 'last_success_at' | 'last_failure_at'> {
  seq: number;
  events: string;
  created_at: number;
  last_success_at: number | null;
  last_failure_at: number | null;
}

const WEBHOOK_COLUMNS = `
  seq, id, url, events, description, status, status_reason, created_at, last_success_at, last_failure_at,
  consecutive_failures`;

export type WebhookReads = ReturnType<typeof webhookReads>;

/** Webhooks, as their keys see them, and their signing secrets. */
export function webhookReads(database: Database) {
  const byId = database.prepare<[string], WebhookRow>(
    `SELECT ${WEBHOOK_COLUMNS} FROM webhooks WHERE id = +? AND deleted_at IS NULL`,
  );
  const ofKey = database.prepare<{ id: string; keyId: string }, WebhookRow>(
    `SELECT ${WEBHOOK_COLUMNS} FROM webhooks WHERE id = +:id AND key_id = +:keyId AND deleted_at IS NULL`,
  );
  const all = database.prepare<[], WebhookRow>(
    `SELECT ${WEBHOOK_COLUMNS} FROM webhooks WHERE deleted_at IS NULL ORDER BY seq`,
  );
  const addressOf = database.prepare<[string], WebhookAddress>(
    'SELECT url, key_id AS keyId FROM webhooks WHERE id = +? AND deleted_at IS NULL',
  );
  const keyIsRevoked = database
    .prepare<[string], number>(`
      SELECT 1 FROM webhooks w JOIN keys k ON k.id = w.key_id WHERE w.id = +? AND k.revoked_at IS NOT NULL`)
    .pluck();
  const page = database.prepare<{ keyId: string; beforeSeq: number; limit: number }, WebhookRow>(`
    SELECT ${WEBHOOK_COLUMNS} FROM webhooks
     WHERE key_id = +:keyId AND deleted_at IS NULL AND seq < +:beforeSeq
     ORDER BY seq DESC LIMIT :limit`);
  const liveSecrets = database
    .prepare<{ webhookId: string; nowMs: number }, string>(`
      SELECT secret FROM webhook_secrets
       WHERE webhook_id = +:webhookId AND (expires_at IS NULL OR expires_at > +:nowMs)
       ORDER BY expires_at IS NOT NULL, created_at DESC`)
    .pluck();

  return {
    get(id: string): Webhook | undefined {
      const row = byId.get(id);
      return row === undefined ? undefined : toWebhook(row);
    },

    /** Oldest first. */
    list: (): Webhook[] => all.all().map(toWebhook),

    /** Undefined if there is no such webhook. */
    addressOf: (id: WebhookId): WebhookAddress | undefined => addressOf.get(id),

    /** Throws `conflict` if the webhook's key was revoked: such a webhook cannot be enabled again. */
    refuseOfRevokedKey(id: WebhookId): void {
      if (keyIsRevoked.get(id) === undefined) return;
      throw new AppError('conflict', 'the key that registered this webhook is revoked: register another');
    },

    /** Undefined if there is no such webhook, or another key registered it. */
    visibleTo(caller: Caller, id: string): Webhook | undefined {
      const row = ofKey.get({ id, keyId: caller.keyId });
      return row === undefined ? undefined : toWebhook(row);
    },

    /** The caller's webhooks before `beforeSeq`, at most `limit`, newest first. */
    page: ({ keyId }: Caller, beforeSeq: number, limit: number): ListPage<Webhook> =>
      pageOf(page.all({ keyId, beforeSeq, limit: limit + 1 }), limit, toWebhook),

    /**
     * The webhook if it may be pinged at `nowMs`, also a disabled one, with its live secrets; undefined: it was deleted,
     * or its key was revoked.
     */
    pingRecipient: (webhookId: WebhookId, nowMs: number): PingRecipient | undefined =>
      inSnapshot(database, () => {
        const address = addressOf.get(webhookId);
        if (address === undefined || keyIsRevoked.get(webhookId) !== undefined) return undefined;
        return { ...address, secrets: liveSecrets.all({ webhookId, nowMs }) };
      }),
  };
}

/** Registers, changes, rotates and deletes webhooks. */
export function webhookWrites({ database, effects, changed }: WriteContext) {
  const reads = webhookReads(database);
  const countOfKey = database
    .prepare<[KeyId], number>('SELECT count(*) FROM webhooks WHERE key_id = +? AND deleted_at IS NULL')
    .pluck();
  const insert = database.prepare(`
    INSERT INTO webhooks (id, key_id, url, events, description, status, created_at, enabled_at)
    VALUES (:id, :keyId, :url, :events, :description, 'enabled', :at, :at)`);
  const insertSecret = database.prepare(
    'INSERT INTO webhook_secrets (webhook_id, secret, created_at) VALUES (:id, :secret, :at)',
  );
  const subscribe = database.prepare(
    'INSERT INTO webhook_subscriptions (event_type, webhook_id) VALUES (?, ?)',
  );
  const unsubscribe = database.prepare('DELETE FROM webhook_subscriptions WHERE webhook_id = +?');
  const change = database.prepare(
    'UPDATE webhooks SET url = :url, events = :events, description = :description WHERE id = +:id',
  );
  const forgiveFailures = database.prepare(
    'UPDATE webhooks SET consecutive_failures = 0, failing_since = NULL WHERE id = +?',
  );
  const enable = database.prepare(
    "UPDATE webhooks SET status = 'enabled', status_reason = NULL, enabled_at = :at WHERE id = +:id",
  );
  // What was held began its ladder earlier: also if not by the clock, as that was set back since. Not in steps, as an
  // attempt could come between them: 200,000 take 0.03 s, 0.4 s if scattered. So what is due already is read only if the
  // clock is known to have said a time after now: a retry is planned for after its ladder began, until the walk that
  // follows setting the clock back moves it, and that is recorded.
  const putBefore = database.prepare(`
    UPDATE deliveries SET ladder_started_at = :at - 1
     WHERE webhook_id = +:id AND status = 'pending' AND ladder_started_at >= +:at
       AND next_attempt_at >= iif((SELECT max(created_at) FROM events) >= +:at
                                    OR EXISTS (SELECT 1 FROM clock_settings
                                                WHERE by_ms < 0 AND at - by_ms + ${STEP_MS} >= +:at),
                                  0, +:at)`);
  const disable = database.prepare(
    "UPDATE webhooks SET status = 'disabled', status_reason = :reason WHERE id = +:id",
  );
  const endSecrets = database.prepare(`
    UPDATE webhook_secrets SET expires_at = :endsAt
     WHERE webhook_id = +:id AND (expires_at IS NULL OR expires_at > +:endsAt)`);
  const forgetSecrets = database.prepare(`
    DELETE FROM webhook_secrets
     WHERE webhook_id = +:id
       AND (expires_at <= +:at
            OR secret NOT IN (SELECT secret FROM webhook_secrets WHERE webhook_id = +:id
                               ORDER BY expires_at IS NOT NULL, created_at DESC LIMIT :keep))`);
  const markDeleted = database.prepare('UPDATE webhooks SET deleted_at = :at WHERE id = +:id');
  const endReplays = database.prepare(
    'UPDATE replays SET finished_at = :at WHERE webhook_id = +:id AND finished_at IS NULL',
  );

  return {
    /** Throws `conflict` if the key has `WEBHOOKS_OF_KEY_MAX` webhooks. */
    create(input: NewWebhook): WebhookWithSecret {
      if ((countOfKey.get(input.keyId) ?? 0) >= WEBHOOKS_OF_KEY_MAX) {
        throw new AppError(
          'conflict',
          `this key has ${WEBHOOKS_OF_KEY_MAX} webhooks, which is the most: delete one that nobody needs, or use another key`,
        );
      }
      const id = newId('whk', effects);
      const secret = newSigningSecret(effects.randomBytes);
      const at = effects.now();
      const { keyId, url, description } = input;
      insert.run({ id, keyId, url, description, events: JSON.stringify(input.events), at });
      insertSecret.run({ id, secret, at });
      for (const type of input.events) subscribe.run(type, id);
      return { ...existing(id), signing_secret: secret };
    },

    /**
     * Changes the fields that are given. Pending deliveries go to a new url, too. Enabling a webhook announces a change
     * on which the service makes its retries due, see `retryNow` in settlements.ts. Throws `not_found`, and `conflict` for
     * enabling one whose key was revoked.
     */
    update({ id, url, events, description, status, disableReason }: WebhookUpdate): Webhook {
      const before = existing(id);
      change.run({
        id,
        url: url ?? before.url,
        events: JSON.stringify(events ?? before.events),
        description: description === undefined ? before.description : description,
      });
      // The failures of the previous receiver do not count against the new one.
      if (url !== undefined && url !== before.url) {
        forgiveFailures.run(id);
        changed('outbox');
      }
      if (events !== undefined) {
        unsubscribe.run(id);
        for (const type of events) subscribe.run(type, id);
      }
      if (status !== undefined && status !== before.status) setStatus(id, status, disableReason);
      return existing(id);
    },

    /**
     * Gives the webhook a new secret. Earlier secrets stay valid for at most another `overlapMs`; if there are more
     * than five in all, the oldest end now. Throws `not_found`.
     */
    rotate({ id, overlapMs }: { id: WebhookId; overlapMs: number }): WebhookWithSecret {
      const webhook = existing(id);
      const secret = newSigningSecret(effects.randomBytes);
      const at = effects.now();
      // Before the current one is ended like the others: by the times alone, it need not be the newest.
      forgetSecrets.run({ id, at, keep: overlapMs === 0 ? 0 : LIVE_SECRETS_MAX - 1 });
      endSecrets.run({ id, endsAt: at + overlapMs });
      insertSecret.run({ id, secret, at });
      return { ...webhook, signing_secret: secret };
    },

    /** Deletes a webhook: nobody sees it or its deliveries any more, and nothing more is sent. Throws `not_found`. */
    remove({ id }: { id: WebhookId }): void {
      existing(id);
      const at = effects.now();
      markDeleted.run({ id, at });
      unsubscribe.run(id);
      forgetSecrets.run({ id, at, keep: 0 });
      endReplays.run({ id, at });
    },
  };

  function existing(id: string): Webhook {
    const webhook = reads.get(id);
    if (webhook === undefined) throw new AppError('not_found', 'there is no such webhook');
    return webhook;
  }

  function setStatus(id: WebhookId, status: WebhookStatus, disableReason: string): void {
    switch (status) {
      case 'disabled':
        disable.run({ id, reason: disableReason });
        return;
      case 'enabled': {
        reads.refuseOfRevokedKey(id);
        const at = effects.now();
        putBefore.run({ id, at });
        enable.run({ id, at });
        forgiveFailures.run(id);
        changed('outbox');
        changed(enabledChange(id));
        return;
      }
      default:
        status satisfies never;
    }
  }
}

function toWebhook(row: WebhookRow): Webhook {
  return {
    id: row.id,
    url: row.url,
    events: JSON.parse(row.events) as EventType[],
    description: row.description,
    status: row.status,
    status_reason: row.status_reason,
    created_at: timestamp(row.created_at),
    last_success_at: optionalTimestamp(row.last_success_at),
    last_failure_at: optionalTimestamp(row.last_failure_at),
    consecutive_failures: row.consecutive_failures,
  };
}
