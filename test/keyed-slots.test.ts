import t from 'tap';
import type { KeyId } from '../src/domain.ts';
import { createKeyedSlots } from '../src/keyed-slots.ts';

t.test('keys take turns, and within a key the oldest value comes first', async (t) => {
  const slots = createKeyedSlots(({ key }: { key: KeyId; name: string }) => key);
  const places = new Map<string, number>();
  const put = (...names: string[]) => {
    for (const name of names) places.set(name, slots.put({ key: name.charAt(0) as KeyId, name }));
  };
  put('a1', 'a2', 'a3', 'b1', 'b2', 'c1');
  const inTurn = (count: number) => {
    const names: string[] = [];
    for (const { name } of slots) {
      t.equal(slots.take(places.get(name) ?? 0)?.name, name);
      names.push(name);
      if (names.length === count) break;
    }
    return names;
  };
  t.strictSame(
    Array.from(slots, ({ name }) => name),
    ['a1', 'a2', 'a3', 'b1', 'b2', 'c1'],
    'of a key from which nothing is taken, all are seen',
  );
  t.strictSame(inTurn(2), ['a1', 'b1']);
  t.equal(slots.size, 4);
  t.strictSame(inTurn(9), ['c1', 'a2', 'b2', 'a3']);
  t.equal(slots.size, 0);
  t.equal(slots.take(places.get('a1') ?? 0), undefined);
  put('a4', 'b3');
  t.strictSame(inTurn(9), ['a4', 'b3'], 'a key that had no more comes back as a new one');
});
