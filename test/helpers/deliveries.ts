import type { Test } from 'tap';
import type { UrlRules } from '../../src/address.ts';
import { createSender, type Sender, type SenderOptions } from '../../src/deliver/send.ts';
import type { DeliveryId, EventType, KeyId, Webhook, WebhookId } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import type { NewReplay, Replay } from '../../src/store/replays.ts';
import type { Store } from '../../src/store/store.ts';
import type { WebhookUpdate, WebhookWithSecret } from '../../src/store/webhooks.ts';
import { cidr } from './cidr.ts';
import { type FakeEffects, fakeEffects } from './effects.ts';
import { newDeployment, type TestStore, testStore } from './store.ts';

/** Receivers of tests listen on the loopback, over plain HTTP. */
export const LOOPBACK_RULES: UrlRules = { allowHttp: true, allowedCidrs: [cidr('127.0.0.0/8')] };

/** The real sender; closed when the test has ended. */
export function testSender(t: Test, options: Partial<SenderOptions> = {}): Sender {
  const sender = createSender({ timeoutMs: 10_000, ...LOOPBACK_RULES, ...options }, realEffects);
  t.teardown(() => sender.close());
  return sender;
}

export async function newWebhook(
  store: Pick<TestStore, 'writer'>,
  keyId: KeyId,
  { url = 'https://example.com/hook', events = ['deployment.created'] as EventType[] } = {},
): Promise<WebhookWithSecret> {
  return await store.writer.write('webhooks.create', { keyId, url, events, description: null });
}

export function updateWebhook(
  { writer }: Pick<TestStore, 'writer'>,
  id: WebhookId,
  changes: Omit<WebhookUpdate, 'id' | 'disableReason'>,
): Promise<Webhook> {
  return writer.write('webhooks.update', { id, ...changes, disableReason: 'disabled by a test' });
}

/** A store with one webhook, of a key that sees all projects. */
export async function storeWithWebhook(
  t: Test,
): Promise<{ store: TestStore; effects: FakeEffects; keyId: KeyId; id: WebhookId }> {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId);
  return { store, effects, keyId, id };
}

/** Lets `count` deployments happen, and gives the webhook's deliveries of them, oldest first. */
export async function newDeliveries(
  store: TestStore,
  webhookId: WebhookId,
  count: number,
): Promise<DeliveryId[]> {
  const projectId = await store.project();
  const deployment = newDeployment(projectId, { maxQueued: null });
  await Promise.all(
    Array.from({ length: count }, () => store.writer.write('deployments.create', deployment)),
  );
  return store
    .query<{ id: DeliveryId }>(
      'SELECT id FROM deliveries WHERE webhook_id = ? ORDER BY seq DESC LIMIT ?',
      webhookId,
      count,
    )
    .map(({ id }) => id)
    .reverse();
}

/** Requests a replay, by default of all of the webhook's deliveries by now. */
export function newReplay(
  { reads, writer }: Pick<Store, 'reads' | 'writer'>,
  effects: Pick<Effects, 'now'>,
  webhookId: WebhookId,
  changes: Partial<NewReplay> = {},
): Promise<Replay> {
  return writer.write('replays.create', {
    webhookId,
    sinceMs: 0,
    untilMs: effects.now(),
    storedStatus: null,
    ...reads.replays.latest(webhookId),
    status: null,
    count: 1,
    ...changes,
  });
}

/** As the dispatcher leaves them after their last attempt. */
export function endDeliveries(
  store: TestStore,
  ids: readonly DeliveryId[],
  status: 'delivered' | 'exhausted',
): void {
  for (const id of ids) {
    store.execute(`
      UPDATE deliveries
         SET status = '${status}', next_attempt_at = NULL, attempt_count = 1, ladder_attempts = 1,
             delivered_at = ${status === 'delivered' ? 'created_at + 20' : 'NULL'}
       WHERE id = '${id}'`);
  }
}

/** `count` more deliveries as the last one, of the same event, delivered: what a busy month leaves. */
export function copyDeliveries(store: TestStore, count: number): void {
  store.execute(`
    WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < ${count})
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, attempt_count, created_at, delivered_at,
                            ladder_started_at, ladder_trigger)
    SELECT 'dlv_copy' || number, event_id, event_type, webhook_id, 'delivered', 1, created_at, created_at,
           ladder_started_at, ladder_trigger
      FROM numbers, (SELECT * FROM deliveries ORDER BY seq DESC LIMIT 1)`);
}

/** `count` more of each delivery, that wait for a retry: the first until `firstAtMs`, each other a millisecond longer. */
export function copyWaiting(store: TestStore, count: number, firstAtMs: number): void {
  store.execute(`
    WITH RECURSIVE numbers (number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM numbers WHERE number < ${count} - 1)
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at,
                            ladder_started_at, ladder_attempts, ladder_trigger)
    SELECT id || number, event_id, event_type, webhook_id, 'pending', ${firstAtMs} + number, created_at,
           ladder_started_at, 1, ladder_trigger
      FROM numbers, deliveries`);
}
