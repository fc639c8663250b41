import fc from 'fast-check';
import t from 'tap';
import { createSlots } from '../src/slots.ts';

t.test('a value can be taken out once, by the number of its place', async (t) => {
  const slots = createSlots<string>();
  const [one, other] = [slots.put('one'), slots.put('other')];
  t.not(one, other);
  t.strictSame([...slots], ['one', 'other']);
  t.equal(slots.take(one), 'one');
  t.equal(slots.take(one), undefined);
  t.equal(slots.take(99), undefined);
  t.strictSame([...slots], ['other']);
  const places = ['a', 'b', 'c'].map((value) => slots.put(value));
  t.equal(new Set(places).size, 3, 'a value that was taken out twice leaves one free place');
});

t.test('places are used again, and no two values have one at the same time', async (t) => {
  const slots = createSlots<number>();
  const places = Array.from({ length: 100 }, (_, value) => slots.put(value));
  for (const [value, place] of places.entries()) if (value % 2 === 0) slots.take(place);
  const again = Array.from({ length: 50 }, (_, value) => slots.put(1000 + value));
  const freed = places.filter((_, value) => value % 2 === 0);
  t.strictSame(new Set(again), new Set(freed));
  t.equal(slots.size, 100);
  for (const [value, place] of again.entries()) t.equal(slots.take(place), 1000 + value);
  for (const [value, place] of places.entries()) if (value % 2 === 1) t.equal(slots.take(place), value);
  t.equal(slots.size, 0);
  t.strictSame([...slots], []);
});

t.test('values are iterated in the order in which they were put, whatever was taken out', async () => {
  const steps = fc.array(fc.oneof(fc.constant('put' as const), fc.nat(20)), { maxLength: 200 });
  fc.assert(
    fc.property(steps, (taken) => {
      const slots = createSlots<number>();
      const expected: { value: number; place: number }[] = [];
      for (const [value, step] of taken.entries()) {
        if (step === 'put') expected.push({ value, place: slots.put(value) });
        else for (const { place } of expected.splice(step, 1)) slots.take(place);
      }
      const values = expected.map(({ value }) => value);
      return slots.size === values.length && [...slots].join() === values.join();
    }),
  );
});

t.test('the value at hand may be taken out during an iteration', async (t) => {
  const slots = createSlots<{ place: number }>();
  const values = Array.from({ length: 5 }, () => {
    const value = { place: 0 };
    value.place = slots.put(value);
    return value;
  });
  const walked = [];
  for (const value of slots) {
    walked.push(value);
    if (value !== values[3]) slots.take(value.place);
  }
  t.strictSame(walked, values);
  t.strictSame([...slots], [values[3]]);
});
