import type { WebhookId } from '../domain.ts';

export interface LaneLimits {
  /** How many attempts of one webhook are under way at a time. */
  perWebhook: number;
  /** How many of all. */
  total: number;
  /** How many of all webhooks together whose last attempt failed. */
  failing: number;
}

export const LANE_LIMITS: LaneLimits = { perWebhook: 4, total: 256, failing: 64 };

/** After this many failures in a row a webhook gets one attempt at a time, until one succeeds. */
const FAILING_AFTER = 3;

/**
 * Who may send now. Each webhook has its own few slots, and those that fail share a small part of the
 * whole: however many receivers are slow or dead, the others find free slots.
 */
export function createLanes(limits: LaneLimits = LANE_LIMITS) {
  const busy = new Map<WebhookId, { slots: number }>();
  let total = 0;
  let failing = 0;

  return {
    /** How many attempts of this webhook are under way. */
    busy: (webhookId: WebhookId): number => busy.get(webhookId)?.slots ?? 0,

    /** How many more attempts this webhook may begin now. */
    free(webhookId: WebhookId, consecutiveFailures: number): number {
      const own = busy.get(webhookId)?.slots ?? 0;
      if (consecutiveFailures < FAILING_AFTER)
        return Math.max(0, Math.min(limits.perWebhook - own, limits.total - total));
      return Math.max(0, Math.min(1 - own, limits.failing - failing, limits.total - total));
    },

    /** Takes a slot; the returned function gives it back. */
    take(webhookId: WebhookId, consecutiveFailures: number): () => void {
      const isFailing = consecutiveFailures >= FAILING_AFTER;
      const lane = busy.get(webhookId) ?? { slots: 0 };
      lane.slots += 1;
      busy.set(webhookId, lane);
      total += 1;
      if (isFailing) failing += 1;
      return () => {
        lane.slots -= 1;
        if (lane.slots === 0) busy.delete(webhookId);
        total -= 1;
        if (isFailing) failing -= 1;
      };
    },
  };
}
