import type { Watch, Watches } from '../../src/http/watches.ts';

export interface CountedWatches extends Watches {
  /** How many are open. */
  size(): number;
}

/** The same watches, and how many of those that it opened are open. */
export function countWatches(watches: Watches): CountedWatches {
  const open = new Set<Watch>();
  return {
    ...watches,
    size: () => open.size,
    open(...request) {
      const watch = watches.open(...request);
      const { close } = watch;
      // In place, as they are also closed from within.
      watch.close = () => {
        open.delete(watch);
        close();
      };
      open.add(watch);
      return watch;
    },
  };
}
