import {
  type DeploymentEvent,
  type DeploymentId,
  type EventType,
  newId,
  type ProjectId,
  type Ref,
  timestamp,
  type WebhookId,
} from '../domain.ts';
import type { WriteContext } from './context.ts';

/** Events, each with its outbox rows. Only ever written beside the change that they tell of. */
export function eventWrites({ database, effects, changed }: WriteContext) {
  const insertEvent = database.prepare(`
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    VALUES (:id, :type, :deploymentId, :projectId, :at, :payload)`);
  // Whoever could see the project at this moment is told. A disabled webhook's row waits until it is enabled.
  const subscribers = database
    .prepare<{ type: EventType; projectId: ProjectId; at: number }, WebhookId>(`
    SELECT w.id
      FROM webhook_subscriptions s
      JOIN webhooks w ON w.id = s.webhook_id
      JOIN keys k ON k.id = w.key_id
     -- Not a plain :type: SQLite, built with STAT4, would plan this anew at every run, 46 µs in place of 7.
     WHERE s.event_type = (SELECT :type)
       AND w.deleted_at IS NULL
       AND k.revoked_at IS NULL
       AND (k.expires_at IS NULL OR k.expires_at > :at)
       AND (k.all_projects = 1
            OR EXISTS (SELECT 1 FROM key_projects v WHERE v.key_id = k.id AND v.project_id = :projectId))`)
    .pluck();
  const insertDelivery = database.prepare(`
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at,
                            ladder_started_at, ladder_trigger)
    VALUES (:id, :eventId, :type, :webhookId, 'pending', :at, :at, :at, 'schedule')`);

  return {
    /** Records that `type` happened to the deployment at `at`, and one delivery for each subscribed webhook. */
    record(
      type: EventType,
      deployment: { id: DeploymentId; project_id: ProjectId; ref: Ref },
      at: number,
    ): void {
      const event: DeploymentEvent = {
        id: newId('evt', effects.randomBytes),
        type,
        created_at: timestamp(at),
        data: { deployment_id: deployment.id, project_id: deployment.project_id, ref: deployment.ref },
      };
      insertEvent.run({
        id: event.id,
        type,
        deploymentId: deployment.id,
        projectId: deployment.project_id,
        at,
        payload: JSON.stringify(event),
      });
      for (const webhookId of subscribers.all({ type, projectId: deployment.project_id, at })) {
        insertDelivery.run({ id: newId('dlv', effects.randomBytes), eventId: event.id, type, webhookId, at });
        changed('outbox');
      }
    },
  };
}
