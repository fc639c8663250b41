import { once } from 'node:events';
import type { ClientRequest } from 'node:http';
import { request as tlsRequest } from 'node:https';
import { Readable } from 'node:stream';
import type { Plugin } from '@hapi/hapi';
import t from 'tap';
import { newId } from '../../src/domain.ts';
import { AppError } from '../../src/errors.ts';
import { notFound } from '../../src/http/errors.ts';
import { bodySchema, querySchema, refSchema } from '../../src/http/input-schemas.ts';
import type { AnsweredRequest } from '../../src/http/request-log.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import {
  connectRaw,
  heldResource,
  parseResponses,
  type RawConnection,
  rawRequest,
  requestJson,
  startHttp,
} from '../helpers/http.ts';
import { limitOpenFiles } from '../helpers/limits.ts';
import { ifHas } from '../helpers/programs.ts';
import { CA_PEM, tlsFixture } from '../helpers/receiver.ts';
import { type TestStore, testStore } from '../helpers/store.ts';

/** One route that is subject to every check, and records what reached it. */
function resource(): { reached: string[]; plugin: Plugin<void> } {
  const reached: string[] = [];
  const plugin: Plugin<void> = {
    name: 'resource',
    register(server) {
      server.route<{ Params: { id: string } }>({
        method: 'POST',
        path: '/v2/things/{id}/parts',
        options: {
          auth: { scope: 'deployments:write' },
          plugins: { input: { query: querySchema({}), payload: bodySchema({ ref: refSchema.required() }) } },
        },
        handler(request, h) {
          if (request.params.id !== 'seen') throw notFound();
          reached.push(request.params.id);
          return h.response({ made: true }).code(201).header('Location', '/v2/parts/1');
        },
      });
      server.route({
        method: 'GET',
        path: '/v2/things/{id}',
        options: { auth: { scope: 'projects:read' } },
        handler: () => ({ thing: true }),
      });
      server.route({ method: 'PATCH', path: '/v2/things/{id}', handler: () => ({}) });
      server.route({
        method: 'DELETE',
        path: '/v2/things/{id}',
        handler: (_request, h) => h.response().code(204),
      });
      server.route({
        method: 'GET',
        path: '/open',
        options: { auth: false },
        handler: () => ({ open: true }),
      });
    },
  };
  return { reached, plugin };
}

/** The bytes of a request to that route, with a new key. */
async function partFor(store: TestStore): Promise<string> {
  const { secret } = await store.key();
  return (
    `POST /v2/things/seen/parts HTTP/1.1\r\nHost: d\r\nAuthorization: Bearer ${secret}\r\n` +
    'Content-Type: application/json\r\nContent-Length: 14\r\n\r\n{"ref":"main"}'
  );
}

/** A route, `GET /slow`, that answers once told to carry on. */
function held(): { slow: Plugin<void>; isReached: Promise<void>; carryOn: () => void } {
  const reached = Promise.withResolvers<void>();
  const answered = Promise.withResolvers<void>();
  const slow: Plugin<void> = {
    name: 'slow',
    register(server) {
      server.route({
        method: 'GET',
        path: '/slow',
        options: { auth: false },
        async handler() {
          reached.resolve();
          await answered.promise;
          return { slow: true };
        },
      });
    },
  };
  return { slow, isReached: reached.promise, carryOn: answered.resolve };
}

t.test('checks run in the documented order: the first that fails is answered', async (t) => {
  const effects = fakeEffects();
  const { reached, plugin } = resource();
  const { port, store } = await startHttp(t, {
    effects,
    rateLimit: { limit: 1, windowMs: 1_000 },
    resources: () => [plugin],
  });
  const { secret: allowed } = await store.key({ scopes: ['deployments:write'] });
  const { secret: readOnly } = await store.key({ scopes: ['projects:read'] });
  const good = { ref: 'main' };

  // From row to row, one more thing is right.
  const rows: [
    name: string,
    path: string,
    key: string | undefined,
    body: unknown,
    status: number,
    says: RegExp,
  ][] = [
    ['route', '/v2/nothing?%FF=', undefined, '{', 400, /percent-encoding/],
    ['route', '/v2/nothing?x=1', undefined, '{', 404, /not_found/],
    ['syntax of the query', '/v2/things/unseen/parts?x=%FF', undefined, '{', 400, /percent-encoding/],
    ['syntax of the body', '/v2/things/unseen/parts?x=1', undefined, '{', 400, /not valid JSON/],
    ['key', '/v2/things/unseen/parts?x=1', undefined, {}, 401, /send an API key/],
    ['key', '/v2/things/unseen/parts?x=1', 'davit_wrong', {}, 401, /wrong, expired or revoked/],
    ['scope', '/v2/things/unseen/parts?x=1', readOnly, {}, 403, /deployments:write/],
    ['rate', '/v2/things/unseen/parts?x=1', readOnly, {}, 429, /rate_limited/],
    ['query', '/v2/things/unseen/parts?x=1', allowed, {}, 400, /x: is not allowed/],
    ['body', '/v2/things/unseen/parts', allowed, {}, 400, /ref: required/],
    ['body', '/v2/things/unseen/parts', allowed, { ref: '..' }, 400, /ref: must begin/],
    ['visibility', '/v2/things/unseen/parts', allowed, good, 404, /not_found/],
    ['nothing', '/v2/things/seen/parts', allowed, good, 201, /made/],
  ];
  const before = store.query('SELECT * FROM deployments');
  for (const [name, path, key, body, status, says] of rows) {
    if (name !== 'rate') effects.advance(1_000);
    t.strictSame(reached, [], name);
    const response = await requestJson(port, 'POST', path, { ...(key === undefined ? {} : { key }), body });
    t.equal(response.status, status, `${name}: ${path}`);
    t.match(JSON.stringify(response.body), says, name);
  }
  t.strictSame(reached, ['seen']);
  t.strictSame(store.query('SELECT * FROM deployments'), before);
});

t.test('every response has the documented headers and no others', async (t) => {
  const { plugin } = resource();
  const { port, store } = await startHttp(t, { resources: () => [plugin] });
  const { secret } = await store.key();
  const always = ['cache-control', 'connection', 'date', 'x-content-type-options', 'x-request-id'];
  const withBody = ['content-length', 'content-type'];
  const unauthorized = [...withBody, 'ratelimit', 'ratelimit-policy', 'www-authenticate'];
  const rows: [method: string, path: string, headers: string, status: number, more: string[]][] = [
    ['GET', '/open', '', 200, withBody],
    ['HEAD', '/open', '', 200, withBody],
    [
      'GET',
      '/open',
      'Origin: https://example.com\r\nAccept-Encoding: gzip\r\nRange: bytes=0-1\r\n',
      200,
      withBody,
    ],
    ['GET', '/open', 'Cookie: =;;"\x80; a\r\n', 200, withBody],
    ['GET', '/open', 'Accept: text/html\r\nIf-None-Match: *\r\n', 200, withBody],
    ['GET', '/open', `Cookie: ${'x'.repeat(16_000)}\r\n`, 200, withBody],
    ['GET', '/open', 'Expect: the-unexpected\r\nUpgrade: h2c\r\nConnection: upgrade\r\n', 200, withBody],
    ['GET', '/v2/things/1', `Authorization: Bearer ${secret}\r\n`, 200, withBody],
    ['DELETE', '/v2/things/1', `Authorization: Bearer ${secret}\r\n`, 204, []],
    ['GET', '/v2/things/1', '', 401, unauthorized],
    ['HEAD', '/v2/things/1', '', 401, unauthorized],
    ['GET', '/v2/nothing', '', 404, withBody],
    ['POST', '/open', '', 405, [...withBody, 'allow']],
    ['GET', '/%', '', 400, withBody],
  ];
  const requestIds = new Set<string | undefined>();
  for (const [method, path, headers, status, more] of rows) {
    const name = `${method} ${path} ${headers}`;
    const text = await rawRequest(
      port,
      Buffer.from(`${method} ${path} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n${headers}\r\n`, 'latin1'),
    );
    const end = text.indexOf('\r\n\r\n');
    const lines = text.slice(0, end).split('\r\n').slice(1);
    const received = Object.fromEntries(lines.map((line) => line.toLowerCase().split(': ')));
    t.ok(text.startsWith(`HTTP/1.1 ${status} `), name);
    t.strictSame(Object.keys(received).sort(), [...always, ...more].sort(), name);
    t.match(received, {
      'cache-control': 'no-store',
      'x-content-type-options': 'nosniff',
      'x-request-id': /^req_/,
    });
    if (more.includes('content-type'))
      t.equal(received['content-type'], 'application/json; charset=utf-8', name);
    if (method === 'HEAD') t.equal(text.length, end + 4, name);
    requestIds.add(received['x-request-id']);
  }
  t.equal(requestIds.size, rows.length, 'a request id is never used twice');
});

t.test('pipelined requests are answered in order', async (t) => {
  const { plugin } = resource();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const answers = await rawRequest(
    port,
    'GET /open HTTP/1.1\r\nHost: d\r\n\r\nGET /v2/nothing HTTP/1.1\r\nHost: d\r\n\r\nGET /open HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n',
  );
  t.strictSame(
    parseResponses(answers).map(({ status }) => status),
    [200, 404, 200],
  );
});

t.test('a client that ends its side behind its requests is answered all of them', async (t) => {
  const { plugin: held, release, heldCount } = heldResource();
  const { reached, plugin } = resource();
  const { server, port, store } = await startHttp(t, { resources: () => [held, plugin] });
  const ends: Promise<unknown>[] = [];
  server.listener.on('connection', (socket) => ends.push(once(socket, 'end')));
  const { secret } = await store.key();
  const get = 'GET /held HTTP/1.1\r\nHost: d\r\n\r\n';
  const post = (ref: string) =>
    `POST /v2/things/seen/parts HTTP/1.1\r\nHost: d\r\nAuthorization: Bearer ${secret}\r\n` +
    `Content-Type: application/json\r\nContent-Length: 14\r\n\r\n{"ref":${ref}`;
  const [waiting, both, cutOff] = [await connectRaw(port), await connectRaw(port), await connectRaw(port)];
  waiting.socket.end(get);
  both.socket.end(get + post('"main"}'));
  cutOff.socket.end(get + post('"ma'));
  await until(() => heldCount() === 3);
  await Promise.all(ends);
  release();
  const statuses = async ({ closed }: RawConnection) =>
    parseResponses(await closed).map(({ status }) => status);
  t.strictSame(await statuses(waiting), [200]);
  t.strictSame(await statuses(both), [200, 201]);
  t.strictSame(await statuses(cutOff), [200, 400]);
  t.strictSame(reached, ['seen']);
});

t.test('bytes behind a request to upgrade are not answered as a request', async (t) => {
  const { plugin } = resource();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const answers = await rawRequest(
    port,
    'GET /open HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nGET /v2/nothing HTTP/1.1\r\nHost: d\r\n\r\n',
  );
  t.strictSame(
    parseResponses(answers).map(({ status }) => status),
    [200],
  );
  t.match(answers, /\r\nConnection: close\r\n/);
});

t.test("each request is logged in one line with its key's id and route, without secrets", async (t) => {
  const { plugin } = resource();
  const { port, store, log } = await startHttp(t, { resources: () => [plugin] });
  const { keyId, secret } = await store.key();
  const response = await requestJson(port, 'POST', '/v2/things/seen/parts', {
    key: secret,
    body: { ref: 'hunter2' },
  });
  const [line, ...others] = log;
  t.match(line, {
    level: 30,
    msg: 'request',
    request_id: response.headers.get('x-request-id'),
    key_id: keyId,
    method: 'POST',
    route: '/v2/things/{id}/parts',
    status: 201,
    duration_ms: Number,
  });
  t.strictSame(others, []);
  for (const kind of ['dlv', 'dpl', 'evt', 'prj', 'whk'] as const) {
    const id = newId(kind, fakeEffects());
    await requestJson(port, 'GET', `/v2/things/${id}`, { key: secret });
    t.match(log.at(-1), { route: '/v2/things/{id}', id }, 'with an id in the path');
    await requestJson(port, 'GET', `/v2/things/${id}${secret}`, { key: secret });
    t.notHas(log.at(-1), { id: String }, 'and nothing else that is there');
  }
  await requestJson(port, 'GET', `/v2/nothing/${secret}?key=${secret}`, { key: secret });
  t.match(log.at(-1), { method: 'GET', status: 404 });
  for (const field of ['key_id', 'route']) t.equal(log.at(-1)?.[field], null, field);
  t.notMatch(JSON.stringify(log), new RegExp(`${secret}|hunter2`));
});

t.test(
  'a request whose client left before its answer counts as 499, also if it was to be refused',
  async (t) => {
    let begun = 0;
    const plugin: Plugin<void> = {
      name: 'left',
      register(server) {
        server.route<{ Params: { outcome: string } }>({
          method: 'POST',
          path: '/{outcome}',
          options: { auth: false },
          async handler({ params, raw }) {
            begun += 1;
            await once(raw.res, 'close');
            if (params.outcome === 'refused') throw new AppError('conflict', 'it is too late');
            if (params.outcome === 'bug') throw new Error('a bug');
            return { done: true };
          },
        });
      },
    };
    const answered: AnsweredRequest[] = [];
    const { port, log } = await startHttp(t, {
      resources: () => [plugin],
      onAnswer: (request) => answered.push(request),
    });
    const rest = ' HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}';
    for (const [index, outcome] of ['done', 'refused', 'bug'].entries()) {
      const client = await connectRaw(port);
      client.send(`POST /${outcome}${rest}`);
      await until(() => begun > index);
      client.socket.resetAndDestroy();
    }
    await until(() => answered.length === 3);
    t.strictSame(
      answered.map(({ status }) => status),
      [499, 499, 499],
    );
    const [problem, ...others] = log.filter(({ level }) => level !== 30);
    t.match(problem, { level: 50, msg: 'a response broke off', err: { message: 'a bug' } });
    t.strictSame(others, [], 'of the three, only the bug is a problem');
  },
);

t.test('that a client leaves before the end of its answer counts so too, and is no problem', async (t) => {
  const plugin: Plugin<void> = {
    name: 'endless',
    register(server) {
      const handler = () => {
        const answer = new Readable({ read() {} });
        answer.push('beginning');
        return answer;
      };
      server.route({ method: 'GET', path: '/endless', options: { auth: false }, handler });
    },
  };
  const answered: AnsweredRequest[] = [];
  const { port, log } = await startHttp(t, {
    resources: () => [plugin],
    onAnswer: (request) => answered.push(request),
  });
  const client = await connectRaw(port);
  client.send('GET /endless HTTP/1.1\r\nHost: d\r\n\r\n');
  await client.received('beginning');
  client.socket.resetAndDestroy();
  await until(() => answered.length === 1);
  t.match(answered, [{ status: 499 }]);
  t.strictSame(
    log.map(({ level, duration_ms }) => [level, duration_ms]),
    answered.map(({ durationMs }) => [30, Number(durationMs.toFixed(3))]),
  );
});

t.test('that an answer breaks off is a problem, whatever the cause', async (t) => {
  const causes = [new Error('a bug'), new AppError('unavailable', 'the disk is out of reach')];
  const plugin: Plugin<void> = {
    name: 'breaking off',
    register(server) {
      server.route<{ Params: { cause: number } }>({
        method: 'GET',
        path: '/{cause}',
        options: { auth: false },
        handler({ params }) {
          const answer = new Readable({ read() {} });
          answer.push('beginning');
          setImmediate(() => answer.destroy(causes[params.cause]));
          return answer;
        },
      });
    },
  };
  const { port, log } = await startHttp(t, { resources: () => [plugin] });
  for (const cause of causes.keys()) {
    const client = await connectRaw(port);
    client.send(`GET /${cause} HTTP/1.1\r\nHost: d\r\n\r\n`);
    t.match(await client.closed, /beginning/);
    await until(() => log.filter(({ msg }) => msg === 'request').length > cause);
  }
  t.strictSame(
    log.filter(({ level }) => level !== 30).map(({ level, msg, err }) => [level, msg, Object(err).message]),
    causes.map(({ message }) => [50, 'a response broke off', message]),
  );
});

t.test('connections may take half of the open files allowed', ifHas('prlimit'), async (t) => {
  const lift = limitOpenFiles(200);
  t.teardown(lift);
  const { port } = await startHttp(t);
  lift();
  const first = await connectRaw(port);
  const others = await Promise.all(Array.from({ length: 99 }, () => connectRaw(port)));
  first.send('GET /none HTTP/1.1\r\nHost: d\r\n\r\n');
  t.match(await first.received('not_found'), /^HTTP\/1\.1 404 /);
  const oneMore = await connectRaw(port);
  t.equal(await Promise.race(others.map(({ closed }) => closed)), '', 'another one is closed for it');
  oneMore.send('GET /none HTTP/1.1\r\nHost: d\r\n\r\n');
  t.match(await oneMore.received('not_found'), /^HTTP\/1\.1 404 /);
});

t.test('connections have timeouts', async (t) => {
  const { server } = await startHttp(t);
  t.match(server.listener, {
    headersTimeout: 10_000,
    requestTimeout: 20_000,
    keepAliveTimeout: 65_000,
    timeout: 120_000,
  });
});

t.test('while davit stops, a kept-alive connection is closed after its next answer', async (t) => {
  const stopping = new AbortController();
  const { port } = await startHttp(t, { stopping: stopping.signal });
  const connection = await connectRaw(port);
  const get = 'GET /none HTTP/1.1\r\nHost: d\r\n\r\n';
  connection.send(get);
  t.match(await connection.received('not_found'), /\r\nConnection: keep-alive\r\n/);
  stopping.abort();
  connection.send(get);
  t.match(parseResponses(await connection.closed), [{ status: 404 }, { status: 404 }]);
});

t.test(
  'while davit stops, pipelined requests are all answered before their connection is closed',
  async (t) => {
    const stopping = new AbortController();
    const { reached, plugin } = resource();
    const { port, store } = await startHttp(t, { resources: () => [plugin], stopping: stopping.signal });
    const post = await partFor(store);
    stopping.abort();
    const connection = await connectRaw(port);
    connection.send(post.repeat(3));
    const answers = parseResponses(await connection.closed);
    t.strictSame(reached, ['seen', 'seen', 'seen']);
    t.match(answers, [{ status: 201 }, { status: 201 }, { status: 201, headers: { connection: 'close' } }]);
  },
);

t.test('a request under way when davit begins to stop is the last one on its connection', async (t) => {
  const stopping = new AbortController();
  const { slow, isReached, carryOn } = held();
  const { port } = await startHttp(t, { resources: () => [slow], stopping: stopping.signal });
  const connection = await connectRaw(port);
  connection.send('GET /slow HTTP/1.1\r\nHost: d\r\n\r\n');
  await isReached;
  stopping.abort();
  carryOn();
  t.match(parseResponses(await connection.closed), [{ status: 200, headers: { connection: 'close' } }]);
});

t.test('a request that comes behind the last answer of its connection is not carried out', async (t) => {
  const stopping = new AbortController();
  const { slow, isReached, carryOn } = held();
  const { reached, plugin } = resource();
  const decided = Promise.withResolvers<void>();
  const observer: Plugin<void> = {
    name: 'observer',
    register: (server) =>
      server.ext('onPreResponse', ({ method }, h) => {
        if (method === 'post') decided.resolve();
        return h.continue;
      }),
  };
  const { port, store } = await startHttp(t, {
    resources: () => [slow, plugin, observer],
    stopping: stopping.signal,
  });
  const post = await partFor(store);
  const connection = await connectRaw(port);
  connection.send('GET /slow HTTP/1.1\r\nHost: d\r\n\r\n');
  await isReached;
  stopping.abort();
  connection.send(post);
  await decided.promise;
  connection.send(post);
  const other = await connectRaw(port);
  other.send(post);
  await other.closed; // by then the one before would have been carried out, too
  carryOn();
  const answers = parseResponses(await connection.closed);
  t.match(answers, [{ status: 200 }, { status: 201, headers: { connection: 'close' } }]);
  t.strictSame(reached, ['seen', 'seen']);
});

t.test('a client that resets its connection within a request disturbs no other', async (t) => {
  const { reached, plugin } = resource();
  const { port, store } = await startHttp(t, { resources: () => [plugin] });
  const { secret } = await store.key();
  for (const part of [
    'POST /v2/things/seen',
    'POST /v2/things/seen/parts HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{',
  ]) {
    const connection = await connectRaw(port);
    connection.send(part);
    connection.socket.resetAndDestroy();
  }
  const response = await requestJson(port, 'POST', '/v2/things/seen/parts', {
    key: secret,
    body: { ref: 'main' },
  });
  t.equal(response.status, 201);
  t.strictSame(reached, ['seen']);
});

t.test(
  'a stop waits until the requests under way are answered, and closes connections that are idle',
  async (t) => {
    const { slow, isReached, carryOn } = held();
    const { server, port } = await startHttp(t, { resources: () => [slow, resource().plugin] });
    const idle = await connectRaw(port);
    idle.send('GET /open HTTP/1.1\r\nHost: d\r\n\r\n');
    await idle.received('open');
    const busy = await connectRaw(port);
    busy.send('GET /slow HTTP/1.1\r\nHost: d\r\n\r\n');
    await isReached;

    const stopped = server.stop({ timeout: 10_000 });
    await idle.closed;
    carryOn();
    t.match(parseResponses(await busy.closed), [
      { status: 200, headers: { connection: 'close' }, body: '{"slow":true}' },
    ]);
    await stopped;
    await t.rejects(rawRequest(port, 'GET /open HTTP/1.1\r\n\r\n'), { code: 'ECONNREFUSED' });
  },
);

const TLS = { chain: tlsFixture('localhost.pem'), key: tlsFixture('localhost.key') };

function getOverTls(port: number, path: string): ClientRequest {
  return tlsRequest({ port, host: 'localhost', path, ca: CA_PEM, agent: false }).end();
}

t.test('requests are served over TLS', async (t) => {
  const { port } = await startHttp(t, { resources: () => [resource().plugin], tls: TLS });
  const [response] = await once(getOverTls(port, '/open'), 'response');
  t.equal(response.statusCode, 200);
  t.match(response.headers['x-request-id'], /^req_/);
  response.resume();
  await once(response, 'close');
});

t.test('over TLS, too, a stop lets requests under way end', async (t) => {
  const { slow, isReached, carryOn } = held();
  const { port, server } = await startHttp(t, { resources: () => [slow], tls: TLS });
  const answered = once(getOverTls(port, '/slow'), 'response');
  await isReached;
  const closing = server.events.once('closing');
  const stopped = server.stop({ timeout: 60_000 });
  await closing;
  carryOn();
  const [response] = await answered;
  t.equal(response.statusCode, 200);
  response.resume();
  await stopped;
});

t.test('a start on a port that is taken fails with EADDRINUSE', async (t) => {
  const store = testStore(t);
  const { port } = await startHttp(t, { store });
  await t.rejects(startHttp(t, { store, listen: { host: '127.0.0.1', port } }), { code: 'EADDRINUSE' });
});
