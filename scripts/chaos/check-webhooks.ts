import type { Database } from 'better-sqlite3';
import { differences } from './check.ts';
import type { KnownDeployment, KnownWebhook, Violation } from './ledger.ts';
import type { Inbox } from './receivers.ts';

/** What the ledger and the receivers know of deliveries. */
export interface DeliveryEvidence {
  webhooks: ReadonlyMap<string, KnownWebhook>;
  deployments: ReadonlyMap<string, KnownDeployment>;
  inboxes: ReadonlyMap<string, Inbox>;
  /** Whether the key that registered a webhook sees a project. */
  sees(keyId: string, projectId: string): boolean;
}

/** How much was checked. */
export interface DeliveryCounts {
  events: number;
  /** Pairs of an event and a webhook. */
  deliveries: number;
  delivered: number;
  pending: number;
  held: number;
  exhausted: number;
}

/** Webhooks are as acknowledged, with the secrets that were given out. */
export function checkWebhooks(
  file: Database,
  { webhooks, inboxes }: Pick<DeliveryEvidence, 'webhooks' | 'inboxes'>,
): Violation[] {
  const find = file.prepare<[string], Record<string, unknown>>(`
    SELECT w.*, (SELECT secret FROM webhook_secrets s WHERE s.webhook_id = w.id AND s.expires_at IS NULL) AS secret
      FROM webhooks w WHERE w.id = ?`);
  const violations: Violation[] = [];
  // Not those with a change that was not answered.
  for (const known of [...webhooks.values()].filter(({ busy }) => !busy)) {
    const row = find.get(known.id);
    // Of a deleted one the row goes, too, some time later.
    const isThere = row !== undefined && row['deleted_at'] === null;
    if (isThere === known.deleted) {
      const rule = known.deleted
        ? 'a webhook is deleted if that was acknowledged'
        : 'an acknowledged webhook is there';
      violations.push({ rule, detail: known.id });
    }
    if (!isThere || known.deleted) continue;
    const expected = {
      key_id: known.keyId,
      url: known.url,
      events: JSON.stringify(known.events),
      description: known.description,
      secret: known.secrets.at(-1),
      // A receiver that says 410 disables its webhook by itself.
      ...(inboxes.get(known.path)?.answeredGone === true ? {} : { status: known.status }),
    };
    violations.push(...differences('a webhook is as it was acknowledged', known.id, expected, row));
  }
  return violations;
}

interface EventRow {
  id: string;
  type: string;
  deployment_id: string;
  project_id: string;
  payload: string;
}

interface DeliveryRow {
  id: string;
  event_id: string;
  webhook_id: string;
  status: 'pending' | 'delivered' | 'exhausted';
  webhook_status: 'enabled' | 'disabled';
  attempt_count: number;
}

/**
 * Every event was delivered to each webhook that subscribes to it, or is accounted for; and receivers got nothing that
 * is not in the file. `settled`: davit was left alone for so long that no delivery to a living receiver may be pending.
 */
export function checkDeliveries(
  file: Database,
  evidence: DeliveryEvidence,
  { settled }: { settled: boolean },
): { violations: Violation[]; counts: DeliveryCounts } {
  const events = new Map(
    file
      .prepare<[], EventRow>('SELECT id, type, deployment_id, project_id, payload FROM events')
      .all()
      .map((event) => [event.id, event]),
  );
  const counts = { events: events.size, deliveries: 0, delivered: 0, pending: 0, held: 0, exhausted: 0 };
  const violations = [...evidence.webhooks.values()]
    .filter(({ deleted, busy }) => !deleted && !busy)
    .flatMap((webhook) => {
      const rows = deliveriesOf(file, webhook.id);
      return [
        ...untold(webhook, events, rows, evidence),
        ...[...rows.values()].flatMap((row) => accountFor(webhook, row, evidence, counts, settled)),
      ];
    });
  for (const [path, inbox] of evidence.inboxes) {
    for (const [eventId, { body }] of inbox.events) {
      const payload = events.get(eventId)?.payload;
      if (payload === undefined) {
        violations.push({ rule: 'who is told of an event can ask for it', detail: `${path} got ${body}` });
      } else if (payload !== body) {
        violations.push({
          rule: 'every attempt sends the same bytes',
          detail: `${path} got ${body}, not ${payload}`,
        });
      }
    }
  }
  return { violations, counts };
}

function deliveriesOf(file: Database, webhookId: string): Map<string, DeliveryRow> {
  const rows = file
    .prepare<[string], DeliveryRow>(`
      SELECT d.id, d.event_id, d.webhook_id, d.status, w.status AS webhook_status, d.attempt_count
        FROM deliveries d JOIN webhooks w ON w.id = d.webhook_id
       WHERE d.webhook_id = ?`)
    .all(webhookId);
  return new Map(rows.map((row) => [row.event_id, row]));
}

/** Events without a delivery, though the webhook certainly subscribed to them when they happened. */
function untold(
  webhook: KnownWebhook,
  events: ReadonlyMap<string, EventRow>,
  rows: ReadonlyMap<string, DeliveryRow>,
  { deployments, sees }: DeliveryEvidence,
): Violation[] {
  return [...events.values()]
    .filter((event) => {
      const deployment = deployments.get(event.deployment_id);
      if (deployment === undefined || deployment.sentAtMs < webhook.subscribedSinceMs) return false;
      const isSure =
        webhook.changeSentAtMs === Number.POSITIVE_INFINITY ||
        (event.type === 'deployment.created' && deployment.acknowledgedAtMs < webhook.changeSentAtMs);
      return (
        isSure && webhook.events.some((type) => type === event.type) && sees(webhook.keyId, event.project_id)
      );
    })
    .filter((event) => !rows.has(event.id))
    .map((event) => ({
      rule: 'every event has a delivery for every webhook that subscribes to it',
      detail: `${webhook.id} (${webhook.path}) has none for ${event.payload}`,
    }));
}

function accountFor(
  webhook: KnownWebhook,
  row: DeliveryRow,
  { inboxes }: DeliveryEvidence,
  counts: DeliveryCounts,
  settled: boolean,
): Violation[] {
  const inbox = inboxes.get(webhook.path);
  const reception = inbox?.events.get(row.event_id);
  const violation = (rule: string) => [
    {
      rule,
      detail: `${webhook.id} (${webhook.path}): ${JSON.stringify(row)}, arrived ${reception?.requests ?? 0} times`,
    },
  ];
  counts.deliveries += 1;
  switch (row.status) {
    case 'delivered':
      counts.delivered += 1;
      return reception?.acknowledged === true ? [] : violation('what is delivered has arrived');
    case 'exhausted':
      counts.exhausted += 1;
      // A receiver that always answers well can miss an attempt while davit is frozen, but not all of them.
      return inbox?.misbehaved === true ? [] : violation('a living receiver is told');
    case 'pending':
      if (row.webhook_status === 'disabled') {
        counts.held += 1;
        return [];
      }
      counts.pending += 1;
      return settled ? violation('a living receiver is told') : [];
    default:
      return row.status satisfies never;
  }
}
