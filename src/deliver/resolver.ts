import type { LookupAddress } from 'node:dns';
import { lookup } from 'node:dns/promises';
import { HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { putLatest } from '../latest.ts';
import { createSemaphore, type Semaphore } from '../semaphore.ts';

/** Resolves a name to all its addresses; rejects as the system's resolver does. */
export type LookUp = (hostname: string) => Promise<readonly LookupAddress[]>;

/** How attempts to a receiver went: at least one succeeded, none did yet, or the latest ones failed. */
export type Reputation = 'proven' | 'unproven' | 'failing';

/** Resolves a name for a receiver of this reputation. */
type Resolve = (hostname: string, reputation: Reputation) => Promise<readonly LookupAddress[]>;

/**
 * libuv looks up names in at most half of its threads, 32, and a name whose servers do not answer occupies one for 10 s
 * and more, even after the attempt was given up. So lookups of names that are not known to answer quickly are limited,
 * separately for each reputation of their receivers: a hundred new dead names do not hold up the names of receivers that
 * worked before a restart. All other names are looked up at once.
 */
const LOOKUPS_PER_SHARE = 8;
const SLOW_MS = 2_000;
const REMEMBERED_MAX = 1_000;

/**
 * Names that have answered quickly until now and suddenly do not may occupy all of the threads. So a lookup that takes
 * this long resolves to the name's last addresses, as in RFC 8767, section 5. A receiver that has moved is found again
 * with the next answer for its name.
 */
const STALE_AFTER_MS = 1_800;
const STALE_MAX_MS = HOUR_MS;

interface PendingLookup {
  answer: Promise<readonly LookupAddress[]>;
  /** When it was last asked for, on the monotonic clock. */
  lastWantedAtMs: number;
}

interface LastAnswer {
  addresses: readonly LookupAddress[];
  atMs: number;
}

/**
 * Looks up names so that dead ones do not hold up the others. Concurrent requests for a name share one lookup, so a dead
 * name takes at most one thread of its share. A lookup that was last asked for more than `timeoutMs` ago when its turn
 * comes is not started, as its callers have given up.
 */
export function createResolver(
  lookUp: LookUp = lookUpInSystem,
  timeoutMs: number,
  effects: Pick<Effects, 'monotonicMs' | 'after'>,
): Resolve {
  /** Names that were answered quickly the last time. */
  const quick = new Map<string, true>();
  const lastAnswers = new Map<string, LastAnswer>();
  const shares = { proven: createShare(), unproven: createShare(), failing: createShare() };
  const unlimited = { pending: new Map<string, PendingLookup>(), places: undefined };

  return (hostname, reputation) => withStaleFallback(hostname, sharedLookup(hostname, reputation));

  function sharedLookup(hostname: string, reputation: Reputation): Promise<readonly LookupAddress[]> {
    const share = quick.has(hostname) ? unlimited : shares[reputation];
    const nowMs = effects.monotonicMs();
    const shared = share.pending.get(hostname);
    if (shared !== undefined) {
      shared.lastWantedAtMs = nowMs;
      return shared.answer;
    }
    const pending: PendingLookup = { lastWantedAtMs: nowMs, answer: Promise.resolve([]) };
    pending.answer = resolve(hostname, pending, share.places).finally(() => share.pending.delete(hostname));
    share.pending.set(hostname, pending);
    return pending.answer;
  }

  async function resolve(
    hostname: string,
    pending: PendingLookup,
    places: Semaphore | undefined,
  ): Promise<readonly LookupAddress[]> {
    await places?.acquire();
    try {
      const startedAtMs = effects.monotonicMs();
      if (startedAtMs - pending.lastWantedAtMs > timeoutMs) throw new Error('its callers have given up');
      try {
        const addresses = await lookUp(hostname);
        putLatest(lastAnswers, hostname, { addresses, atMs: effects.monotonicMs() }, REMEMBERED_MAX);
        return addresses;
      } finally {
        if (effects.monotonicMs() - startedAtMs >= SLOW_MS) quick.delete(hostname);
        else putLatest(quick, hostname, true, REMEMBERED_MAX);
      }
    } finally {
      places?.release();
    }
  }

  function withStaleFallback(
    hostname: string,
    answer: Promise<readonly LookupAddress[]>,
  ): Promise<readonly LookupAddress[]> {
    if (!lastAnswers.has(hostname)) return answer;
    const { promise, resolve } = Promise.withResolvers<readonly LookupAddress[]>();
    const cancel = effects.after(STALE_AFTER_MS, () => {
      const last = lastAnswers.get(hostname);
      if (last !== undefined && effects.monotonicMs() - last.atMs <= STALE_MAX_MS) resolve(last.addresses);
    });
    void answer.finally(cancel).then(resolve, () => resolve(answer));
    return promise;
  }
}

function createShare() {
  return { pending: new Map<string, PendingLookup>(), places: createSemaphore(LOOKUPS_PER_SHARE) };
}

function lookUpInSystem(hostname: string): Promise<LookupAddress[]> {
  return lookup(hostname, { all: true });
}
