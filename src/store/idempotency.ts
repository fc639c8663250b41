import type { KeyId } from '../domain.ts';
import { AppError } from '../errors.ts';
import type { WriteContext } from './context.ts';

/** What tells that a request repeats an earlier one, whose answer it is given. */
export interface RequestIdentity {
  keyId: KeyId;
  idempotencyKey: string;
  /** SHA-256 over method, path and validated body. */
  requestHash: Uint8Array;
}

/** The response to a write, ready to be sent. */
export interface Answer {
  statusCode: number;
  location: string | null;
  body: string;
  /** Whether this is the stored answer to an earlier request. */
  replayed: boolean;
}

/** Stores the answers to writes, and replays them. */
export function idempotencyWrites({ database, effects }: WriteContext) {
  const find = database.prepare<
    { keyId: string; idempotencyKey: string },
    { request_hash: Buffer; status_code: number; location: string | null; body: string }
  >(`
    SELECT request_hash, status_code, location, body FROM idempotency_keys
     WHERE key_id = +:keyId AND idempotency_key = +:idempotencyKey`);
  const remember = database.prepare(`
    INSERT INTO idempotency_keys (key_id, idempotency_key, request_hash, status_code, location, body, created_at)
    VALUES (:keyId, :idempotencyKey, :requestHash, :statusCode, :location, :body, :createdAt)`);

  return {
    /**
     * Performs a write and stores its answer, or returns the stored one. Both happen in one transaction, so that
     * concurrent repeats find the row. Throws `idempotency_key_reused` for another request with the same key.
     */
    once(identity: RequestIdentity | null, perform: () => Omit<Answer, 'replayed'>): Answer {
      if (identity === null) return { ...perform(), replayed: false };
      const remembered = recall(identity);
      if (remembered !== undefined) return remembered;
      const answer = perform();
      const { keyId, idempotencyKey, requestHash } = identity;
      remember.run({ keyId, idempotencyKey, requestHash, createdAt: effects.now(), ...answer });
      return { ...answer, replayed: false };
    },

    recall,
  };

  /** The stored answer to the request; undefined if it is new. Throws `idempotency_key_reused`. */
  function recall({ keyId, idempotencyKey, requestHash }: RequestIdentity): Answer | undefined {
    const found = find.get({ keyId, idempotencyKey });
    if (found === undefined) return undefined;
    if (Buffer.compare(found.request_hash, requestHash) !== 0) throw keyReused();
    return { statusCode: found.status_code, location: found.location, body: found.body, replayed: true };
  }
}

/** The error for an Idempotency-Key that was used for another request. */
export function keyReused(): AppError {
  return new AppError(
    'idempotency_key_reused',
    'this Idempotency-Key was used for another request: use a new one for each new request',
    { details: [{ in: 'header', field: 'Idempotency-Key', reason: 'was used for another request' }] },
  );
}
