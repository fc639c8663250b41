import type { LookupAddress } from 'node:dns';
import { lookup } from 'node:dns/promises';
import type { Effects } from '../effects.ts';
import { putLatest } from '../latest.ts';
import { createSemaphore, type Semaphore } from '../semaphore.ts';

/** All addresses of a name; rejects as the system's resolver does. */
export type Ask = (hostname: string) => Promise<readonly LookupAddress[]>;

/** What is known of a receiver: attempts succeeded, none did yet, or they fail. */
export type Reputation = 'proven' | 'unproven' | 'failing';

/** The same, for a receiver of this reputation. */
export type Resolve = (hostname: string, reputation: Reputation) => Promise<readonly LookupAddress[]>;

/**
 * Of libuv's threads half, 32, may wait for names at the same time, and a name that no server answers for keeps one for
 * 10 s and more, whatever became of the attempt. So names of which it is not known that they are answered for at once
 * have a share for each reputation of their receivers: a hundred dead names that are new do not hold up those that
 * were sent to before davit was started anew. All other names always find a thread.
 */
const SHARE = 8;
const LONG_MS = 2_000;
const KNOWN_MAX = 1_000;

interface Look {
  answer: Promise<readonly LookupAddress[]>;
  /** When somebody wanted it last; on the clock that never jumps. */
  wantedAtMs: number;
}

/**
 * Asks for names so that those that nobody answers for do not hold up the others. Those who ask for a name while it is
 * being resolved share the answer: a dead name does not take more than one thread of a share. Nobody waits for longer
 * than `patienceMs`: who waited in vain is not asked for any more.
 */
export function createResolver(
  ask: Ask = askSystem,
  patienceMs: number,
  effects: Pick<Effects, 'monotonicMs'>,
): Resolve {
  /** Names that were answered for at once the last time. */
  const known = new Map<string, true>();
  const shares = { proven: createShare(), unproven: createShare(), failing: createShare() };
  const free = { looks: new Map<string, Look>(), places: undefined };

  return (hostname, reputation) => {
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
  };

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
        return await ask(hostname);
      } finally {
        if (effects.monotonicMs() - startedAtMs >= LONG_MS) known.delete(hostname);
        else putLatest(known, hostname, true, KNOWN_MAX);
      }
    } finally {
      places?.release();
    }
  }
}

function createShare() {
  return { looks: new Map<string, Look>(), places: createSemaphore(SHARE) };
}

function askSystem(hostname: string): Promise<LookupAddress[]> {
  return lookup(hostname, { all: true });
}
