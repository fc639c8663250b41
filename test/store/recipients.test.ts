import t, { type Test } from 'tap';
import type { KeyId, WebhookId } from '../../src/domain.ts';
import { recipientReads } from '../../src/store/recipients.ts';
import { newWebhook, updateWebhook } from '../helpers/deliveries.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

type Change = (store: TestStore, id: WebhookId, keyId: KeyId) => Promise<unknown>;

const CHANGES: [what: string, change: Change][] = [
  ['another url', (store, id) => updateWebhook(store, id, { url: 'https://b.example/' })],
  ['a disabling', (store, id) => updateWebhook(store, id, { status: 'disabled' })],
  [
    'a disabling and enabling',
    async (store, id) => {
      await updateWebhook(store, id, { status: 'disabled' });
      await updateWebhook(store, id, { status: 'enabled' });
    },
  ],
  ['a rotation', ({ writer }, id) => writer.write('webhooks.rotate', { id, overlapMs: 60_000 })],
  ['a rotation at once', ({ writer }, id) => writer.write('webhooks.rotate', { id, overlapMs: 0 })],
  ['a deletion', ({ writer }, id) => writer.write('webhooks.remove', { id })],
  ['a revoked key', ({ writer }, _, id) => writer.write('keys.revoke', { id })],
];

for (const [what, change] of CHANGES) {
  t.test(`${what} is seen by the next read of the recipient`, async (t) => {
    const effects = fakeEffects();
    const { store, keyId, webhookId, url, recipient } = await remembering(t, effects);
    const before = recipient();
    t.match(before, { url, enabledAtMs: effects.now() });
    effects.advance(1_000);
    await change(store, webhookId, keyId);
    const after = recipient();
    t.notSame(after, before);
    t.strictSame(after, lookedUpAnew(store, webhookId, effects.now()));
  });
}

t.test('a secret added, changed or removed by anybody is known at the next lookup', async (t) => {
  const effects = fakeEffects();
  const { store, webhookId, recipient } = await remembering(t, effects);
  recipient();
  for (const sql of [
    `INSERT INTO webhook_secrets (webhook_id, secret, created_at) VALUES ('${webhookId}', 'added', 1)`,
    `UPDATE webhook_secrets SET expires_at = ${effects.now() + 1} WHERE secret = 'added'`,
    `UPDATE webhook_secrets SET expires_at = 1 WHERE secret = 'added'`,
    `UPDATE webhook_secrets SET expires_at = NULL WHERE secret = 'added'`,
    "DELETE FROM webhook_secrets WHERE secret = 'added'",
  ]) {
    store.execute(sql);
    t.strictSame(recipient(), lookedUpAnew(store, webhookId, effects.now()), sql);
  }
});

t.test('a secret whose time is over signs no more', async (t) => {
  const effects = fakeEffects();
  const { store, webhookId, recipient } = await remembering(t, effects);
  await store.writer.write('webhooks.rotate', { id: webhookId, overlapMs: 60_000 });
  effects.advance(59_999);
  t.equal(recipient()?.secrets.length, 2);
  effects.advance(1);
  t.strictSame(recipient()?.secrets, store.reads.webhooks.pingRecipient(webhookId, effects.now())?.secrets);
  t.equal(recipient()?.secrets.length, 1);
});

t.test('the newest secret signs first, then the others, the newest first', async (t) => {
  const effects = fakeEffects();
  const { store, webhookId, recipient } = await remembering(t, effects);
  const rotate = () => store.writer.write('webhooks.rotate', { id: webhookId, overlapMs: 60_000 });
  for (let count = 0; count < 3; count++) {
    effects.advance(1);
    await rotate();
    t.strictSame(recipient()?.secrets, store.reads.webhooks.pingRecipient(webhookId, effects.now())?.secrets);
  }
  for (let count = 0; count < 3; count++) {
    const { signing_secret } = await rotate();
    t.equal(recipient()?.secrets[0], signing_secret, 'also within one millisecond');
  }
});

t.test('when a clock that ran ahead is set right, a secret that seemed to be over signs again', async (t) => {
  const effects = fakeEffects();
  const { store, webhookId, recipient } = await remembering(t, effects);
  await store.writer.write('webhooks.rotate', { id: webhookId, overlapMs: 60_000 });
  const both = recipient()?.secrets;
  t.equal(both?.length, 2);
  effects.jump(120_000);
  t.equal(recipient()?.secrets.length, 1);
  effects.jump(-120_000);
  t.strictSame(recipient()?.secrets, both);
});

t.test('a webhook is not read again after changes that do not concern sending', async (t) => {
  const effects = fakeEffects();
  const { store, webhookId, recipient } = await remembering(t, effects);
  const before = recipient();
  store.execute('UPDATE webhooks SET last_success_at = 1, consecutive_failures = 7, failing_since = 1');
  await updateWebhook(store, webhookId, { description: 'ours' });
  await newWebhook(store, (await store.key()).keyId);
  t.strictSame(recipient(), before);
  const changes = store.query('SELECT webhook_changes FROM instance');
  store.execute('UPDATE webhooks SET last_success_at = 2, consecutive_failures = 0, failing_since = NULL');
  t.strictSame(store.query('SELECT webhook_changes FROM instance'), changes);
  // Only the trigger has it read again: without that the old url is remembered.
  store.execute(`DROP TRIGGER webhook_is_sent_to_otherwise; UPDATE webhooks SET url = 'https://c.example/'`);
  t.strictSame(recipient(), before);
});

t.test('that a webhook is disabled is remembered, too, until something changes', async (t) => {
  const { store, webhookId, recipient } = await remembering(t, fakeEffects());
  await updateWebhook(store, webhookId, { status: 'disabled' });
  t.equal(recipient(), undefined);
  const [trigger = {}] = store.query(
    "SELECT sql FROM sqlite_schema WHERE name = 'webhook_is_sent_to_otherwise'",
  );
  store.execute(
    `DROP TRIGGER webhook_is_sent_to_otherwise; UPDATE webhooks SET status = 'enabled'; ${trigger['sql']}`,
  );
  t.equal(recipient(), undefined, 'no trigger fired');
  store.execute('UPDATE webhooks SET enabled_at = 2');
  t.match(recipient(), { enabledAtMs: 2 });
});

t.test('of 9,000 webhooks each recipient is right, and only so many are remembered', async (t) => {
  const effects = fakeEffects();
  const { store, webhookId, url, recipients } = await remembering(t, effects);
  store.execute(`
    WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 9000)
    INSERT INTO webhooks (id, key_id, url, events, status, created_at, enabled_at)
    SELECT 'whk_' || number, key_id, 'https://example.com/' || number, events, 'enabled', 1, 1 FROM numbers, webhooks;
    INSERT INTO webhook_secrets (webhook_id, secret, created_at) SELECT id, 's' || seq, 1 FROM webhooks`);
  for (let first = 1; first <= 9_000; first += 64) {
    const ids = Array.from(
      { length: 64 },
      (_, index) => `whk_${Math.min(9_000, first + index)}` as WebhookId,
    );
    const found = recipients(ids);
    t.ok(ids.every((id) => found.get(id)?.url === `https://example.com/${id.slice(4)}`));
    t.ok(found.size <= 4_096 + 64);
  }
  t.equal(recipients([webhookId]).get(webhookId)?.url, url);
});

/** A webhook, and the remembered read of its recipient. */
async function remembering(t: Test, effects: FakeEffects) {
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  const { id: webhookId, url } = await newWebhook(store, keyId);
  const reads = recipientReads(store.openReader());
  const recipients = (ids: WebhookId[]) => reads.recipients(ids, effects.now());
  return {
    store,
    keyId,
    webhookId,
    url,
    recipients,
    recipient: () => recipients([webhookId]).get(webhookId),
  };
}

function lookedUpAnew(store: TestStore, id: WebhookId, nowMs: number) {
  return recipientReads(store.openReader()).recipients([id], nowMs).get(id);
}
