import { Agent, type ClientRequest, type IncomingMessage, request as startRequest } from 'node:http';
import { text } from 'node:stream/consumers';
import type { OpenApiDocument } from '../../src/http/openapi-types.ts';
import { type Contract, createContract } from '../../test/helpers/contract.ts';
import type { Fate } from './plan.ts';

/** One request to davit. */
export interface Call {
  method: string;
  path: string;
  keySecret?: string;
  body?: unknown;
  idempotencyKey?: string | null;
  fate?: Fate;
  timeoutMs?: number;
}

export type Outcome =
  | { kind: 'answered'; status: number; headers: Headers; body: string }
  /** It is not known whether davit has carried it out. */
  | { kind: 'unanswered' };

export interface Client {
  call(call: Call): Promise<Outcome>;
  figures: { requests: number; unanswered: number; answers: Record<string, number> };
  close(): void;
}

/** Longer than davit is ever frozen, or waits for a locked file. */
const TIMEOUT_MS = 12_000;

/**
 * An HTTP client that can lose answers on purpose. `urlOf` returns where davit listens now; null: nowhere. Every answer
 * is checked against the description that davit serves; `onProblem` is called for each deviation.
 */
export function createClient(urlOf: () => string | null, onProblem: (problem: string) => void): Client {
  const agent = new Agent({ keepAlive: true, maxSockets: 64 });
  const figures: Client['figures'] = { requests: 0, unanswered: 0, answers: {} };
  let contract: Contract | undefined;

  return { call, figures, close: () => agent.destroy() };

  async function call(wanted: Call): Promise<Outcome> {
    const url = urlOf();
    if (url === null) return { kind: 'unanswered' };
    figures.requests += 1;
    const outcome = await exchange(url, wanted);
    if (outcome.kind === 'unanswered') {
      figures.unanswered += 1;
      return outcome;
    }
    figures.answers[outcome.status] = (figures.answers[outcome.status] ?? 0) + 1;
    const { status, headers, body } = outcome;
    const { method, path } = wanted;
    contract ??= await readContract(url);
    for (const problem of contract?.problems({ method, path, status, headers, body }) ?? []) {
      onProblem(`${method} ${path} → ${status}: ${problem}; the body: ${body.slice(0, 500)}`);
    }
    if (status === 500) onProblem(`${method} ${path} → 500: ${body}`);
    return outcome;
  }

  /** Undefined if davit does not answer. */
  async function readContract(url: string): Promise<Contract | undefined> {
    const description = await exchange(url, { method: 'GET', path: '/v2/openapi.json' });
    if (description.kind === 'unanswered' || description.status !== 200) return undefined;
    return createContract(JSON.parse(description.body) as OpenApiDocument);
  }

  function exchange(url: string, wanted: Call): Promise<Outcome> {
    const { method, path, keySecret, body, idempotencyKey = null, fate = 'waits' } = wanted;
    const bytes = body === undefined ? undefined : JSON.stringify(body);
    return new Promise((resolve) => {
      const unanswered = () => resolve({ kind: 'unanswered' });
      const request: ClientRequest = startRequest(`${url}${path}`, {
        method,
        agent,
        headers: {
          ...(keySecret === undefined ? {} : { Authorization: `Bearer ${keySecret}` }),
          ...(bytes === undefined
            ? {}
            : { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(bytes) }),
          ...(idempotencyKey === null ? {} : { 'Idempotency-Key': idempotencyKey }),
        },
        timeout: wanted.timeoutMs ?? TIMEOUT_MS,
      });
      request.on('error', unanswered).on('timeout', () => request.destroy());
      request.on('response', (response) => {
        if (fate === 'loses-answer') {
          request.destroy();
          unanswered();
          return;
        }
        text(response).then((answer) => resolve(answered(response, answer)), unanswered);
      });
      if (fate === 'breaks-off')
        request.on('finish', () => setImmediate(() => request.destroy(new Error('broken off'))));
      request.end(bytes);
    });
  }
}

function answered(response: IncomingMessage, body: string): Outcome {
  const headers = new Headers();
  for (let index = 0; index < response.rawHeaders.length; index += 2) {
    headers.append(response.rawHeaders[index] ?? '', response.rawHeaders[index + 1] ?? '');
  }
  if (!response.complete) return { kind: 'unanswered' };
  return { kind: 'answered', status: response.statusCode ?? 0, headers, body };
}
