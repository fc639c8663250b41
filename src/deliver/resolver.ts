import type { LookupAddress } from 'node:dns';
import { lookup } from 'node:dns/promises';
import { HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { putLatest } from '../latest.ts';
import { createSemaphore, type Semaphore } from '../semaphore.ts';

/** All addresses of a name; rejects as the system's resolver does. */
export type Ask = (hostname: string) => Promise<readonly LookupAddress[]>;

/** What is known of a receiver: attempts succeeded, none did yet, or they fail. */
export type Reputation = 'proven' | 'unproven' | 'failing';

/** The same, for a receiver of this reputation. */
type Resolve = (hostname: string, reputation: Reputation) => Promise<readonly LookupAddress[]>;

/**
 * Of libuv's threads half, 32, may wait for names at the same time, and a name that no server answers for keeps one for
 * 10 s and more, whatever became of the attempt. So names of which it is not known that they are answered for at once
 * have a share for each reputation of their receivers: a hundred dead names that are new do not hold up those that
 * were sent to before davit was started anew. All other names go at once.
 */
const SHARE = 8;
const LONG_MS = 2_000;
const REMEMBERED_MAX = 1_000;

/**
 * Names that were answered for until now, and are not any more, may take all of the threads. Then the others are sent to
 * where they were before, as RFC 8767 has it in section 5; who has moved says so by an answer.
 */
const STALE_AFTER_MS = 1_800;
const STALE_MAX_MS = HOUR_MS;

interface Look {
  answer: Promise<readonly LookupAddress[]>;
  /** When somebody wanted it last; on the clock that never jumps. */
  wantedAtMs: number;
}

/** What a name stood for, and when. */
interface Answered {
  addresses: readonly LookupAddress[];
  atMs: number;
}

/**
 * Asks for names so that those that nobody answers for do not hold up the others. Those who ask for a name while it is
 * being resolved share the answer: a dead name does not take more than one thread of a share. Nobody waits for longer
 * than `patienceMs`: who waited in vain is not asked for any more.
 */
export function createResolver(
  ask: Ask = askSystem,
  patienceMs: number,
  effects: Pick<Effects, 'monotonicMs' | 'after'>,
): Resolve {
  /** Names that were answered for at once the last time. */
  const known = new Map<string, true>();
  const answered = new Map<string, Answered>();
  const shares = { proven: createShare(), unproven: createShare(), failing: createShare() };
  const free = { looks: new Map<string, Look>(), places: undefined };

  return (hostname, reputation) => orStale(hostname, lookUp(hostname, reputation));

  function lookUp(hostname: string, reputation: Reputation): Promise<readonly LookupAddress[]> {
    const share = known.has(hostname) ? free : shares[reputation];
    const wantedAtMs = effects.monotonicMs();
    const shared = share.looks.get(hostname);
    if (shared !== undefined) {
      shared.wantedAtMs = wantedAtMs;
      return shared.answer;
    }
    const look: Look = { wantedAtMs, answer: Promise.resolve([]) };
    look.answer = resolve(hostname, look, share.places).finally(() => share.looks.delete(hostname));
    share.looks.set(hostname, look);
    return look.answer;
  }

  async function resolve(
    hostname: string,
    look: Look,
    places: Semaphore | undefined,
  ): Promise<readonly LookupAddress[]> {
    await places?.acquire();
    try {
      const startedAtMs = effects.monotonicMs();
      if (startedAtMs - look.wantedAtMs > patienceMs) throw new Error('nobody waits for it any more');
      try {
        const addresses = await ask(hostname);
        putLatest(answered, hostname, { addresses, atMs: effects.monotonicMs() }, REMEMBERED_MAX);
        return addresses;
      } finally {
        if (effects.monotonicMs() - startedAtMs >= LONG_MS) known.delete(hostname);
        else putLatest(known, hostname, true, REMEMBERED_MAX);
      }
    } finally {
      places?.release();
    }
  }

  function orStale(
    hostname: string,
    answer: Promise<readonly LookupAddress[]>,
  ): Promise<readonly LookupAddress[]> {
    if (!answered.has(hostname)) return answer;
    const { promise, resolve } = Promise.withResolvers<readonly LookupAddress[]>();
    const cancel = effects.after(STALE_AFTER_MS, () => {
      const last = answered.get(hostname);
      if (last !== undefined && effects.monotonicMs() - last.atMs <= STALE_MAX_MS) resolve(last.addresses);
    });
    void answer.finally(cancel).then(resolve, () => resolve(answer));
    return promise;
  }
}

function createShare() {
  return { looks: new Map<string, Look>(), places: createSemaphore(SHARE) };
}

function askSystem(hostname: string): Promise<LookupAddress[]> {
  return lookup(hostname, { all: true });
}
