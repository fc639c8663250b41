/** A number of places for work that goes on at the same time. */
export interface Semaphore {
  /** Resolves when there is one, first come first served. */
  acquire(): Promise<void>;
  /** Takes one if there is one, and says whether there was. */
  tryAcquire(): boolean;
  /** Gives one back. */
  release(): void;
}

/** At most `count` at a time; who comes later waits its turn. */
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
