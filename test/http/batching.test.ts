import t from 'tap';
import { createBatching } from '../../src/http/batching.ts';

t.test('a single request goes on at the end of the turn of the event loop', async (t) => {
  const order: string[] = [];
  const joinBatch = createBatching(3);
  const alone = joinBatch().then(() => order.push('alone'));
  await soon();
  order.push('the rest of the turn');
  await alone;
  t.strictSame(order, ['the rest of the turn', 'alone']);
  await joinBatch();
  await joinBatch();
});

t.test('requests of the same turn go on together, in the order of arrival', async (t) => {
  const order: string[] = [];
  const joinBatch = createBatching(3);
  const first = joinBatch().then(() => order.push('first'));
  await soon();
  const second = joinBatch().then(() => order.push('second'));
  await Promise.all([first, second]);
  t.strictSame(order, ['first', 'second']);
});

t.test('requests go on as soon as they reach the maximum; the next one waits again', async (t) => {
  const order: string[] = [];
  const joinBatch = createBatching(2);
  const three = ['first', 'second', 'third'].map((name) => joinBatch().then(() => order.push(name)));
  await soon();
  t.strictSame(order, ['first', 'second']);
  await Promise.all(three);
  t.strictSame(order, ['first', 'second', 'third']);
});

/** Later in the same turn of the event loop, after the reactions to all promises resolved by now. */
function soon(): Promise<void> {
  return new Promise((resolve) => process.nextTick(() => queueMicrotask(resolve)));
}
