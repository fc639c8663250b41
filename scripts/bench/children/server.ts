import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { Server } from '@hapi/hapi';
import { createPostgresAnswers, type PostgresPlace } from '../peers/postgres-accept.ts';
import { startPlainService } from '../plain-service.ts';
import { answerRequests } from './answer.ts';

/* What davit's HTTP API is compared with, each in a process of its own. */

export type ServerRequest =
  /** Node's own server: reads a body and answers with one. */
  | { kind: 'node'; answer: string }
  /** A hapi route and nothing else. */
  | { kind: 'hapi'; answer: string }
  /** hapi, and one transaction for each request. */
  | { kind: 'hapi on PostgreSQL'; answer: string; place: PostgresPlace }
  /** davit's own code, with one commit for each request, in the main thread. */
  | { kind: 'plain'; directory: string };

answerRequests(async (request: ServerRequest): Promise<string> => {
  switch (request.kind) {
    case 'node':
      return await startNode(request.answer);
    case 'hapi':
      return await startHapi(request.answer, async () => undefined);
    case 'hapi on PostgreSQL': {
      const store = await createPostgresAnswers(request.place, request.answer);
      return await startHapi(request.answer, store);
    }
    case 'plain':
      return await startPlainService(request.directory);
    default:
      return request satisfies never;
  }
});

async function startNode(answer: string): Promise<string> {
  const headers = { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(answer) };
  const server = createServer((request, response) => {
    request.resume().on('end', () => response.writeHead(201, headers).end(answer));
  });
  await once(server.listen(0, '127.0.0.1'), 'listening');
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

type Store = (ref: string, idempotencyKey: string) => Promise<void>;

/** hapi parses the body, as by default; the answer was serialised before. */
async function startHapi(answer: string, store: Store): Promise<string> {
  const server = new Server({ host: '127.0.0.1', port: 0 });
  server.route([
    { method: 'GET', path: '/', handler: (_request, h) => h.response(answer).type('application/json') },
    {
      method: 'POST',
      path: '/',
      async handler(request, h) {
        const { ref } = request.payload as { ref: string };
        await store(ref, String(request.headers['idempotency-key']));
        return h.response(answer).type('application/json').code(201);
      },
    },
  ]);
  await server.start();
  return server.info.uri;
}
