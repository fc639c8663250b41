import t from 'tap';
import { createSemaphore } from '../src/semaphore.ts';

t.test('a semaphore has so many places, and waiters get free ones in turn', async (t) => {
  const places = createSemaphore(2);
  const begun: string[] = [];
  for (const name of ['one', 'two', 'three', 'four']) void places.acquire().then(() => begun.push(name));
  await Promise.resolve();
  t.strictSame(begun, ['one', 'two']);
  places.release();
  await new Promise(setImmediate);
  t.strictSame(begun, ['one', 'two', 'three']);
  places.release();
  places.release();
  places.release();
  await new Promise(setImmediate);
  t.strictSame(begun, ['one', 'two', 'three', 'four']);
  await Promise.all([places.acquire(), places.acquire()]);
});

t.test('a place that was handed on to a waiter is not free as well', async (t) => {
  const places = createSemaphore(1);
  await places.acquire();
  const waited = places.acquire();
  places.release();
  await waited;
  t.equal(places.tryAcquire(), false);
});

t.test('tryAcquire tells at once whether there was a free place', (t) => {
  const places = createSemaphore(2);
  for (const expected of [true, true, false]) t.equal(places.tryAcquire(), expected);
  places.release();
  t.equal(places.tryAcquire(), true);
  t.equal(places.tryAcquire(), false, 'one was given back');
  t.end();
});
