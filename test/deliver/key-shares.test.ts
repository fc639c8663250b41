import t from 'tap';
import { createSharedPlaces, createSharedSemaphore, type Owner } from '../../src/deliver/key-shares.ts';
import type { KeyId } from '../../src/domain.ts';

const ONE = 'one' as KeyId;
const TWO = 'two' as KeyId;
const THREE = 'three' as KeyId;

t.test('a key leaves a fifth of what others leave it, and has one place in any case', async (t) => {
  const places = createSharedPlaces(10);
  t.equal(places.freeTo(ONE), 8);
  places.take(TWO, 5);
  t.equal(places.freeTo(ONE), 4);
  places.take(ONE, 3);
  t.equal(places.freeTo(ONE), 1);
  places.take(TWO, 1);
  t.equal(places.freeTo(ONE), 0);
  t.equal(places.freeTo(THREE), 1);
  t.equal(places.free(), 1);
  places.take(THREE, 1);
  t.equal(places.freeTo('four' as KeyId), 0);
});

t.test('what a key has beyond its share of a part takes places of the whole only', async (t) => {
  const whole = createSharedPlaces(30);
  const part = createSharedPlaces(10, whole);
  part.take(ONE, 22);
  t.strictSame([part.free(), whole.free()], [2, 8]);
  t.equal(part.freeTo(ONE), -14);
  t.equal(part.freeTo(TWO), 1);
  part.take(ONE, -17);
  t.equal(part.freeTo(TWO), 4);
  whole.take(THREE, 23);
  t.strictSame([part.free(), part.freeTo(TWO)], [2, 1], 'as the whole has no more');
});

t.test('one key cannot take all permits, and gives up none for it', async (t) => {
  const semaphore = createSharedSemaphore(10);
  const taken = (key: Owner) => {
    let count = 0;
    while (semaphore.tryAcquire(key)) count += 1;
    return count;
  };
  t.equal(taken(ONE), 8);
  t.equal(taken(TWO), 1);
  t.equal(taken(THREE), 1);
  for (let count = 0; count < 8; count++) semaphore.release(ONE);
  t.equal(taken(TWO), 6, 'what one returned is for others');
});

t.test('keys get permits in turn, and a key its own in order', async (t) => {
  const semaphore = createSharedSemaphore(3);
  const got: string[] = [];
  const acquire = (key: KeyId, name: string) => void semaphore.acquire(key).then(() => got.push(name));
  for (const name of ['one-1', 'one-2', 'one-3']) acquire(ONE, name);
  for (const name of ['two-1', 'two-2']) acquire(TWO, name);
  acquire(THREE, 'three-1');
  await new Promise(setImmediate);
  t.strictSame(got, ['one-1', 'one-2', 'two-1']);
  semaphore.release(TWO);
  await new Promise(setImmediate);
  t.strictSame(got.slice(3), ['two-2']);
  semaphore.release(ONE);
  await new Promise(setImmediate);
  t.strictSame(got.slice(4), ['three-1']);
  semaphore.release(ONE);
  await new Promise(setImmediate);
  t.strictSame(got.slice(5), ['one-3']);
});

t.test('a permit for which a key waited is not free as well', async (t) => {
  const semaphore = createSharedSemaphore(1);
  await semaphore.acquire(ONE);
  const waited = semaphore.acquire(TWO);
  t.equal(semaphore.tryAcquire(TWO), false);
  semaphore.release(ONE);
  await waited;
  t.equal(semaphore.tryAcquire(ONE), false);
  semaphore.release(TWO);
  t.equal(semaphore.tryAcquire(ONE), true);
});
