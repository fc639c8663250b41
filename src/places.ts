/** A number of places for work that goes on at the same time. */
export interface Places {
  /** Resolves when there is one, first come first served. */
  take(): Promise<void>;
  /** Takes one if there is one, and says whether there was. */
  takeNow(): boolean;
  /** Gives one back. */
  leave(): void;
}

/** At most `count` at a time; who comes later waits its turn. */
export function createPlaces(count: number): Places {
  const waiting: (() => void)[] = [];
  let free = count;

  return {
    async take() {
      if (!takeNow()) await new Promise<void>((resolve) => waiting.push(resolve));
    },
    takeNow,
    leave() {
      const next = waiting.shift();
      if (next === undefined) free += 1;
      else next();
    },
  };

  function takeNow(): boolean {
    if (free === 0) return false;
    free -= 1;
    return true;
  }
}
