import type { WebhookId } from '../domain.ts';
import type { Database } from './database.ts';

/** Where and how to send what a webhook is told. */
export interface Recipient {
  url: string;
  /** When it was last enabled. */
  enabledAtMs: number;
  /** What to sign with, the newest first. */
  secrets: readonly string[];
}

interface RememberedRecipient extends Recipient {
  secrets: string[];
  /** When it was looked up: by a clock that was set back since, a secret may live again. */
  sinceMs: number;
  /** From then on one of the secrets signs no more. */
  untilMs: number;
}

type RecipientRow = [id: WebhookId, url: string, enabledAt: number, secret: string, expiresAt: number | null];

/** More than one server is busy with at a time; they take 2 MB. */
const REMEMBERED_MAX = 4_096;

/**
 * The webhooks that may be sent to, looked up once: to look them up for each claim took 1.5 of the 3.5 µs that
 * claiming a delivery takes. The file counts their changes, whoever makes them.
 */
export function recipientReads(database: Database) {
  const changes = database.prepare<[], number>('SELECT webhook_changes FROM instance').pluck();
  const rowsOf = database
    .prepare<{ ids: string; nowMs: number }, RecipientRow>(`
      SELECT w.id, w.url, w.enabled_at, s.secret, s.expires_at
        FROM json_each(:ids) wanted
       CROSS JOIN webhooks w ON w.id = wanted.value
       CROSS JOIN webhook_secrets s ON s.webhook_id = w.id AND (s.expires_at IS NULL OR s.expires_at > +:nowMs)
       WHERE w.status = 'enabled' AND w.deleted_at IS NULL
       ORDER BY s.expires_at IS NOT NULL, s.created_at DESC`)
    .raw();
  const remembered = new Map<WebhookId, RememberedRecipient>();
  /** Disabled, or deleted: that changes by no clock. */
  const absent = new Set<WebhookId>();
  let changesSeen: number | undefined;

  return {
    /**
     * Those of these webhooks that may be sent to at `nowMs`, perhaps with others. In the snapshot of whoever asks; all
     * together, as a query for each takes five times as long.
     */
    recipients(ids: readonly WebhookId[], nowMs: number): ReadonlyMap<WebhookId, Recipient> {
      const changesNow = changes.get();
      if (changesNow !== changesSeen || remembered.size + absent.size > REMEMBERED_MAX) {
        remembered.clear();
        absent.clear();
      }
      changesSeen = changesNow;
      const missing = ids.filter((id) => !isKnown(id, nowMs));
      if (missing.length > 0) lookUp(missing, nowMs);
      return remembered;
    },
  };

  function isKnown(id: WebhookId, nowMs: number): boolean {
    const recipient = remembered.get(id);
    if (recipient === undefined) return absent.has(id);
    return recipient.sinceMs <= nowMs && nowMs < recipient.untilMs;
  }

  function lookUp(ids: readonly WebhookId[], nowMs: number): void {
    for (const id of ids) remembered.delete(id);
    for (const [id, url, enabledAtMs, secret, expiresAt] of rowsOf.all({ ids: JSON.stringify(ids), nowMs })) {
      const untilMs = expiresAt ?? Number.POSITIVE_INFINITY;
      const known = remembered.get(id);
      if (known === undefined) {
        remembered.set(id, { url, enabledAtMs, secrets: [secret], sinceMs: nowMs, untilMs });
      } else {
        known.secrets.push(secret);
        known.untilMs = Math.min(known.untilMs, untilMs);
      }
    }
    for (const id of ids) if (!remembered.has(id)) absent.add(id);
  }
}
