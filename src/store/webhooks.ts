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
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';
import type { Caller } from './keys.ts';

export interface NewWebhook {
  keyId: KeyId;
  /** As parseWebhookUrl normalised it. */
  url: string;
  events: EventType[];
  description: string | null;
}

interface WebhookRow {
  seq: number;
  id: WebhookId;
  url: string;
  events: string;
  description: string | null;
  status: WebhookStatus;
  status_reason: string | null;
  created_at: number;
  last_success_at: number | null;
  last_failure_at: number | null;
  consecutive_failures: number;
}

const WEBHOOK_COLUMNS = `
  seq, id, url, events, description, status, status_reason, created_at, last_success_at, last_failure_at,
  consecutive_failures`;

export function webhookReads(database: Database) {
  const byId = database.prepare<[string], WebhookRow>(
    `SELECT ${WEBHOOK_COLUMNS} FROM webhooks WHERE id = ? AND deleted_at IS NULL`,
  );
  const ofKey = database.prepare<{ id: string; keyId: string }, WebhookRow>(
    `SELECT ${WEBHOOK_COLUMNS} FROM webhooks WHERE id = :id AND key_id = :keyId AND deleted_at IS NULL`,
  );
  const liveSecrets = database
    .prepare<{ webhookId: string; nowMs: number }, string>(`
      SELECT secret FROM webhook_secrets
       WHERE webhook_id = :webhookId AND (expires_at IS NULL OR expires_at > :nowMs)
       ORDER BY expires_at IS NOT NULL, created_at DESC`)
    .pluck();

  return {
    get(id: string): Webhook | undefined {
      const row = byId.get(id);
      return row === undefined ? undefined : toWebhook(row);
    },

    /** A key sees the webhooks that it registered; undefined for all others. */
    visibleTo(caller: Caller, id: string): Webhook | undefined {
      const row = ofKey.get({ id, keyId: caller.keyId });
      return row === undefined ? undefined : toWebhook(row);
    },

    /** What to sign with, the newest first; more than one while a rotation overlaps. */
    liveSecrets: (webhookId: WebhookId, nowMs: number): string[] => liveSecrets.all({ webhookId, nowMs }),
  };
}

export function webhookWrites({ database, effects }: WriteContext) {
  const reads = webhookReads(database);
  const insert = database.prepare(`
    INSERT INTO webhooks (id, key_id, url, events, description, status, created_at, enabled_at)
    VALUES (:id, :keyId, :url, :events, :description, 'enabled', :at, :at)`);
  const insertSecret = database.prepare(
    'INSERT INTO webhook_secrets (webhook_id, secret, created_at) VALUES (:webhookId, :secret, :at)',
  );
  const subscribe = database.prepare(
    'INSERT OR IGNORE INTO webhook_subscriptions (event_type, webhook_id) VALUES (?, ?)',
  );

  return {
    /** The secret is in this answer and never shown again. */
    create(input: NewWebhook): Webhook & { signing_secret: string } {
      const id = newId('whk', effects.randomBytes);
      const secret = newSigningSecret(effects.randomBytes);
      const at = effects.now();
      const { keyId, url, description } = input;
      insert.run({ id, keyId, url, description, events: JSON.stringify(input.events), at });
      insertSecret.run({ webhookId: id, secret, at });
      for (const type of input.events) subscribe.run(type, id);
      const webhook = reads.get(id);
      if (webhook === undefined) throw new AppError('internal_error', 'a webhook vanished while it was made');
      return { ...webhook, signing_secret: secret };
    },
  };
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
