import { pino } from 'pino';
import type { Test } from 'tap';
import { createDispatcher, type Dispatcher, type DispatcherOptions } from '../../src/deliver/dispatcher.ts';
import type { Effects } from '../../src/effects.ts';
import { testSender } from './deliveries.ts';
import { DEFAULT_SCHEDULE } from './schedule.ts';
import type { TestStore } from './store.ts';

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

/** Looks until nothing more is due at this moment, and what was sent is recorded. */
export async function deliverDue(dispatcher: Dispatcher, effects: Effects): Promise<number | null> {
  for (;;) {
    const nextAtMs = await dispatcher.tick();
    await dispatcher.settled();
    if (nextAtMs === null || nextAtMs > effects.now()) return nextAtMs;
  }
}
