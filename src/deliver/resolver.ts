import type { LookupAddress } from 'node:dns';
import { lookup } from 'node:dns/promises';
import type { Effects } from '../effects.ts';
import { createPlaces } from '../places.ts';
import { putLatest } from './latest.ts';

/** All addresses of a name; rejects as the system's resolver does. */
export type Resolve = (hostname: string) => Promise<readonly LookupAddress[]>;

/**
 * Of libuv's threads half, 32, may wait for names at the same time, and a name that no server answers for keeps one for
 * 10 s and more, whatever became of the attempt. So names that are new, and names that kept one long the last time, have
 * a share each, and the others always find a thread.
 */
const SHARE = 8;
const LONG_MS = 2_000;
const KNOWN_MAX = 1_000;

/**
 * Asks for names so that those that nobody answers for do not hold up the others. Those who ask for a name while it is
 * being resolved share the answer: a dead name does not take more than one thread.
 */
export function createResolver(ask: Resolve = askSystem, effects: Pick<Effects, 'monotonicMs'>): Resolve {
  const underWay = new Map<string, Promise<readonly LookupAddress[]>>();
  /** How the last look for a name went; those that are not in it are new. */
  const known = new Map<string, 'brief' | 'long'>();
  const shares = { new: createPlaces(SHARE), long: createPlaces(SHARE) };

  return (hostname) => {
    const shared = underWay.get(hostname);
    if (shared !== undefined) return shared;
    const answer = resolve(hostname).finally(() => underWay.delete(hostname));
    underWay.set(hostname, answer);
    return answer;
  };

  async function resolve(hostname: string): Promise<readonly LookupAddress[]> {
    const kind = known.get(hostname) ?? 'new';
    const share = kind === 'brief' ? undefined : shares[kind];
    await share?.take();
    const startedAtMs = effects.monotonicMs();
    try {
      return await ask(hostname);
    } finally {
      const isLong = effects.monotonicMs() - startedAtMs >= LONG_MS;
      putLatest(known, hostname, isLong ? 'long' : 'brief', KNOWN_MAX);
      share?.leave();
    }
  }
}

function askSystem(hostname: string): Promise<LookupAddress[]> {
  return lookup(hostname, { all: true });
}
