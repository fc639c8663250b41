import type { Logger } from 'pino';
import type { DeliveryId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { DueDelivery, PendingWebhook, Settlement } from '../store/outbox.ts';
import type { Reads } from '../store/store.ts';
import type { Writer } from '../store/writer.ts';
import { writePersistently } from '../store/writer.ts';
import { createLanes } from './lanes.ts';
import { nextAttempt, type RetrySchedule } from './retry.ts';
import type { Sender, SendOutcome } from './send.ts';
import { signedHeaders } from './sign.ts';

export interface DispatcherOptions {
  reads: Reads;
  writer: Writer;
  sender: Sender;
  schedule: RetrySchedule;
  effects: Effects;
  logger: Logger;
}

export interface Dispatcher {
  /** Begins every attempt that is due and has a slot. Returns when the next one is due; null: none is known. */
  tick(): Promise<number | null>;
  /** Resolves when no attempt is under way. */
  settled(): Promise<void>;
}

/**
 * Drains the outbox: claim, sign, send, settle. What is under way is memory, what is due is rows; a crash
 * between sending and settling sends once more, and receivers tell by the event's id.
 */
export function createDispatcher(options: DispatcherOptions): Dispatcher {
  const { reads, writer, sender, schedule, effects, logger } = options;
  const lanes = createLanes();
  const underWay = new Map<DeliveryId, Promise<void>>();

  return { tick, settled };

  async function tick(): Promise<number | null> {
    const nowMs = effects.now();
    let nextAtMs: number | null = null;
    for (const webhook of reads.outbox.pendingWebhooks()) {
      if (webhook.next_attempt_at > nowMs) {
        nextAtMs = webhook.next_attempt_at; // they come in this order
        break;
      }
      for (const delivery of claim(webhook, nowMs)) begin(delivery, webhook);
    }
    return nextAtMs;
  }

  async function settled(): Promise<void> {
    await Promise.all(underWay.values());
  }

  /** As many due deliveries as the webhook has slots for, those under way left out. */
  function claim(webhook: PendingWebhook, nowMs: number): DueDelivery[] {
    const free = lanes.free(webhook.webhook_id, webhook.consecutive_failures);
    if (free === 0) return [];
    const busy = lanes.busy(webhook.webhook_id);
    return reads.outbox
      .dueOf(webhook.webhook_id, nowMs, free + busy)
      .filter((delivery) => !underWay.has(delivery.id))
      .slice(0, free);
  }

  function begin(delivery: DueDelivery, webhook: PendingWebhook): void {
    const release = lanes.take(webhook.webhook_id, webhook.consecutive_failures);
    const attempt = deliver(delivery)
      .catch((error) =>
        logger.error({ err: error, deliveryId: delivery.id }, 'a delivery could not be settled'),
      )
      .finally(() => {
        release();
        underWay.delete(delivery.id);
      });
    underWay.set(delivery.id, attempt);
  }

  async function deliver(delivery: DueDelivery): Promise<void> {
    const atMs = effects.now();
    const secrets = reads.webhooks.liveSecrets(delivery.webhook_id, atMs);
    const headers = signedHeaders({
      eventId: delivery.event_id,
      secrets,
      atSeconds: Math.floor(atMs / 1000),
      body: delivery.payload,
    });
    const outcome = await sender.send({ url: delivery.url, headers, body: delivery.payload });
    const settlement = settle(delivery, atMs, outcome);
    logger.info(
      {
        deliveryId: delivery.id,
        eventId: delivery.event_id,
        webhookId: delivery.webhook_id,
        statusCode: outcome.statusCode,
        error: outcome.error,
        durationMs: outcome.durationMs,
        next: settlement.next.kind,
      },
      'delivery attempt',
    );
    await writePersistently(writer, 'outbox.settle', settlement, effects);
  }

  /** What follows from an attempt, for the delivery and for its webhook. */
  function settle(delivery: DueDelivery, atMs: number, outcome: SendOutcome): Settlement {
    const ladderAttempts = delivery.ladder_attempts + 1;
    const gone = outcome.statusCode === 410;
    return {
      deliveryId: delivery.id,
      webhookId: delivery.webhook_id,
      attempt: {
        atMs,
        statusCode: outcome.statusCode,
        error: outcome.error,
        durationMs: outcome.durationMs,
        remoteAddress: outcome.remoteAddress,
        responseBody: outcome.responseBody,
        trigger: delivery.ladder_trigger,
      },
      next: outcome.ok
        ? { kind: 'delivered' }
        : nextAttempt({
            ladderStartedAtMs: delivery.ladder_started_at,
            ladderAttempts,
            nowMs: effects.now(),
            retryAfter: outcome.retryAfter,
            randomFraction: randomFraction(effects),
            schedule,
          }),
      ladderAttempts,
      ladderStartedAtMs: delivery.ladder_started_at,
      disableReason: gone ? 'the receiver answered 410 Gone' : null,
    };
  }
}

function randomFraction(effects: Effects): number {
  const [high = 0, low = 0] = effects.randomBytes(2);
  return (high * 256 + low) / 65_536;
}
