import { type Attempt, newId, timestamp, type WebhookId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Reads } from '../store/store.ts';
import type { WebhookAddress } from '../store/webhooks.ts';
import type { Sender } from './send.ts';
import { signedHeaders } from './sign.ts';

/** `busy`: too many pings are under way, to the webhook, of its key or in all; `gone`: the webhook was deleted. */
export type PingResult = { kind: 'attempted'; attempt: Attempt } | { kind: 'busy' } | { kind: 'gone' };

export interface Pinger {
  /** Sends one ping now, and resolves to its result. */
  ping(webhookId: WebhookId): Promise<PingResult>;
}

interface OwnPing extends WebhookAddress {
  webhookId: WebhookId;
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
export function createPinger({
  reads,
  sender,
  effects,
}: {
  reads: Reads;
  sender: Sender;
  effects: Effects;
}): Pinger {
  const underWay = new Set<OwnPing>();

  return {
    async ping(webhookId) {
      const address = reads.webhooks.addressOf(webhookId);
      if (address === undefined) return { kind: 'gone' };
      const ofKey = [...underWay].filter((ping) => ping.keyId === address.keyId);
      const ofWebhook = ofKey.filter((ping) => ping.webhookId === webhookId);
      if (ofWebhook.length >= PER_WEBHOOK || ofKey.length >= PER_KEY || underWay.size >= TOTAL) {
        return { kind: 'busy' };
      }
      const ping = { webhookId, ...address };
      underWay.add(ping);
      try {
        return await attempt(ping);
      } finally {
        underWay.delete(ping);
      }
    },
  };

  async function attempt({ webhookId, url, keyId }: OwnPing): Promise<PingResult> {
    const atMs = effects.now();
    const eventId = newId('evt', effects);
    const body = JSON.stringify({
      id: eventId,
      type: 'ping',
      created_at: timestamp(atMs),
      data: { webhook_id: webhookId },
    });
    /** Null: a deleted webhook has no secrets. */
    const signed = () => {
      const nowMs = effects.now();
      const secrets = reads.webhooks.liveSecrets(webhookId, nowMs);
      if (secrets.length === 0) return null;
      return signedHeaders({ eventId, secrets, atSeconds: Math.floor(nowMs / 1000), body });
    };
    const headers = signed();
    if (headers === null) return { kind: 'gone' };
    let isGone = false;
    let readFailure: unknown;
    const outcome = await sender.send({
      url,
      headers,
      renewHeaders() {
        try {
          const latest = signed();
          isGone = latest === null;
          return latest;
        } catch (error) {
          readFailure = error;
          return null;
        }
      },
      body,
      key: keyId,
    });
    if (readFailure !== undefined) throw readFailure;
    if (isGone) return { kind: 'gone' };
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
