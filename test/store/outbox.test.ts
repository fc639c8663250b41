import t from 'tap';
import type { WebhookId } from '../../src/domain.ts';
import { DAY_MS } from '../../src/durations.ts';
import type { ClaimRequest } from '../../src/store/outbox.ts';
import { newDeliveries, newWebhook, storeWithWebhook, updateWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newKeysWebhook, settlementOf } from '../helpers/outbox.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

t.test(
  'an event has one outbox row for each webhook whose key sees the project and which subscribes',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const projectId = await store.project();
    const elsewhere = await store.project();
    const narrow = { allProjects: false, projectIds: [projectId] };
    const sees = await newKeysWebhook(store, narrow);
    const seesAll = await newKeysWebhook(store, { expiresInMs: DAY_MS });
    await newKeysWebhook(store, { allProjects: false, projectIds: [elsewhere] });
    await newKeysWebhook(store, { expiresInMs: 0 });
    await newKeysWebhook(store, { ...narrow, expiresInMs: 0 });
    await newKeysWebhook(store, {}, ['deployment.failed']);
    for (const { keyId } of [await store.key(), await store.key(narrow)]) {
      await newWebhook(store, keyId);
      await store.writer.write('keys.revoke', { id: keyId });
    }

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

t.test('revoking a key disables its webhooks, and their pending deliveries are not sent', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  await newWebhook(store, keyId);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  t.equal(store.reads.outbox.pendingWebhooks().length, 1);
  await store.writer.write('keys.revoke', { id: keyId });
  t.match(store.query('SELECT status, status_reason FROM webhooks'), [
    { status: 'disabled', status_reason: /revoked/ },
  ]);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
});

t.test('nothing is sent to a deleted webhook, though its deliveries are still pending', async (t) => {
  const { store, id } = await storeWithWebhook(t);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await store.writer.write('webhooks.remove', { id });
  t.strictSame(store.query('SELECT status FROM deliveries'), [{ status: 'pending' }]);
  t.strictSame(store.reads.outbox.pendingWebhooks(), []);
});

t.test(
  'webhooks with pending deliveries are listed with the time of their first, the earliest first',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const projectId = await store.project();
    const { keyId } = await store.key();
    const expected = [];
    for (const type of ['deployment.created', 'deployment.started'] as const) {
      const { id } = await newWebhook(store, keyId, { events: [type] });
      expected.push({
        webhook_id: id,
        key_id: keyId,
        next_attempt_at: effects.now() + 1_000 * expected.length,
      });
    }
    await store.writer.write('deployments.create', newDeployment(projectId));
    effects.advance(1_000);
    await store.writer.write('deployments.create', newDeployment(projectId));
    await store.writer.write('deployments.claim', undefined);
    t.match(store.reads.outbox.pendingWebhooks(), expected);
  },
);

t.test('a claim leaves out deliveries under way, and says when the next one is due', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await newKeysWebhook(store);
  const projectId = await store.project();
  for (let count = 0; count < 3; count++) {
    await store.writer.write('deployments.create', newDeployment(projectId));
    effects.advance(1_000);
  }
  const nowMs = effects.now() - 1_000;
  const claim = (limit: number, seqs: number[], atMs: number) =>
    claimed(store, { webhookId, limit, underWay: seqs, ahead: [] }, atMs);

  t.strictSame(claim(2, [], nowMs), { seqs: [1, 2], nextAtMs: nowMs });
  t.strictSame(claim(2, [1, 2], nowMs), { seqs: [3], nextAtMs: null });
  t.strictSame(claim(2, [1], nowMs - 1), { seqs: [2], nextAtMs: nowMs });
  t.strictSame(claim(2, [1, 2, 3], nowMs), { seqs: [], nextAtMs: null });
});

t.test('successive claims take every delivery once, the earliest due first', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await newKeysWebhook(store);
  await newDeliveries(store, webhookId, 151);
  const atMs = effects.now();
  const pending = store.query<{ seq: number }>('SELECT seq FROM deliveries ORDER BY next_attempt_at, seq');
  const underWay: number[] = [];
  const ahead: number[] = [];
  const claimed: number[] = [];
  for (let count = 0; claimed.length < pending.length; count++) {
    const limit = 1 + (count % 4);
    const [claim] = store.reads.outbox.claim([{ webhookId, limit, underWay, ahead }], atMs);
    const due = claim?.due ?? [];
    t.ok(due.length > 0, `claim ${count}`);
    claimed.push(...due.map(({ seq }) => seq));
    t.equal(claim?.nextAtMs, claimed.length < pending.length ? atMs : null);
    underWay.push(...due.map(({ seq }) => seq));
    // Some are recorded by the time of the next claim.
    for (const delivery of due.filter((_, index) => index % 2 === 0)) {
      await store.writer.write('outbox.settle', settlementOf(delivery, atMs, { kind: 'delivered' }));
      underWay.splice(underWay.indexOf(delivery.seq), 1);
    }
  }
  t.strictSame(
    claimed,
    pending.map(({ seq }) => seq),
  );
});

t.test('a delivery that changed after it was looked up is not claimed', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await newKeysWebhook(store);
  await newDeliveries(store, webhookId, 6);
  const atMs = effects.now();
  const request = { webhookId, limit: 1, underWay: [], ahead: [] as number[] };
  t.strictSame(claimed(store, request, atMs), { seqs: [1], nextAtMs: atMs });
  t.strictSame(request.ahead.slice(0, 3), [2, 3, 4]);
  store.execute(`UPDATE deliveries SET next_attempt_at = ${atMs + 1} WHERE seq = 2`);
  store.execute(`UPDATE deliveries SET status = 'exhausted', next_attempt_at = NULL WHERE seq = 3`);
  store.execute('DELETE FROM deliveries WHERE seq = 4');
  t.strictSame(claimed(store, { ...request, limit: 3 }, atMs), { seqs: [], nextAtMs: atMs });
  t.strictSame(claimed(store, { ...request, underWay: [1] }, atMs), { seqs: [5], nextAtMs: atMs });
});

t.test('a claim has the url, the due deliveries and the live secrets of its own webhook', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const [first, second] = [await newKeysWebhook(store), await newKeysWebhook(store)];
  await updateWebhook(store, second, { url: 'https://other.example/hook' });
  await store.writer.write('webhooks.rotate', { id: second, overlapMs: 60_000 });
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const request = (webhookId: WebhookId) => ({ webhookId, limit: 4, underWay: [], ahead: [] });

  const claims = store.reads.outbox.claim([request(second), request(first)], effects.now());
  t.match(claims, [
    { due: [{ webhook_id: second, url: 'https://other.example/hook' }] },
    { due: [{ webhook_id: first, url: /^https:/ }] },
  ]);
  t.strictSame(
    claims.map(({ secrets }) => secrets),
    [second, first].map((id) => store.reads.webhooks.pingRecipient(id, effects.now())?.secrets),
  );
  t.strictSame(
    claims.map(({ secrets }) => secrets.length),
    [2, 1],
  );
});

t.test('nothing is claimed for a webhook that is disabled or deleted', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const disabled = await newKeysWebhook(store);
  const deleted = await newKeysWebhook(store);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  await updateWebhook(store, disabled, { status: 'disabled' });
  await store.writer.write('webhooks.remove', { id: deleted });
  const requests = [disabled, deleted].map((webhookId) => ({
    webhookId,
    limit: 4,
    underWay: [],
    ahead: [],
  }));
  const nothing = { due: [], secrets: [], nextAtMs: null };
  for (const nowMs of [effects.now(), effects.now() - 1]) {
    t.strictSame(store.reads.outbox.claim(requests, nowMs), [nothing, nothing]);
  }
});

t.test('a claim costs the same whatever is pending', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const webhookId = await newKeysWebhook(store);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const atMs = effects.now() + 60_000;
  const claim = () => store.reads.outbox.claim([{ webhookId, limit: 4, underWay: [], ahead: [] }], atMs);
  // The quickest of many: other tests run at the same time.
  const quickestMs = () => {
    const durationsMs = Array.from({ length: 200 }, () => {
      const startedAt = performance.now();
      claim();
      return performance.now() - startedAt;
    });
    return Math.min(...durationsMs);
  };
  copyPending(store, 10);
  const fewMs = quickestMs();
  copyPending(store, 100_000);
  const manyMs = quickestMs();
  // One look at each of them would take a hundred times as long.
  t.ok(manyMs < 10 * fewMs, `${fewMs} ms with 10 pending, ${manyMs} ms with 100,000`);
});

/** What a claim for one webhook takes. */
function claimed(store: TestStore, request: ClaimRequest, nowMs: number) {
  const [claim] = store.reads.outbox.claim([request], nowMs);
  return { seqs: claim?.due.map(({ seq }) => seq), nextAtMs: claim?.nextAtMs };
}

/** `count` more pending deliveries like the last one. */
function copyPending(store: TestStore, count: number): void {
  store.execute(`
    WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < ${count})
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at,
                            ladder_started_at, ladder_trigger)
    SELECT 'dlv_${count}x' || number, event_id, event_type, webhook_id, 'pending', next_attempt_at, created_at,
           ladder_started_at, ladder_trigger
      FROM numbers, (SELECT * FROM deliveries ORDER BY seq DESC LIMIT 1)`);
}
