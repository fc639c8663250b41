import t from 'tap';
import { createPlaces } from '../src/places.ts';

t.test('there are so many places, and who waits gets one in turn', async (t) => {
  const places = createPlaces(2);
  const begun: string[] = [];
  for (const name of ['one', 'two', 'three', 'four']) void places.take().then(() => begun.push(name));
  await Promise.resolve();
  t.strictSame(begun, ['one', 'two']);
  places.leave();
  await new Promise(setImmediate);
  t.strictSame(begun, ['one', 'two', 'three']);
  places.leave();
  places.leave();
  places.leave();
  await new Promise(setImmediate);
  t.strictSame(begun, ['one', 'two', 'three', 'four']);
  await Promise.all([places.take(), places.take()]);
});

t.test('a place that was handed on is no place more', async (t) => {
  const places = createPlaces(1);
  await places.take();
  const waited = places.take();
  places.leave();
  await waited;
  t.equal(places.takeNow(), false);
});

t.test('who will not wait is told whether there was one', (t) => {
  const places = createPlaces(1);
  t.equal(places.takeNow(), true);
  t.equal(places.takeNow(), false);
  places.leave();
  t.equal(places.takeNow(), true);
  t.end();
});
