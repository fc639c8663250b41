import type { Plugin, Request } from '@hapi/hapi';
import type { Cidr } from '../address.ts';
import type { KeyId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError, wrongKey } from '../errors.ts';
import type { Logger } from '../logger.ts';
import type { Caller } from '../store/keys.ts';
import type { Reads, Store } from '../store/store.ts';
import { addressGroup, createClientAddress } from './client-address.ts';
import { applyRateDecision, createRateLimiter } from './rate-limits.ts';

/** How often a key's `last_used_at` is written at most. */
const USE_NOTED_EVERY_MS = 60_000;

/** While the disk is full, each try is a failed transaction, and an entry in the log. */
const TRY_AGAIN_AFTER_MS = 60_000;

/** Of each address: see `addressGroup`. Counted only once a request failed to authenticate: nobody locks a valid key out. */
const FAILURES = { limit: 60, windowMs: 60_000 };

/**
 * Authenticates `Authorization: Bearer <API_KEY>`. Each request checks the key as of the latest commit, so a revocation,
 * also by another process, holds from the next request on. Failures are counted by address, and answered 401, then 429;
 * they never hold up a valid key. `trustedProxies`: whose X-Forwarded-For is believed.
 */
export function authentication(
  { reads, writer }: Store,
  trustedProxies: readonly Cidr[],
  effects: Effects,
  logger: Logger,
): Plugin<void> {
  const failures = createRateLimiter(FAILURES, effects, { policy: 'failed-authentication' });
  const clientAddress = createClientAddress(trustedProxies);
  /**
   * Also those whose use could not be noted a moment ago. While the disk does not answer, reads are answered all the same,
   * and each one would add a write that waits.
   */
  const beingNoted = new Set<KeyId>();
  let warnedAtMs = Number.NEGATIVE_INFINITY;

  return {
    name: 'authentication',
    register(server) {
      server.auth.scheme('bearer', () => ({
        authenticate(request, h) {
          const caller = authenticate(request);
          noteUse(caller);
          return h.authenticated({ credentials: { scope: [...caller.scopes], app: caller } });
        },
      }));
      server.auth.strategy('key', 'bearer');
      server.auth.default('key');
    },
  };

  function authenticate(request: Request): Caller {
    const caller = currentCaller(request, reads, effects.now());
    if (caller !== undefined) return caller;
    applyRateDecision(failures.take(addressGroup(clientAddress(request))), request);
    if (bearerToken(request) !== undefined) throw wrongKey();
    throw new AppError('unauthorized', 'send an API key: Authorization: Bearer <API_KEY>');
  }

  function noteUse({ keyId, lastUsedAtMs }: Caller): void {
    const atMs = effects.now();
    if (lastUsedAtMs !== null && Math.abs(atMs - lastUsedAtMs) < USE_NOTED_EVERY_MS) return;
    if (beingNoted.has(keyId)) return;
    beingNoted.add(keyId);
    writer
      .write('keys.touch', { keyId, atMs })
      .then(() => beingNoted.delete(keyId))
      // Not a reason to fail the request; one in a minute tries again.
      .catch((error) => {
        warn(error);
        effects.after(TRY_AGAIN_AFTER_MS, () => beingNoted.delete(keyId));
      });
  }

  function warn(error: unknown): void {
    if (effects.monotonicMs() - warnedAtMs < TRY_AGAIN_AFTER_MS) return;
    warnedAtMs = effects.monotonicMs();
    logger.warn({ err: error }, 'the use of a key could not be recorded');
  }
}

/** The authenticated caller. Throws on a route without authentication. */
export function callerOf(request: Pick<Request, 'auth'>): Caller {
  const caller = request.auth.credentials.app;
  if (caller === undefined) throw new Error('a route without authentication asked for its caller');
  return caller;
}

/**
 * The caller as the database has it now: undefined once the key is revoked or expired, or its secret was replaced. Long
 * requests check again and again.
 */
export function currentCaller(
  request: Pick<Request, 'headers'>,
  { keys }: Pick<Reads, 'keys'>,
  nowMs: number,
): Caller | undefined {
  const secret = bearerToken(request);
  return secret === undefined ? undefined : keys.authenticate(secret, nowMs);
}

/** RFC 6750, 2.1. The scheme's name is case-insensitive (RFC 9110, 11.1). */
function bearerToken({ headers }: Pick<Request, 'headers'>): string | undefined {
  const header: unknown = headers['authorization'];
  return typeof header === 'string' ? /^bearer +([^\s,]+)$/i.exec(header)?.[1] : undefined;
}
