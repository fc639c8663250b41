import t from 'tap';
import type { EventType, WebhookId } from '../../src/domain.ts';
import type { Settlement } from '../../src/store/outbox.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

t.test(
  'an event has one outbox row for each webhook whose key sees the project and which subscribes',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const projectId = await store.project();
    const elsewhere = await store.project();
    const inAYear = effects.now() + 365 * 86_400_000;
    const sees = await webhookOf(store, { allProjects: false, projectIds: [projectId] });
    const seesAll = await webhookOf(store, { expiresAtMs: inAYear });
    await webhookOf(store, { allProjects: false, projectIds: [elsewhere] });
    await webhookOf(store, { expiresAtMs: effects.now() });
    await webhookOf(store, {}, ['deployment.failed']);
    const revoked = await store.key();
    await store.writer.write('webhooks.create', { ...WEBHOOK, keyId: revoked.keyId });
    await store.writer.write('keys.revoke', { id: revoked.keyId });

    await store.writer.write('deployments.create', newDeployment(projectId));
    t.strictSame(
      store
        .query<{ webhook_id: string }>('SELECT webhook_id FROM deliveries ORDER BY seq')
        .map((row) => row.webhook_id)
        .sort(),
      [sees, seesAll].sort(),
    );
  },
);

t.test('revoking a key disables its webhooks, and what was waiting is not sent', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  await store.writer.write('webhooks.create', { ...WEBHOOK, keyId });
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  t.equal(store.reads.outbox.pendingWebhooks().length, 1);
  await store.writer.write('keys.revoke', { id: keyId });
  t.match(store.query('SELECT status, status_reason FROM webhooks'), [
    { status: 'disabled', status_reason: /revoked/ },
  ]);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
});

t.test('a retry is due at its time and not before', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await webhookOf(store);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const [due] = store.reads.outbox.dueOf(webhookId, effects.now(), 10);
  if (due === undefined) throw new Error('nothing is due');
  const atMs = effects.now() + 5_000;
  await store.writer.write('outbox.settle', settlement(due, effects.now(), { kind: 'retry', atMs }));

  t.strictSame(store.reads.outbox.dueOf(webhookId, atMs - 1, 10), []);
  t.match(store.reads.outbox.dueOf(webhookId, atMs, 10), [{ id: due.id, ladder_attempts: 1 }]);
  t.match(store.query('SELECT number, status_code, error, trigger FROM attempts'), [
    { number: 1, status_code: 500, error: 'status', trigger: 'schedule' },
  ]);
  t.match(store.reads.webhooks.get(webhookId), {
    consecutive_failures: 1,
    last_failure_at: '2026-11-21T08:00:00.012Z',
  });
});

t.test('a webhook that has only failed for five days is disabled and says why', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await webhookOf(store);
  const projectId = await store.project();
  const failOnce = async () => {
    await store.writer.write('deployments.create', newDeployment(projectId, { maxQueued: null }));
    const [due] = store.reads.outbox.dueOf(webhookId, effects.now(), 1);
    if (due === undefined) throw new Error('nothing is due');
    await store.writer.write('outbox.settle', settlement(due, effects.now(), { kind: 'exhausted' }));
  };
  await failOnce();
  effects.advance(5 * 86_400_000 - 1);
  await failOnce();
  t.match(store.reads.webhooks.get(webhookId), { status: 'enabled' });
  effects.advance(1);
  await failOnce();
  t.match(store.reads.webhooks.get(webhookId), {
    status: 'disabled',
    status_reason: /5 days/,
    consecutive_failures: 3,
  });

  await store.writer.write('deployments.create', newDeployment(projectId, { maxQueued: null }));
  t.match(
    store.query("SELECT status FROM deliveries WHERE status = 'pending'"),
    [{ status: 'pending' }],
    'kept, not dropped',
  );
  t.strictSame(store.reads.outbox.pendingWebhooks(), [], 'and not sent');
});

t.test('a success ends a row of failures', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await webhookOf(store);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const [due] = store.reads.outbox.dueOf(webhookId, effects.now(), 1);
  if (due === undefined) throw new Error('nothing is due');
  await store.writer.write(
    'outbox.settle',
    settlement(due, effects.now(), { kind: 'retry', atMs: effects.now() }),
  );
  await store.writer.write('outbox.settle', settlement(due, effects.now(), { kind: 'delivered' }));
  t.match(store.reads.webhooks.get(webhookId), {
    consecutive_failures: 0,
    last_success_at: '2026-11-21T08:00:00.012Z',
  });
  t.match(store.query('SELECT status, attempt_count, next_attempt_at FROM deliveries'), [
    { status: 'delivered', attempt_count: 2, next_attempt_at: null },
  ]);
});

const WEBHOOK = {
  url: 'https://example.com/hook',
  events: ['deployment.created'] as EventType[],
  description: null,
};

async function webhookOf(
  store: TestStore,
  key: Parameters<TestStore['key']>[0] = {},
  events = WEBHOOK.events,
): Promise<WebhookId> {
  const { keyId } = await store.key(key);
  const webhook = await store.writer.write('webhooks.create', { ...WEBHOOK, events, keyId });
  return webhook.id;
}

function settlement(
  due: {
    id: Settlement['deliveryId'];
    webhook_id: WebhookId;
    ladder_started_at: number;
    ladder_attempts: number;
  },
  atMs: number,
  next: Settlement['next'],
): Settlement {
  return {
    deliveryId: due.id,
    webhookId: due.webhook_id,
    attempt: {
      atMs,
      statusCode: next.kind === 'delivered' ? 200 : 500,
      error: next.kind === 'delivered' ? null : 'status',
      durationMs: 12,
      remoteAddress: '93.184.216.34',
      responseBody: '',
      trigger: 'schedule',
    },
    next,
    ladderAttempts: due.ladder_attempts + 1,
    ladderStartedAtMs: due.ladder_started_at,
    disableReason: null,
  };
}
