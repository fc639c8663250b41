import type { LookupAddress } from 'node:dns';
import { CANCELLED, lookup, Resolver, SERVFAIL, TIMEOUT } from 'node:dns/promises';
import { HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import { putLatest } from '../latest.ts';
import { createSharedSemaphore, type Owner, type SharedSemaphore } from './key-shares.ts';

/** Resolves a name to its addresses; rejects as the system's resolver does. */
type LookUp = (hostname: string) => Promise<readonly LookupAddress[]>;

/**
 * Asks DNS about a name without occupying a thread. Resolves to whether it answered, whatever it says; false also if
 * `signal` is aborted before.
 */
type AskDns = (hostname: string, signal: AbortSignal) => Promise<boolean>;

/** Resolves a name for a webhook of this key. */
type Resolve = (hostname: string, key: Owner) => Promise<readonly LookupAddress[]>;

export interface ResolverOptions {
  /** How long callers wait at most. */
  timeoutMs: number;
  /** How many names may be looked up at a time; 32 by default. */
  lookupsMax?: number | undefined;
  /** Both by default those of the system; tests bring their own. */
  lookUp?: LookUp | undefined;
  askDns?: AskDns | undefined;
}

/**
 * libuv uses at most half of its threads to look up names, and a name whose servers do not answer holds one for 10 s or
 * more, even after the attempt was given up. So names for which DNS is not known to answer get a quarter of the lookups,
 * all others the rest. Keys share both parts: one key's names without an answer hold up no lookup of another key's.
 */
const LOOKUPS_MAX = 32;
const NOT_ANSWERED_PART = 1 / 4;
/** An answer of DNS holds 4,000, each of which takes 6 µs to check, and memory for as long as it is remembered. */
const ADDRESSES_MAX = 32;

const SLOW_MS = 2_000;
const REMEMBERED_MAX = 1_000;

/**
 * Names that have answered quickly until now and suddenly do not may occupy all of the threads. So a lookup that takes
 * this long, or that no server answers, resolves to the name's last addresses, as in RFC 8767, section 5. A receiver that
 * has moved is found again with the next answer for its name.
 */
const STALE_AFTER_MS = 1_800;
const STALE_MAX_MS = HOUR_MS;
/** Servers are out of reach, refuse, or have failed themselves; that there is no such name is an answer. */
const NO_ANSWER = 'EAI_AGAIN';

interface PendingLookup {
  answer: Promise<readonly LookupAddress[]>;
  /** When it was first asked for, and last, on the monotonic clock. */
  firstWantedAtMs: number;
  lastWantedAtMs: number;
  /** Asks DNS about the name while it waits for one of the other lookups. */
  question: Question | undefined;
}

/** Whether DNS answers for a name. */
interface Question {
  /** Resolves once it does. */
  answered: Promise<void>;
  /** Asks, unless that is being done. */
  ask(): void;
  stop(): void;
}

interface LastAnswer {
  addresses: readonly LookupAddress[];
  atMs: number;
}

/**
 * Looks up names so that dead ones do not hold up the others. Concurrent requests of a key for a name share one lookup,
 * so a dead name takes at most one thread. A lookup that was last asked for more than `timeoutMs` ago when its turn comes
 * is not started, as its callers have given up.
 */
export function createResolver(
  { timeoutMs, lookupsMax = LOOKUPS_MAX, lookUp = lookUpInSystem, askDns = askSystemsDns }: ResolverOptions,
  effects: Pick<Effects, 'monotonicMs' | 'after'>,
): Resolve {
  /** Names that were answered quickly the last time. */
  const quick = new Map<string, true>();
  const lastAnswers = new Map<string, LastAnswer>();
  const pendingLookups = new Map<string, PendingLookup>();
  const othersMax = Math.max(1, Math.floor(lookupsMax * NOT_ANSWERED_PART));
  const answered = createSharedSemaphore(lookupsMax - othersMax);
  const others = createSharedSemaphore(othersMax);

  return (hostname, key) => withStaleFallback(hostname, sharedLookup(hostname, key));

  /** Not shared between keys: one could then wait among another's dead names. */
  function sharedLookup(hostname: string, key: Owner): PendingLookup {
    const name = `${key} ${hostname}`;
    const nowMs = effects.monotonicMs();
    const shared = pendingLookups.get(name);
    if (shared !== undefined) {
      shared.lastWantedAtMs = nowMs;
      // Its silence may be over: a name that was asked about once stayed behind its key's dead ones for minutes.
      shared.question?.ask();
      return shared;
    }
    const pending: PendingLookup = {
      firstWantedAtMs: nowMs,
      lastWantedAtMs: nowMs,
      answer: Promise.resolve([]),
      question: undefined,
    };
    pending.answer = resolve(hostname, key, pending).finally(() => pendingLookups.delete(name));
    pendingLookups.set(name, pending);
    return pending;
  }

  async function resolve(
    hostname: string,
    key: Owner,
    pending: PendingLookup,
  ): Promise<readonly LookupAddress[]> {
    const lookups = await placeFor(hostname, key, pending);
    try {
      const startedAtMs = effects.monotonicMs();
      if (startedAtMs - pending.lastWantedAtMs > timeoutMs) throw new Error('its callers have given up');
      try {
        const addresses = (await lookUp(hostname)).slice(0, ADDRESSES_MAX);
        putLatest(lastAnswers, hostname, { addresses, atMs: effects.monotonicMs() }, REMEMBERED_MAX);
        return addresses;
      } finally {
        if (effects.monotonicMs() - startedAtMs >= SLOW_MS) quick.delete(hostname);
        else putLatest(quick, hostname, true, REMEMBERED_MAX);
      }
    } finally {
      lookups.release(key);
    }
  }

  /** Takes a permit for a lookup of the name, and resolves to the semaphore to which it is to be returned. */
  async function placeFor(hostname: string, key: Owner, pending: PendingLookup): Promise<SharedSemaphore> {
    if (!quick.has(hostname) && (await isFreeFirst(hostname, key, pending))) return others;
    await answered.acquire(key);
    return answered;
  }

  /**
   * Whether the key may have one of the other lookups, which it then has, before DNS answers for the name. The answer
   * decides only that: a name is always looked up in the system, which also has /etc/hosts and whatever nsswitch.conf(5)
   * names.
   */
  async function isFreeFirst(hostname: string, key: Owner, pending: PendingLookup): Promise<boolean> {
    if (others.tryAcquire(key)) return true;
    const question = questionAbout(hostname);
    pending.question = question;
    question.ask();
    const free = others.acquire(key).then(() => true);
    const isFree = await Promise.race([free, question.answered.then(() => false)]);
    pending.question = undefined;
    question.stop();
    if (!isFree) void free.then(() => others.release(key));
    return isFree;
  }

  function questionAbout(hostname: string): Question {
    const { promise, resolve } = Promise.withResolvers<void>();
    let asking: AbortController | undefined;
    return { answered: promise, ask, stop: () => asking?.abort() };

    function ask(): void {
      if (asking !== undefined) return;
      const own = new AbortController();
      asking = own;
      const cancelDeadline = effects.after(timeoutMs, () => own.abort());
      void askDns(hostname, own.signal)
        .catch(() => false) // as silence: the name waits for its turn
        .then((isAnswered) => {
          cancelDeadline();
          asking = undefined;
          if (isAnswered) resolve();
        });
    }
  }

  function withStaleFallback(
    hostname: string,
    { answer, firstWantedAtMs }: PendingLookup,
  ): Promise<readonly LookupAddress[]> {
    if (!lastAnswers.has(hostname)) return answer;
    const { promise, resolve } = Promise.withResolvers<readonly LookupAddress[]>();
    const waitMs = Math.max(0, firstWantedAtMs + STALE_AFTER_MS - effects.monotonicMs());
    const cancel = effects.after(waitMs, resolveToLast);
    void answer.finally(cancel).then(resolve, (error: unknown) => {
      if (codeOf(error) === NO_ANSWER) resolveToLast();
      resolve(answer);
    });
    return promise;

    function resolveToLast(): void {
      const last = lastAnswers.get(hostname);
      if (last !== undefined && effects.monotonicMs() - last.atMs <= STALE_MAX_MS) resolve(last.addresses);
    }
  }
}

function lookUpInSystem(hostname: string): Promise<LookupAddress[]> {
  return lookup(hostname, { all: true });
}

/**
 * Reads resolv.conf(5) each time, as that changes, and waits for a server as long as glibc does: with 1 s, an answer that
 * took 3 s was heard only at the third try.
 */
async function askSystemsDns(hostname: string, signal: AbortSignal): Promise<boolean> {
  const resolver = new Resolver({ timeout: 5_000, tries: 2 });
  signal.addEventListener('abort', () => resolver.cancel());
  // Both, as a lookup asks for both: its servers then have the answers.
  const answers = await Promise.allSettled([resolver.resolve4(hostname), resolver.resolve6(hostname)]);
  return answers.every((one) => one.status === 'fulfilled' || !SILENCE.has(one.reason.code));
}

/** SERVFAIL is what a recursive server says, after some seconds, if the servers of the name do not answer it. */
const SILENCE = new Set([TIMEOUT, CANCELLED, SERVFAIL]);
