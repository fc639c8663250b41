import { type DeploymentId, parseId, type WebhookId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Database } from './database.ts';

/**
 * What a commit may have changed for somebody who waits:
 *
 *   queue           what may be started, or has to be stopped; that one ended is known to the executor, who ended it
 *   a deployment    its state; or its log, of which there may be a hundred in a second
 *   a webhook       it has new deliveries, or its retries are due now, behind all that was due before; or it was enabled
 *   outbox          webhooks or deliveries in any other way
 *   settled         attempts were recorded, by the dispatcher
 *   everything      another process wrote, or nobody knows what
 */
export type Change =
  | 'queue'
  | 'outbox'
  | 'settled'
  | 'everything'
  | DeploymentId
  | WebhookId
  | LogChange
  | EnabledChange;
type LogChange = `log:${DeploymentId}`;
type EnabledChange = `enabled:${WebhookId}`;

/** What every store that writes is made with. Its functions run inside the writer's transaction. */
export interface WriteContext {
  database: Database;
  effects: Effects;
  /** Reported to whoever waits once the transaction is committed, and never if it is not. */
  changed(change: Change): void;
}

/** For whoever delivers. */
export function concernsDeliveries(change: Change): boolean {
  return (
    change === 'everything' ||
    change === 'outbox' ||
    change === 'settled' ||
    webhookOf(change) !== undefined ||
    enabledWebhookOf(change) !== undefined
  );
}

/** For whoever carries deployments out, and for whoever waits for one. */
export function concernsDeployments(change: Change): boolean {
  return change === 'everything' || !concernsDeliveries(change);
}

/** The webhook that has new deliveries; undefined if the change is another. */
export function webhookOf(change: Change): WebhookId | undefined {
  return parseId('whk', change);
}

/** That this deployment's log grew. */
export function logChange(id: DeploymentId): LogChange {
  return `log:${id}`;
}

/** That this webhook was enabled. */
export function enabledChange(id: WebhookId): EnabledChange {
  return `${ENABLED}${id}`;
}

/** The webhook that was enabled; undefined if the change is another. */
export function enabledWebhookOf(change: Change): WebhookId | undefined {
  return change.startsWith(ENABLED) ? parseId('whk', change.slice(ENABLED.length)) : undefined;
}

const ENABLED = 'enabled:';
