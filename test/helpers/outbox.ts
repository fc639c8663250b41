import type { EventType, WebhookId } from '../../src/domain.ts';
import type { DueDelivery } from '../../src/store/outbox.ts';
import type { Settlement } from '../../src/store/settlements.ts';
import type { Store } from '../../src/store/store.ts';
import { newWebhook } from './deliveries.ts';
import type { TestStore } from './store.ts';

/** A webhook of a new key. */
export async function newKeysWebhook(
  store: TestStore,
  key: Parameters<TestStore['key']>[0] = {},
  events?: EventType[],
): Promise<WebhookId> {
  const { keyId } = await store.key(key);
  return (await newWebhook(store, keyId, events && { events })).id;
}

/** The first `limit` deliveries of a webhook that are due. */
export function dueOf(
  { reads }: Pick<Store, 'reads'>,
  webhookId: WebhookId,
  nowMs: number,
  limit: number,
): DueDelivery[] {
  const request = { webhookId, limit, underWay: [], ahead: [] };
  return reads.outbox.claim([request], nowMs).flatMap(({ due }) => due);
}

/** An attempt of what was claimed, as the dispatcher records it. `attempt` is what else is known of it. */
export function settlementOf(
  due: DueDelivery,
  atMs: number,
  next: Settlement['next'],
  attempt: Partial<Settlement['attempt']> = {},
): Settlement {
  return {
    seq: due.seq,
    webhookId: due.webhook_id,
    url: due.url,
    enabledAtMs: due.enabled_at,
    attempt: {
      atMs,
      statusCode: next.kind === 'delivered' ? 200 : 500,
      error: null,
      durationMs: 12,
      remoteAddress: '192.0.2.1',
      responseBody: '',
      trigger: due.ladder_trigger,
      ...attempt,
    },
    endedAtMs: atMs + (attempt.durationMs ?? 12),
    next,
    attemptCount: due.attempt_count + 1,
    ladderAttempts: due.ladder_attempts + 1,
    ladderStartedAtMs: due.ladder_started_at,
    neverPassedMs: { inFiveDays: 0, inThreeDays: 0 },
    disableReason: null,
  };
}
