import { createHash } from 'node:crypto';
import type { Request, ResponseObject, ResponseToolkit } from '@hapi/hapi';
import type { IdempotencyMemory } from '../store/idempotency.ts';
import type { AnswerRequest } from '../store/operations.ts';
import type { Writer } from '../store/writer.ts';
import { callerOf } from './auth.ts';
import { idempotencyKey } from './validation.ts';

/** What of a request decides whether another repeats it. */
type WriteRequest = Pick<Request, 'auth' | 'headers' | 'method' | 'path' | 'payload'>;

/**
 * Performs a write and answers with what it made, in one transaction with the request's Idempotency-Key:
 * a repeat is answered with the same bytes and `Idempotent-Replayed: true`.
 */
export async function answerWrite(
  request: WriteRequest,
  h: Pick<ResponseToolkit, 'response'>,
  writer: Writer,
  write: Omit<AnswerRequest, 'memory'>,
): Promise<ResponseObject> {
  const memory = idempotencyMemory(request);
  const answer = await writer.write('answer', { ...write, memory } as AnswerRequest);
  const response = h.response(answer.body).code(answer.statusCode).type('application/json');
  if (answer.location !== null) response.header('Location', answer.location);
  if (answer.replayed) response.header('Idempotent-Replayed', 'true');
  return response;
}

function idempotencyMemory(request: WriteRequest): IdempotencyMemory | null {
  const key = idempotencyKey(request);
  if (key === undefined) return null;
  return { keyId: callerOf(request).keyId, idempotencyKey: key, requestHash: requestHash(request) };
}

/** Of the validated body, so that the order of fields and white space make no other request of it. */
function requestHash({ method, path, payload }: WriteRequest): Uint8Array {
  return createHash('sha256')
    .update(JSON.stringify([method, path, sorted(payload)]))
    .digest();
}

/** Our bodies are objects of plain values and lists. */
function sorted(payload: unknown): unknown {
  if (typeof payload !== 'object' || payload === null) return payload;
  return Object.entries(payload).sort(([a], [b]) => (a < b ? -1 : 1));
}
