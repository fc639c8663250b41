import fc from 'fast-check';
import t, { type Test } from 'tap';
import type { Sender } from '../../src/deliver/send.ts';
import type { WebhookId } from '../../src/domain.ts';
import { HOUR_MS } from '../../src/durations.ts';
import { newDeliveries, newWebhook, testSender, updateWebhook } from '../helpers/deliveries.ts';
import { deliverDue, testDispatcher } from '../helpers/dispatcher.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { type Answer, hangUp, reset, startReceiver, status } from '../helpers/receiver.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

/*
 * Whatever receivers, people, clocks and power cuts do: a delivery is delivered, or pending with a next time, or
 * exhausted, or held, and nothing else. And in the end each one arrived or ran out of attempts.
 */

const ANSWERS: Record<string, Answer> = {
  ok: status(200),
  failure: status(500),
  later: status(503, { headers: { 'Retry-After': '120' } }),
  gone: status(410),
  reset: reset(),
  hangUp: hangUp(),
};

const step = fc.oneof(
  fc.record({ kind: fc.constant('events' as const), count: fc.integer({ min: 1, max: 4 }) }),
  fc.record({ kind: fc.constant('answer' as const), answer: fc.constantFrom(...Object.keys(ANSWERS)) }),
  fc.record({ kind: fc.constant('look' as const) }),
  fc.record({
    kind: fc.constant('wait' as const),
    forMs: fc.constantFrom(1_000, 40_000, HOUR_MS, 25 * HOUR_MS),
  }),
  fc.record({ kind: fc.constant('kill' as const) }),
  fc.record({ kind: fc.constant('setClock' as const), byMs: fc.constantFrom(-HOUR_MS, HOUR_MS) }),
  fc.record({
    kind: fc.constant('setStatus' as const),
    status: fc.constantFrom('enabled' as const, 'disabled' as const),
  }),
  fc.record({ kind: fc.constant('redeliver' as const), which: fc.nat(20) }),
);
type Step = typeof step extends fc.Arbitrary<infer Value> ? Value : never;

/** Another seed walks other ways: DAVIT_TEST_SEED=7 tap run test/deliver/accounting.test.ts */
const seed = Number(process.env['DAVIT_TEST_SEED'] ?? 20261121);
const walks = fc.sample(fc.array(step, { minLength: 10, maxLength: 40 }), { numRuns: 25, seed });

walks.forEach((steps, index) => {
  t.test(`walk ${index + 1} of seed ${seed}`, async (t) => {
    const service = await davit(t);
    for (const step of steps) {
      await service.take(step);
      t.strictSame(unaccounted(service.store, service.effects.now()), [], JSON.stringify(step));
    }
    await service.recover();
    t.strictSame(
      service.store.query("SELECT id, status FROM deliveries WHERE status NOT IN ('delivered', 'exhausted')"),
      [],
    );
    const arrived = new Set(service.receiver.requests.map(({ headers }) => headers['webhook-id']));
    const delivered = service.store.query<{ event_id: string }>(
      "SELECT event_id FROM deliveries WHERE status = 'delivered'",
    );
    t.ok(delivered.every(({ event_id }) => arrived.has(event_id)));
  });
});

/** Deliveries that are in no state that they may be in. */
function unaccounted(store: TestStore, nowMs: number) {
  return store.query(
    `SELECT d.* FROM deliveries d JOIN webhooks w ON w.id = d.webhook_id
      WHERE NOT CASE d.status
              WHEN 'delivered' THEN d.next_attempt_at IS NULL AND d.delivered_at IS NOT NULL
                   AND EXISTS (SELECT 1 FROM attempts WHERE delivery_id = d.id AND status_code BETWEEN 200 AND 299)
              WHEN 'exhausted' THEN d.next_attempt_at IS NULL AND d.ladder_attempts > 0
              -- Held while the webhook is disabled; otherwise the next time comes within a day. While the clock
              -- is an hour ahead of what it will be set back to, an hour more.
              WHEN 'pending' THEN w.status = 'disabled' OR d.next_attempt_at <= ? + 25 * ${HOUR_MS}
            END
         OR d.attempt_count <> (SELECT count(*) FROM attempts WHERE delivery_id = d.id)`,
    nowMs,
  );
}

async function davit(t: Test) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const receiver = await startReceiver(t);
  const { keyId } = await store.key();
  const { id } = await newWebhook(store, keyId, { url: receiver.url });
  let sender: Sender = testSender(t);
  let dispatcher = testDispatcher(t, store, effects, { sender });

  return { effects, store, receiver, take, recover };

  async function take(step: Step): Promise<void> {
    switch (step.kind) {
      case 'events':
        await newDeliveries(store, id, step.count);
        return;
      case 'answer': {
        const answer = ANSWERS[step.answer];
        if (answer !== undefined) receiver.answerWith(answer);
        return;
      }
      case 'look':
        await deliverDue(dispatcher, effects);
        return;
      case 'wait':
        effects.advance(step.forMs);
        await deliverDue(dispatcher, effects);
        return;
      case 'kill':
        await kill();
        return;
      case 'setClock':
        effects.jump(step.byMs);
        return;
      case 'setStatus':
        await setStatus(id, step.status);
        return;
      case 'redeliver': {
        const rows = store.query<{ id: never }>('SELECT id FROM deliveries ORDER BY seq');
        const row = rows[step.which % Math.max(1, rows.length)];
        if (row !== undefined) await store.writer.write('deliveries.redeliver', { id: row.id });
        return;
      }
      default:
        step satisfies never;
    }
  }

  /** In the middle of an attempt: whether it was received and recorded is left to chance. */
  async function kill(): Promise<void> {
    await dispatcher.tick();
    sender.close();
    sender = testSender(t);
    dispatcher = testDispatcher(t, store, effects, { sender });
  }

  async function setStatus(webhookId: WebhookId, status: 'enabled' | 'disabled'): Promise<void> {
    await updateWebhook(store, webhookId, { status });
  }

  /** From now on all is well: until nothing is pending, or far too long. */
  async function recover(): Promise<void> {
    receiver.answerWith(status(200));
    await setStatus(id, 'enabled');
    for (let look = 0; look < 500; look++) {
      const nextAtMs = await deliverDue(dispatcher, effects);
      const [{ pending } = { pending: 0 }] = store.query<{ pending: number }>(
        "SELECT count(*) AS pending FROM deliveries WHERE status = 'pending'",
      );
      if (pending === 0) return;
      effects.advance(Math.max(100, (nextAtMs ?? 0) - effects.now()));
    }
  }
}
