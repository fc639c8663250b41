import type { DeliveryStatus, Webhook } from '../domain.ts';
import { storedStatuses } from './deliveries.ts';
import type { NewReplay } from './replays.ts';
import type { Reads } from './store.ts';

/**
 * What `replays.create` is given for the deliveries of a webhook that came to be from `sinceMs` to `untilMs` and,
 * unless `status` is null, are shown so now. Counts them, which takes a third of a second for a million.
 */
export async function newReplay(
  { replays }: Pick<Reads, 'replays'>,
  webhook: Webhook,
  { sinceMs, untilMs, status }: { sinceMs: number; untilMs: number; status: DeliveryStatus | null },
): Promise<NewReplay> {
  const [storedStatus = null] = status === null ? [] : storedStatuses([status], webhook.status);
  const selection = {
    webhookId: webhook.id,
    sinceMs,
    untilMs,
    storedStatus,
    lastSeq: replays.lastSeq(webhook.id),
  };
  const fitsNothing = status !== null && storedStatus === null;
  return { ...selection, status, count: fitsNothing ? 0 : await replays.count(selection) };
}
