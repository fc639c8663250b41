import { readFileSync } from 'node:fs';
import { Agent } from 'undici';
import { signedHeaders } from '../../../src/deliver/sign.ts';
import { realEffects } from '../../../src/effects.ts';
import { newSigningSecret } from '../../../src/secrets.ts';
import { exampleEvent } from '../davit.ts';
import { createBullmq } from '../peers/bullmq.ts';
import { createGraphileWorker } from '../peers/graphile-worker.ts';
import { createPgBoss } from '../peers/pg-boss.ts';
import type { PostgresPlace } from '../peers/postgres-accept.ts';
import { FILL_MAX, type Job, type Queue } from '../peers/queue.ts';
import { answerRequests } from './answer.ts';

/* What davit's deliveries are compared with: the same bodies, sent to the same receivers by undici. */

export type SenderRequest =
  | { kind: 'open'; sender: SenderKind; urls: string[]; caPath?: string }
  /** Queues so many deliveries. */
  | { kind: 'fill'; count: number }
  /** Delivers them all; answers when all are recorded. */
  | { kind: 'deliver' };

export type SenderKind =
  /** The limit of undici: nothing is signed or stored. */
  | { peer: 'undici' }
  | { peer: 'BullMQ'; socketPath: string }
  | { peer: 'pg-boss'; place: PostgresPlace }
  | { peer: 'graphile-worker'; place: PostgresPlace };

/** The same as davit's. */
const CONCURRENCY = 256;

let agent: Agent;
let urls: string[];
let queue: Queue;

answerRequests(async (request: SenderRequest) => {
  switch (request.kind) {
    case 'open': {
      const connect = request.caPath === undefined ? {} : { ca: readFileSync(request.caPath, 'utf8') };
      agent = new Agent({ connections: 4, pipelining: 1, connect });
      urls = request.urls;
      queue = await createQueue(request.sender);
      return undefined;
    }
    case 'fill': {
      const all = jobs(request.count);
      for (let from = 0; from < all.length; from += FILL_MAX) {
        await queue.fill(all.slice(from, from + FILL_MAX));
      }
      return undefined;
    }
    case 'deliver':
      return await queue.work(signAndSend);
    default:
      return request satisfies never;
  }
});

async function createQueue(sender: SenderKind): Promise<Queue> {
  switch (sender.peer) {
    case 'undici':
      return inMemory();
    case 'BullMQ':
      return await createBullmq(sender.socketPath, CONCURRENCY);
    case 'pg-boss':
      return await createPgBoss(sender.place, CONCURRENCY);
    case 'graphile-worker':
      return await createGraphileWorker(sender.place);
    default:
      return sender satisfies never;
  }
}

function jobs(count: number): Job[] {
  const secret = newSigningSecret(realEffects.randomBytes);
  return Array.from({ length: count }, (_, index) => {
    const { id, body } = exampleEvent();
    return { url: urls[index % urls.length] ?? '', eventId: id, body, secret };
  });
}

async function signAndSend(job: Job): Promise<number> {
  return await post(job, headersOf(job));
}

function headersOf({ eventId, secret, body }: Job): Record<string, string> {
  const atSeconds = Math.floor(Date.now() / 1000);
  return {
    'Content-Type': 'application/json',
    'User-Agent': 'davit/0.1.0',
    ...signedHeaders({ eventId, secrets: listOf(secret), atSeconds, body }),
  };
}

let secrets: readonly string[] = [];

/** The same array each time, as in davit: the prepared keys are cached by array. */
function listOf(secret: string): readonly string[] {
  if (secrets[0] !== secret) secrets = [secret];
  return secrets;
}

/** undici's `dispatch()`: a third faster than its `request()`. */
function post({ url, body }: Job, headers: Record<string, string>): Promise<number> {
  const { origin, pathname } = new URL(url);
  return new Promise((resolve, reject) => {
    let status = 0;
    agent.dispatch(
      { origin, path: pathname, method: 'POST', headers, body },
      {
        onRequestStart() {},
        onResponseStart(_controller, statusCode) {
          status = statusCode;
        },
        onResponseData() {},
        onResponseEnd() {
          if (status >= 200 && status <= 299) resolve(status);
          else reject(new Error(`${url} answered ${status}`));
        },
        onResponseError(_controller, error) {
          reject(error);
        },
      },
    );
  });
}

/** No queue at all, and only the first delivery is signed; all others have its headers. */
function inMemory(): Queue {
  const waiting: Job[] = [];
  return {
    async fill(jobs) {
      waiting.push(...jobs);
    },
    async work() {
      const [first] = waiting;
      if (first === undefined) return;
      const headers = headersOf(first);
      const left = waiting.splice(0).values();
      const sendAll = async () => {
        for (const job of left) await post(job, headers);
      };
      await Promise.all(Array.from({ length: CONCURRENCY }, sendAll));
    },
  };
}
