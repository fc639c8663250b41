import type { Timestamp } from '../domain.ts';
import type { WebhookBacklog } from '../store/backlog.ts';
import type { CommandContext } from './command.ts';
import { counted } from './counted.ts';
import { moment } from './moments.ts';
import { shortSentence } from './shorten.ts';
import type { Column } from './table.ts';

/** Columns that tell how often a webhook has failed in a row, and with what error. */
export const FAILURE_COLUMNS: readonly Column<WebhookBacklog>[] = [
  {
    title: 'FAILED',
    of: ({ consecutive_failures }) => (consecutive_failures === 0 ? '' : `${consecutive_failures}×`),
    colour: () => 'red',
  },
  {
    title: 'LAST ERROR',
    of: ({ status_reason, last_error }) => status_reason ?? last_error ?? '',
    shorten: shortSentence,
  },
];

/** When something is sent to the webhook next; empty if nothing waits. `served`: whether a service runs to send it. */
export function nextAttemptText(
  { held_count, due_count, next_attempt_at }: WebhookBacklog,
  served: boolean,
  context: CommandContext,
): string {
  if (held_count > 0) return 'held';
  if (next_attempt_at === null) return '';
  return due_count > 0 && served ? 'now' : moment(context, next_attempt_at);
}

/** When the webhook's key expired, since which it gets no new events; null: it did not. */
export function keyExpiredAt({ created_by }: WebhookBacklog, nowMs: number): Timestamp | null {
  const { expires_at } = created_by;
  return expires_at !== null && Date.parse(expires_at) <= nowMs ? expires_at : null;
}

/** `1 delivery`, `2 deliveries`. */
export function deliveriesText(count: number): string {
  return counted(count, 'delivery', 'deliveries');
}
