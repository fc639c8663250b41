import { pino } from 'pino';
import type { Test } from 'tap';
import { createDispatcher, type Dispatcher, type DispatcherOptions } from '../../src/deliver/dispatcher.ts';
import type { Effects } from '../../src/effects.ts';
import type { WebhookWithSecret } from '../../src/store/webhooks.ts';
import { newWebhook, testSender } from './deliveries.ts';
import { type FakeEffects, fakeEffects } from './effects.ts';
import { DEFAULT_SCHEDULE } from './schedule.ts';
import { type TestStore, testStore } from './store.ts';

/** A dispatcher with the real sender; `tick` is called by the test. */
export function testDispatcher(
  t: Test,
  store: TestStore,
  effects: Effects,
  options: Partial<DispatcherOptions> = {},
): Dispatcher {
  return createDispatcher({
    reads: store.reads,
    writer: store.writer,
    sender: options.sender ?? testSender(t),
    schedule: DEFAULT_SCHEDULE,
    effects,
    logger: pino({ level: 'silent' }),
    ...options,
  });
}

/** A store whose events a dispatcher sends; `wakes.next()` tells when it wants to look again. */
export function dispatching(t: Test, effects = fakeEffects()) {
  const store = testStore(t, effects);
  const wakes = createWakes();
  return { store, effects, wakes, dispatcher: testDispatcher(t, store, effects, { wake: wakes.wake }) };
}

function createWakes() {
  let waiting: (() => void)[] = [];
  return {
    wake() {
      for (const resolve of waiting) resolve();
      waiting = [];
    },
    next: () => new Promise<void>((resolve) => waiting.push(resolve)),
  };
}

/** A webhook of a key that sees all projects. */
export async function subscribe(store: TestStore, url: string): Promise<WebhookWithSecret> {
  const { keyId } = await store.key();
  return await newWebhook(store, keyId, { url });
}

/** Looks until nothing more is due at this moment, and what was sent is recorded. */
export async function deliverDue(dispatcher: Dispatcher, effects: Effects): Promise<number | null> {
  for (;;) {
    const nextAtMs = await dispatcher.tick();
    await dispatcher.settled();
    if (nextAtMs === null || nextAtMs > effects.now()) return nextAtMs;
  }
}

/** Lets time pass until nothing is pending any more. */
export async function deliverAll(dispatcher: Dispatcher, effects: FakeEffects): Promise<void> {
  for (;;) {
    const nextAtMs = await deliverDue(dispatcher, effects);
    if (nextAtMs === null) return;
    effects.advance(nextAtMs - effects.now());
  }
}
