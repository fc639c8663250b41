/** Limits how much work runs concurrently. */
interface Semaphore {
  /** Resolves when a permit is free; permits are given in the order of the calls. */
  acquire(): Promise<void>;
  /** Takes a permit if one is free, and returns whether it did. */
  tryAcquire(): boolean;
  /** Returns a permit. */
  release(): void;
}

/** A semaphore with `count` permits. */
export function createSemaphore(count: number): Semaphore {
  const waiting: (() => void)[] = [];
  let free = count;

  return {
    async acquire() {
      if (!tryAcquire()) await new Promise<void>((resolve) => waiting.push(resolve));
    },
    tryAcquire,
    release() {
      const next = waiting.shift();
      if (next === undefined) free += 1;
      else next();
    },
  };

  function tryAcquire(): boolean {
    if (free === 0) return false;
    free -= 1;
    return true;
  }
}
