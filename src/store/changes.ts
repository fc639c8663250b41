import { type DeploymentId, parseId, type WebhookId } from '../domain.ts';

/**
 * What a commit may have changed, for those who wait for changes:
 *
 *   queue           deployments may be startable, or were canceled while they run, here or elsewhere; not sent when one
 *                   ends, as the executor ends those that it runs
 *   a deployment    its status
 *   log:…           a deployment's log grew, perhaps a hundred times a second
 *   a webhook       it is enabled and has new deliveries, or its retries were made due at once, after all that was due
 *                   before
 *   enabled:…       a webhook was enabled
 *   outbox          webhooks or deliveries changed in any other way
 *   settled         the dispatcher recorded attempts
 *   everything      another process wrote, so anything may have changed
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

/** Whether the dispatcher is told of the change. */
export function concernsDeliveries(change: Change): boolean {
  return (
    change === 'everything' ||
    change === 'outbox' ||
    change === 'settled' ||
    webhookOf(change) !== undefined ||
    enabledWebhookOf(change) !== undefined
  );
}

/** Whether the executor, and requests that wait for a deployment, are told of the change. */
export function concernsDeployments(change: Change): boolean {
  return change === 'everything' || !concernsDeliveries(change);
}

/** The webhook that has deliveries to send, new ones or retries that were made due; undefined for any other change. */
export function webhookOf(change: Change): WebhookId | undefined {
  return parseId('whk', change);
}

/** The change of a deployment's log. */
export function logChange(id: DeploymentId): LogChange {
  return `log:${id}`;
}

/** The change of enabling a webhook. */
export function enabledChange(id: WebhookId): EnabledChange {
  return `${ENABLED}${id}`;
}

/** The webhook that was enabled; undefined for any other change. */
export function enabledWebhookOf(change: Change): WebhookId | undefined {
  return change.startsWith(ENABLED) ? parseId('whk', change.slice(ENABLED.length)) : undefined;
}

const ENABLED = 'enabled:';
