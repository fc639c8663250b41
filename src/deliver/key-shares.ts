import type { KeyId } from '../domain.ts';
import { createKeyedSlots } from '../keyed-slots.ts';

/** The key that registered a webhook; null: the webhook is gone. */
export type Owner = KeyId | null;

/** Places that keys share. */
export interface SharedPlaces {
  /** How many are free; below 0 if more were taken. */
  free(): number;
  /** How many more the key may have now. */
  freeTo(key: Owner): number;
  /** The key has `count` more, or fewer. */
  take(key: Owner, count: number): void;
}

/**
 * `total` places, of which each key may have its share. With `whole`, they are a part of that one's places. There a key
 * can come to exceed its share, when its receivers that were quick begin to hang: the excess counts in `whole` only, so
 * that other keys still get their share of the part.
 */
export function createSharedPlaces(total: number, whole?: SharedPlaces): SharedPlaces {
  const mostOfKey = whole === undefined ? total : shareOfKey(total, 0);
  /** One number for each key there ever was. */
  const takenBy = new Map<Owner, number>();
  let taken = 0;

  return {
    free: () => Math.min(total - taken, whole?.free() ?? total),
    freeTo(key) {
      const own = takenBy.get(key) ?? 0;
      const share = shareOfKey(total, taken - Math.min(own, mostOfKey));
      return Math.min(total - taken, share - own, whole?.freeTo(key) ?? total);
    },
    take(key, count) {
      const before = takenBy.get(key) ?? 0;
      const after = before + count;
      takenBy.set(key, after);
      taken += Math.min(after, mostOfKey) - Math.min(before, mostOfKey);
      whole?.take(key, count);
    },
  };
}

/**
 * How many of `total` places one key may have while other keys have `ofOthers`: four fifths of what these leave, and at
 * least one (the dynamic threshold of Choudhury and Hahne, 1998). So a single key is hardly limited, a second one finds
 * free places at once, and as places become free all keys come to equal shares. A fixed limit that left room for five
 * such keys would give a single one only a sixth.
 */
function shareOfKey(total: number, ofOthers: number): number {
  return Math.max(1, Math.floor((total - ofOthers) * 0.8));
}

/** A semaphore whose permits keys share. */
export interface SharedSemaphore {
  /**
   * Resolves when this key has one more permit. The next one goes to the key that has had none for longest, and those of
   * one key are given in the order of the calls.
   */
  acquire(key: Owner): Promise<void>;
  /** Takes a permit if the key may have one at once, and returns whether it did. */
  tryAcquire(key: Owner): boolean;
  /** Returns a permit of this key. */
  release(key: Owner): void;
}

/** A semaphore with `total` permits. */
export function createSharedSemaphore(total: number): SharedSemaphore {
  const places = createSharedPlaces(total);
  const waiting = createKeyedSlots<{ key: Owner; slot: number; grant: () => void }, Owner>(({ key }) => key);

  return {
    async acquire(key) {
      if (tryAcquire(key)) return;
      const { promise, resolve } = Promise.withResolvers<void>();
      const waiter = { key, slot: 0, grant: resolve };
      waiter.slot = waiting.put(waiter);
      await promise;
    },
    tryAcquire,
    release(key) {
      places.take(key, -1);
      for (const { key, slot, grant } of waiting) {
        if (places.free() <= 0) return;
        if (places.freeTo(key) <= 0) continue;
        waiting.take(slot);
        places.take(key, 1);
        grant();
      }
    },
  };

  /** A key that may have a permit waits for none: each that is returned is given to whoever may have it. */
  function tryAcquire(key: Owner): boolean {
    if (places.freeTo(key) <= 0) return false;
    places.take(key, 1);
    return true;
  }
}
