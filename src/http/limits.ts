import { isIP } from 'node:net';
import type { Request } from '@hapi/hapi';
import ipaddr from 'ipaddr.js';
import { type Cidr, isInside } from '../address.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { putLatest } from '../latest.ts';

/** `limit` requests in every `windowMs`, all of them at once if the caller likes. */
export interface RateLimit {
  limit: number;
  windowMs: number;
}

export type RateDecision =
  | { kind: 'unlimited' }
  | { kind: 'allowed'; headers: RateHeaders }
  | { kind: 'limited'; headers: RateHeaders; retryAfterSeconds: number };

/** Fields of draft-ietf-httpapi-ratelimit-headers-11. */
interface RateHeaders {
  'RateLimit-Policy': string;
  RateLimit: string;
}

export interface RateLimiter {
  /** Counts one request of `who`, unless it is refused. Whoever waits `retryAfterSeconds` alone gets through. */
  take(who: string): RateDecision;
}

/**
 * The generic cell rate algorithm: one moment per caller says when all of its requests will have been paid
 * off. `policy` names the limit in the headers. Keeps at most `maxCallers`; the one that was quiet
 * for longest is forgotten first, which forgives it and locks nobody out.
 */
export function createRateLimiter(
  rateLimit: RateLimit | null,
  effects: Effects,
  { policy = 'default', maxCallers = 10_000 }: { policy?: string; maxCallers?: number } = {},
): RateLimiter {
  if (rateLimit === null) return { take: () => ({ kind: 'unlimited' }) };
  const { limit, windowMs } = rateLimit;
  const policyHeader = `"${policy}";q=${limit};w=${Math.ceil(windowMs / 1000)}`;
  const originMs = effects.monotonicMs();
  // Time counts in 1/limit of a millisecond here, so that what one request costs is a whole number.
  const cost = windowMs;
  const capacity = limit * windowMs;
  const paidOffAt = new Map<string, number>();

  return {
    take(who) {
      const now = Math.floor(effects.monotonicMs() - originMs) * limit;
      const owed = Math.max(0, (paidOffAt.get(who) ?? 0) - now);
      if (owed + cost > capacity) {
        const retryAfterSeconds = seconds(owed + cost - capacity);
        return { kind: 'limited', headers: headers(0, retryAfterSeconds), retryAfterSeconds };
      }
      putLatest(paidOffAt, who, now + owed + cost, maxCallers);
      const free = capacity - owed - cost;
      return { kind: 'allowed', headers: headers(Math.floor(free / cost), seconds(cost - (free % cost))) };
    },
  };

  /** Seconds, rounded up, that pay off `owed`. */
  function seconds(owed: number): number {
    return Math.max(1, Math.ceil(owed / limit / 1000));
  }

  /** `remaining` requests may come now, and the next one more in `moreInSeconds`. */
  function headers(remaining: number, moreInSeconds: number): RateHeaders {
    return { 'RateLimit-Policy': policyHeader, RateLimit: `"${policy}";r=${remaining};t=${moreInSeconds}` };
  }
}

/**
 * Counts failed authentications of an address (see `addressGroup`). A key is looked up whatever this says,
 * so nobody locks a valid key out; only those that fail are answered 429 instead of 401 from here on.
 */
export function createFailureLimiter(effects: Effects): RateLimiter {
  return createRateLimiter({ limit: 60, windowMs: 60_000 }, effects, { policy: 'failed-authentication' });
}

/** Puts the decision's headers on the response; throws `rate_limited` if it is a refusal. */
export function applyRateDecision(decision: RateDecision, { raw: { res } }: Pick<Request, 'raw'>): void {
  switch (decision.kind) {
    case 'unlimited':
      return;
    case 'allowed':
    case 'limited':
      for (const [name, value] of Object.entries(decision.headers)) res.setHeader(name, value);
      if (decision.kind === 'allowed') return;
      throw new AppError('rate_limited', `too many requests: wait ${decision.retryAfterSeconds} s`, {
        retryAfterSeconds: decision.retryAfterSeconds,
      });
    default:
      decision satisfies never;
  }
}

/** Who is at the other end, and what other proxies, whose word counts, say about it. */
export type ClientAddress = (request: Pick<Request, 'raw'>) => string;

/**
 * The address of the client: that of the connection or, when that is a trusted proxy, the last one in
 * X-Forwarded-For that is not. Everything left of that one anybody may have written.
 */
export function createClientAddress(trustedProxies: readonly Cidr[]): ClientAddress {
  return ({ raw: { req } }) => {
    let address = normalAddress(req.socket.remoteAddress ?? '') ?? 'unknown';
    const forwardedFor = req.headers['x-forwarded-for'];
    if (trustedProxies.length === 0 || typeof forwardedFor !== 'string') return address;
    for (const entry of forwardedFor.split(',').reverse()) {
      if (!isInside(address, trustedProxies)) return address;
      const before = normalAddress(withoutPort(entry.trim()));
      // Not an address: what the proxy that is trusted says ends here.
      if (before === undefined) return address;
      address = before;
    }
    return address;
  };
}

/** Whom an address stands for when attempts are counted: an IPv6 client has at least a /64 to itself. */
export function addressGroup(address: string): string {
  if (isIP(address) !== 6) return address;
  const parsed = ipaddr.process(withoutZone(address));
  if (parsed.kind() === 'ipv4') return parsed.toString();
  return `${ipaddr.IPv6.networkAddressFromCIDR(`${parsed.toString()}/64`).toString()}/64`;
}

/** One spelling for each address, IPv4 ones within IPv6 as what they are. Undefined: not an address. */
function normalAddress(text: string): string | undefined {
  // ipaddr.js also takes `1` and `0x7f.1` for addresses; Node's own test does not.
  return isIP(text) === 0 ? undefined : ipaddr.process(withoutZone(text)).toString();
}

/** Of `fe80::1%br-0` the address; ipaddr.js takes some names of interfaces and throws at others. */
function withoutZone(address: string): string {
  return address.replace(/%.*$/s, '');
}

/** Some proxies write `192.0.2.1:4711` and `[2001:db8::1]:4711`. */
function withoutPort(entry: string): string {
  const bracketed = /^\[([^\]]*)\](?::\d+)?$/.exec(entry);
  if (bracketed?.[1] !== undefined) return bracketed[1];
  return /^[\d.]+:\d+$/.test(entry) ? entry.slice(0, entry.indexOf(':')) : entry;
}
