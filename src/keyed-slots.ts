import { createSlots, type Slots } from './slots.ts';

/**
 * Slots in which keys take turns: an iteration yields the oldest value of one key after the other, and comes back to a
 * key when the value that was yielded is taken out. If it is not, the others of that key follow.
 */
export function createKeyedSlots<Value, Key>(keyOf: (value: Value) => Key): Slots<Value> {
  const slots = createSlots<Value>();
  /** None is empty. */
  const queues = new Map<Key, KeyQueue<Value>>();
  /** The key that had a value taken out last is the last. */
  const waiting = createSlots<KeyQueue<Value>>();

  return {
    get size() {
      return slots.size;
    },
    put(value) {
      const slot = slots.put(value);
      queueOf(keyOf(value)).values.set(slot, value);
      return slot;
    },
    take(slot) {
      const value = slots.take(slot);
      if (value === undefined) return undefined;
      const key = keyOf(value);
      const queue = queueOf(key);
      queue.values.delete(slot);
      waiting.take(queue.place);
      if (queue.values.size > 0) queue.place = waiting.put(queue);
      else queues.delete(key);
      return value;
    },
    *[Symbol.iterator]() {
      const inTurn = [...waiting];
      for (const queue of inTurn) {
        for (const [slot, value] of queue.values) {
          yield value;
          if (queue.values.has(slot)) continue;
          inTurn.push(queue);
          break;
        }
      }
    },
  };

  function queueOf(key: Key): KeyQueue<Value> {
    const known = queues.get(key);
    if (known !== undefined) return known;
    const queue = { values: new Map<number, Value>(), place: 0 };
    queue.place = waiting.put(queue);
    queues.set(key, queue);
    return queue;
  }
}

interface KeyQueue<Value> {
  /** By their slots, the oldest first. */
  values: Map<number, Value>;
  /** Its slot among those that are waiting. */
  place: number;
}
