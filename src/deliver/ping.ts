import { type KeyId, newId, type PingResult, timestamp, type WebhookId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Reads } from '../store/store.ts';
import type { PingRecipient } from '../store/webhooks.ts';
import type { Sender } from './send.ts';
import { signedHeaders } from './sign.ts';

export interface Pinger {
  /** Sends one ping now, and resolves to its result. */
  ping(webhookId: WebhookId): Promise<PingResult>;
}

interface OwnPing {
  webhookId: WebhookId;
  keyId: KeyId;
}

/** Concurrent pings to one webhook, which use none of the slots of deliveries. Each may take as long as an attempt. */
const PER_WEBHOOK = 2;
/** So that one key whose receivers hang leaves most pings to others. */
const PER_KEY = 4;
const TOTAL = 16;

/**
 * A ping is one request, checked, signed and sent like a delivery, but never stored or repeated, and without
 * consequences for the webhook. Disabled webhooks can be pinged too, to try them before they are enabled.
 */
export function createPinger(reads: Reads, sender: Sender, effects: Effects): Pinger {
  const underWay = new Set<OwnPing>();

  return {
    async ping(webhookId) {
      const recipient = reads.webhooks.pingRecipient(webhookId, effects.now());
      if (recipient === undefined) return { kind: 'gone' };
      const { keyId } = recipient;
      const ofKey = [...underWay].filter((ping) => ping.keyId === keyId);
      const ofWebhook = ofKey.filter((ping) => ping.webhookId === webhookId);
      if (ofWebhook.length >= PER_WEBHOOK || ofKey.length >= PER_KEY || underWay.size >= TOTAL) {
        return { kind: 'busy' };
      }
      const ping = { webhookId, keyId };
      underWay.add(ping);
      try {
        return await attempt(webhookId, recipient);
      } finally {
        underWay.delete(ping);
      }
    },
  };

  /** To the new URL, if the webhook has another one when the connection is made. */
  async function attempt(webhookId: WebhookId, recipient: PingRecipient): Promise<PingResult> {
    const { url, keyId } = recipient;
    const atMs = effects.now();
    const eventId = newId('evt', effects);
    const body = JSON.stringify({
      id: eventId,
      type: 'ping',
      created_at: timestamp(atMs),
      data: { webhook_id: webhookId },
    });
    const headersOf = ({ secrets }: PingRecipient, nowMs: number) =>
      signedHeaders({ eventId, secrets, atSeconds: Math.floor(nowMs / 1000), body });
    /** The webhook when the connection was made; undefined: it may not be sent to. */
    let latest: PingRecipient | undefined = recipient;
    let readFailure: unknown;
    const outcome = await sender.send({
      url,
      headers: headersOf(recipient, atMs),
      renewHeaders() {
        try {
          const sentAtMs = effects.now();
          latest = reads.webhooks.pingRecipient(webhookId, sentAtMs);
          return latest?.url === url ? headersOf(latest, sentAtMs) : null;
        } catch (error) {
          readFailure = error;
          return null;
        }
      },
      body,
      key: keyId,
    });
    if (readFailure !== undefined) throw readFailure;
    if (latest === undefined) return { kind: 'gone' };
    if (latest.url !== url) return attempt(webhookId, latest);
    return {
      kind: 'attempted',
      attempt: {
        number: 1,
        at: timestamp(atMs),
        status_code: outcome.statusCode,
        error: outcome.error,
        duration_ms: outcome.durationMs,
        remote_address: outcome.remoteAddress,
        response_body: outcome.responseBody,
        trigger: 'ping',
      },
    };
  }
}
