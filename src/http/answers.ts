import { hash } from 'node:crypto';
import type { Request, ResponseObject, ResponseToolkit } from '@hapi/hapi';
import type { Attempt } from '../domain.ts';
import { AppError } from '../errors.ts';
import { type Answer, keyReused, type RequestIdentity } from '../store/idempotency.ts';
import type { AnsweringOperation, AnswerRequest, InputOf } from '../store/operations.ts';
import type { Writer } from '../store/writer.ts';
import { callerOf } from './auth.ts';
import { notFound } from './errors.ts';
import { idempotencyKey } from './validation.ts';

/** The parts of a request that decide whether another one repeats it. */
type WriteRequest = Pick<Request, 'auth' | 'headers' | 'method' | 'path' | 'payload'>;

type Toolkit = Pick<ResponseToolkit, 'response'>;

/** The response to a successful write, besides its body. */
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

/** Performs and answers writes, once for each Idempotency-Key. */
export interface Answers {
  /**
   * Performs a write, and stores its answer under the request's Idempotency-Key in the same transaction. A repeat gets
   * the same bytes, with `Idempotent-Replayed: true`.
   *
   * `input` undefined: the resource does not exist (any more). Then a repeat gets the stored answer all the same, and
   * any other request `not_found`. This shows a key nothing new: the projects that it sees never change, so it saw the
   * resource at the first request.
   */
  write<Name extends AnsweringOperation>(
    request: WriteRequest,
    h: Toolkit,
    operation: Name,
    input: InputOf<Name> | undefined,
  ): Promise<ResponseObject>;
  /**
   * As `write`, for an input that takes a while to find out. Meanwhile, repeats wait for its answer, and other requests
   * with its Idempotency-Key are refused.
   */
  writePlanned<Name extends AnsweringOperation>(
    request: WriteRequest,
    h: Toolkit,
    operation: Name,
    plan: (() => Promise<InputOf<Name>>) | undefined,
  ): Promise<ResponseObject>;
  /**
   * The same for an attempt that is made right now, and so outside of any transaction: its answer is stored after it. It
   * is made twice only if davit ends in between.
   */
  attempt(
    request: WriteRequest,
    h: Toolkit,
    perform: (() => Promise<Attempt>) | undefined,
  ): Promise<ResponseObject>;
}

/** Create one for the whole service: every write checks its key against the requests that are under way. */
export function createAnswers(writer: Writer): Answers {
  const underWay = new Map<string, { requestHash: Uint8Array; answer: Promise<Answer> }>();

  return {
    async write(request, h, operation, input) {
      const identity = identityOf(request);
      if (input === undefined) return repeat(identity, h);
      const answer = repeatedUnderWay(identity) ?? writeNow(request, identity, operation, input);
      return respond(h, await answer);
    },

    writePlanned: (request, h, operation, plan) => planned(request, identityOf(request), h, operation, plan),

    async attempt(request, h, perform) {
      const identity = identityOf(request);
      if (perform !== undefined && identity === null) return h.response(await perform());
      return planned(request, identity, h, 'pings.keep', perform);
    },
  };

  async function planned<Name extends AnsweringOperation>(
    request: WriteRequest,
    identity: RequestIdentity | null,
    h: Toolkit,
    operation: Name,
    plan: (() => Promise<InputOf<Name>>) | undefined,
  ): Promise<ResponseObject> {
    if (plan === undefined) return repeat(identity, h);
    const perform = async () => writeNow(request, identity, operation, await plan());
    return respond(h, await (identity === null ? perform() : performOnce(identity, perform)));
  }

  function writeNow<Name extends AnsweringOperation>(
    request: WriteRequest,
    identity: RequestIdentity | null,
    operation: Name,
    input: InputOf<Name>,
  ): Promise<Answer> {
    const { keyId } = callerOf(request);
    const asked = { operation, input, keyId, identity, ...FORMS[operation] };
    return writer.write('answer', asked as AnswerRequest);
  }

  async function repeat(identity: RequestIdentity | null, h: Toolkit): Promise<ResponseObject> {
    const remembered = identity === null ? undefined : await recallIfSame(identity);
    if (remembered === undefined) throw notFound();
    return respond(h, remembered);
  }

  /** Also undefined if the key was used for another request: visibility comes first, so that is 404 and not 422. */
  async function recallIfSame(identity: RequestIdentity): Promise<Answer | undefined> {
    try {
      return await (repeatedUnderWay(identity) ?? writer.write('idempotency.recall', identity));
    } catch (error) {
      if (error instanceof AppError && error.code === 'idempotency_key_reused') return undefined;
      throw error;
    }
  }

  /** The future answer of the request under way with this key. Throws `idempotency_key_reused` for another request. */
  function repeatedUnderWay(identity: RequestIdentity | null): Promise<Answer> | undefined {
    if (identity === null) return undefined;
    const first = underWay.get(underWayKey(identity));
    if (first === undefined) return undefined;
    if (Buffer.compare(first.requestHash, identity.requestHash) !== 0) throw keyReused();
    return first.answer.then((answer) => ({ ...answer, replayed: true }));
  }

  async function performOnce(identity: RequestIdentity, perform: () => Promise<Answer>): Promise<Answer> {
    // Before it counts as under way: a request that is refused because of a stored answer must not refuse its repeats.
    const remembered = await writer.write('idempotency.recall', identity);
    if (remembered !== undefined) return remembered;
    const repeated = repeatedUnderWay(identity);
    if (repeated !== undefined) return await repeated;
    const name = underWayKey(identity);
    const answer = perform().finally(() => underWay.delete(name));
    underWay.set(name, { requestHash: identity.requestHash, answer });
    return await answer;
  }
}

function underWayKey({ keyId, idempotencyKey }: RequestIdentity): string {
  return `${keyId} ${idempotencyKey}`;
}

function respond(h: Toolkit, { statusCode, location, body, replayed }: Answer): ResponseObject {
  const response = body === '' ? h.response() : h.response(body).type('application/json');
  response.code(statusCode);
  if (location !== null) response.header('Location', location);
  if (replayed) response.header('Idempotent-Replayed', 'true');
  return response;
}

/** Null: it has no Idempotency-Key. */
function identityOf(request: WriteRequest): RequestIdentity | null {
  const key = idempotencyKey(request);
  if (key === undefined) return null;
  return { keyId: callerOf(request).keyId, idempotencyKey: key, requestHash: requestHash(request) };
}

/** Hashes the validated body, so that white space and the order of fields do not matter. */
function requestHash({ method, path, payload }: WriteRequest): Uint8Array {
  return hash('sha256', JSON.stringify([method, path, sorted(payload)]), 'buffer');
}

/** Sorts the fields of objects. Lists stay as they are: in this API they hold only plain values. */
function sorted(value: unknown): unknown {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return value;
  return Object.entries(value)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, item]) => [name, sorted(item)]);
}
