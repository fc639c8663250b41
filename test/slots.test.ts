import t from 'tap';
import { createSlots } from '../src/slots.ts';

t.test('a value is taken out once, by the number of its place', async (t) => {
  const slots = createSlots<string>();
  const [one, other] = [slots.put('one'), slots.put('other')];
  t.not(one, other);
  t.strictSame(slots.values(), ['one', 'other']);
  t.equal(slots.take(one), 'one');
  t.equal(slots.take(one), undefined);
  t.equal(slots.take(99), undefined);
  t.strictSame(slots.values(), ['other']);
  const places = ['a', 'b', 'c'].map((value) => slots.put(value));
  t.equal(new Set(places).size, 3, 'what was taken out twice is one free place');
});

t.test('places are used again, and no two values have one at the same time', async (t) => {
  const slots = createSlots<number>();
  const places = Array.from({ length: 100 }, (_, value) => slots.put(value));
  for (const [value, place] of places.entries()) if (value % 2 === 0) slots.take(place);
  const again = Array.from({ length: 50 }, (_, value) => slots.put(1000 + value));
  const freed = places.filter((_, value) => value % 2 === 0);
  t.strictSame(new Set(again), new Set(freed));
  t.equal(slots.values().length, 100);
  for (const [value, place] of again.entries()) t.equal(slots.take(place), 1000 + value);
  for (const [value, place] of places.entries()) if (value % 2 === 1) t.equal(slots.take(place), value);
  t.strictSame(slots.values(), []);
});
