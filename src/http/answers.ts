import { hash } from 'node:crypto';
import type { Request, ResponseObject, ResponseToolkit } from '@hapi/hapi';
import type { Attempt } from '../domain.ts';
import { AppError } from '../errors.ts';
import { type Answer, type IdempotencyMemory, keyReused } from '../store/idempotency.ts';
import type { AnsweringOperation, AnswerRequest, InputOf } from '../store/operations.ts';
import type { Writer } from '../store/writer.ts';
import { callerOf } from './auth.ts';
import { notFound } from './errors.ts';
import { idempotencyKey } from './validation.ts';

/** What of a request decides whether another repeats it. */
type WriteRequest = Pick<Request, 'auth' | 'headers' | 'method' | 'path' | 'payload'>;

type Toolkit = Pick<ResponseToolkit, 'response'>;

/** What a write that went well is answered with, besides its body. */
const FORMS: Record<AnsweringOperation, Pick<AnswerRequest, 'statusCode' | 'locationPrefix'>> = {
  'deployments.create': { statusCode: 201, locationPrefix: '/v2/deployments/' },
  'deployments.redeploy': { statusCode: 201, locationPrefix: '/v2/deployments/' },
  'deployments.cancel': { statusCode: 202, locationPrefix: null },
  'deployments.report': { statusCode: 200, locationPrefix: null },
  'webhooks.create': { statusCode: 201, locationPrefix: '/v2/webhooks/' },
  'webhooks.update': { statusCode: 200, locationPrefix: null },
  'webhooks.rotate': { statusCode: 200, locationPrefix: null },
  'webhooks.remove': { statusCode: 204, locationPrefix: null },
  'deliveries.redeliver': { statusCode: 202, locationPrefix: null },
  'replays.create': { statusCode: 202, locationPrefix: null },
  'pings.keep': { statusCode: 200, locationPrefix: null },
};

/** How writes are answered, once for each Idempotency-Key. */
export interface Answers {
  /**
   * Performs a write and answers with what it made, in one transaction with the request's Idempotency-Key:
   * a repeat is answered with the same bytes and `Idempotent-Replayed: true`.
   */
  write<Name extends AnsweringOperation>(
    request: WriteRequest,
    h: Toolkit,
    operation: Name,
    input: InputOf<Name>,
  ): Promise<ResponseObject>;
  /**
   * For a write to what is not there, or not any more: if it repeats one that was answered, that answer. What a key
   * sees never changes, so it saw it then. Throws `not_found`.
   */
  repeat(request: WriteRequest, h: Toolkit): Promise<ResponseObject>;
  /**
   * As `write`, for an attempt that is made right now and that no transaction can hold. Its answer is remembered
   * after it. Repeats that come meanwhile wait for it, and other requests with its key are refused; only the end of
   * davit in between lets one be made a second time.
   */
  attempt(request: WriteRequest, h: Toolkit, perform: () => Promise<Attempt>): Promise<ResponseObject>;
}

/** One for all of a service: every write looks at the attempts that are under way. */
export function createAnswers(writer: Writer): Answers {
  const underWay = new Map<string, { requestHash: Uint8Array; answer: Promise<Answer> }>();

  return {
    async write(request, h, operation, input) {
      const memory = idempotencyMemory(request);
      const { keyId } = callerOf(request);
      const asked = { operation, input, keyId, memory, ...FORMS[operation] };
      return respond(h, await (repeatedUnderWay(memory) ?? writer.write('answer', asked as AnswerRequest)));
    },

    async repeat(request, h) {
      const memory = idempotencyMemory(request);
      const remembered = memory === null ? undefined : await recallIfSame(memory);
      if (remembered === undefined) throw notFound();
      return respond(h, remembered);
    },

    async attempt(request, h, perform) {
      const memory = idempotencyMemory(request);
      if (memory === null) return h.response(await perform());
      return respond(h, await (repeatedUnderWay(memory) ?? begin(memory, perform)));
    },
  };

  /** Undefined for another request with the key, too: visibility is judged before what the key was used for. */
  async function recallIfSame(memory: IdempotencyMemory): Promise<Answer | undefined> {
    try {
      return await writer.write('idempotency.recall', memory);
    } catch (error) {
      if (error instanceof AppError && error.code === 'idempotency_key_reused') return undefined;
      throw error;
    }
  }

  /** The answer to come of an attempt that this repeats. Throws `idempotency_key_reused` if it is no repeat. */
  function repeatedUnderWay(memory: IdempotencyMemory | null): Promise<Answer> | undefined {
    if (memory === null) return undefined;
    const first = underWay.get(nameOf(memory));
    if (first === undefined) return undefined;
    if (Buffer.compare(first.requestHash, memory.requestHash) !== 0) throw keyReused();
    return first.answer.then((answer) => ({ ...answer, replayed: true }));
  }

  function begin(memory: IdempotencyMemory, perform: () => Promise<Attempt>): Promise<Answer> {
    const name = nameOf(memory);
    const answer = recallOrPerform(memory, perform).finally(() => underWay.delete(name));
    underWay.set(name, { requestHash: memory.requestHash, answer });
    return answer;
  }

  async function recallOrPerform(
    memory: IdempotencyMemory,
    perform: () => Promise<Attempt>,
  ): Promise<Answer> {
    const remembered = await writer.write('idempotency.recall', memory);
    if (remembered !== undefined) return remembered;
    const attempt = await perform();
    const { keyId } = memory;
    return await writer.write('answer', {
      operation: 'pings.keep',
      input: attempt,
      keyId,
      memory,
      ...FORMS['pings.keep'],
    });
  }
}

function nameOf({ keyId, idempotencyKey }: IdempotencyMemory): string {
  return `${keyId} ${idempotencyKey}`;
}

function respond(h: Toolkit, { statusCode, location, body, replayed }: Answer): ResponseObject {
  const response = body === '' ? h.response() : h.response(body).type('application/json');
  response.code(statusCode);
  if (location !== null) response.header('Location', location);
  if (replayed) response.header('Idempotent-Replayed', 'true');
  return response;
}

function idempotencyMemory(request: WriteRequest): IdempotencyMemory | null {
  const key = idempotencyKey(request);
  if (key === undefined) return null;
  return { keyId: callerOf(request).keyId, idempotencyKey: key, requestHash: requestHash(request) };
}

/** Of the validated body, so that the order of fields and white space make no other request of it. */
function requestHash({ method, path, payload }: WriteRequest): Uint8Array {
  return hash('sha256', JSON.stringify([method, path, sorted(payload)]), 'buffer');
}

/** Our bodies are plain values, lists of them, and objects. */
function sorted(value: unknown): unknown {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return value;
  return Object.entries(value)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, item]) => [name, sorted(item)]);
}
