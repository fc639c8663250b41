import type { Request } from '@hapi/hapi';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { putLatest } from '../latest.ts';

/** `limit` requests per `windowMs`, all of which may come in one burst. */
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

interface RateLimiter {
  /** Counts one request of `who`, unless it is refused. After `retryAfterSeconds` without any, the next is allowed. */
  take(who: string): RateDecision;
}

/**
 * The generic cell rate algorithm (GCRA), a leaky bucket that keeps one moment per caller: when all of its requests so
 * far will have been paid off. `policy` names the limit in the headers. Beyond `maxCallers`, the caller that was quiet
 * for longest is forgotten, which resets its count and so locks nobody out.
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
  // Time is counted in units of 1/limit of a millisecond, so that the cost of one request is a whole number.
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

  /** In how many seconds, rounded up, `owed` is paid off. */
  function seconds(owed: number): number {
    return Math.ceil(owed / limit / 1000);
  }

  /** `remaining`: how many requests may come now; `moreInSeconds`: when there is one more. */
  function headers(remaining: number, moreInSeconds: number): RateHeaders {
    return { 'RateLimit-Policy': policyHeader, RateLimit: `"${policy}";r=${remaining};t=${moreInSeconds}` };
  }
}

/** Puts the decision's headers on the response; throws `rate_limited` if it is a refusal. */
export function applyRateDecision(decision: RateDecision, { raw: { res } }: Pick<Request, 'raw'>): void {
  if (decision.kind === 'unlimited') return;
  for (const [name, value] of Object.entries(decision.headers)) res.setHeader(name, value);
  if (decision.kind === 'allowed') return;
  const { retryAfterSeconds } = decision;
  throw new AppError('rate_limited', `too many requests: wait ${retryAfterSeconds} s`, { retryAfterSeconds });
}
