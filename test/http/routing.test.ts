import type { Plugin } from '@hapi/hapi';
import t from 'tap';
import { connectRaw, parseResponses, type RawResponse, rawRequest, startHttp } from '../helpers/http.ts';

/** The routes that exist in these tests. */
const ROUTES: [method: 'GET' | 'POST' | 'PATCH' | 'DELETE', path: string][] = [
  ['POST', '/v2/things/{id}/parts'],
  ['GET', '/v2/things/{id}'],
  ['PATCH', '/v2/things/{id}'],
  ['DELETE', '/v2/things/{id}'],
  ['GET', '/open'],
];

const things: Plugin<void> = {
  name: 'things',
  register(server) {
    for (const [method, path] of ROUTES) {
      server.route({ method, path, options: { auth: false }, handler: () => ({ there: true }) });
    }
  },
};

t.test('a wrong method is 405 with Allow, an unknown path 404, a malformed one 400', async (t) => {
  const { port } = await startHttp(t, { resources: () => [things] });
  const rows: [method: string, path: string, status: number, allow: string | undefined][] = [
    ['POST', '/v2/things/1', 405, 'GET, HEAD, PATCH, DELETE'],
    ['PUT', '/v2/things/1', 405, 'GET, HEAD, PATCH, DELETE'],
    ['OPTIONS', '/v2/things/1', 405, 'GET, HEAD, PATCH, DELETE'],
    ['GET', '/v2/things/1/parts', 405, 'POST'],
    ['HEAD', '/v2/things/1/parts', 405, 'POST'],
    ['OPTIONS', '/open', 405, 'GET, HEAD'],
    ['PROPFIND', '/open', 405, 'GET, HEAD'],
    ['GET', '/', 404, undefined],
    ['GET', '/v2', 404, undefined],
    ['GET', '/v1/things/1', 404, undefined],
    ['GET', '/V2/things/1', 404, undefined],
    ['GET', '/v2/things', 404, undefined],
    ['GET', '/v2/things/', 404, undefined],
    ['GET', '/v2/things/1/', 404, undefined],
    ['GET', '//v2/things/1', 404, undefined],
    ['GET', '/v2/things/1/2', 404, undefined],
    ['OPTIONS', '/v2/nothing', 404, undefined],
    ['GET', '/open/%2e%2e/x', 404, undefined],
    ['GET', '/{any*}', 404, undefined],
    ['GET', '/v2/%FF', 400, undefined],
    ['GET', '/v2/%zz', 400, undefined],
    ['POST', '/v2/things/%C0%80', 400, undefined],
  ];
  for (const [method, path, status, allow] of rows) {
    const response = await answerTo(port, `${method} ${path} HTTP/1.1`, 'Host: d');
    t.equal(response.status, status, `${method} ${path}`);
    t.equal(response.headers['allow'], allow, `${method} ${path}`);
    t.equal(response.headers['content-type'], 'application/json; charset=utf-8', `${method} ${path}`);
  }
});

t.test('dot segments and backslashes are not resolved to another path', async (t) => {
  const { port } = await startHttp(t, { resources: () => [things] });
  const statusOf = async (target: string) =>
    (await answerTo(port, `GET ${target} HTTP/1.1`, 'Host: d')).status;
  for (const target of [
    '/v2/things/../../open',
    '/v2/%2e%2e/open',
    '/v2/.%2E/open',
    '/./open',
    '/%2e/open',
    '/open/.',
    '/v2/things/1/..',
    '/v2\\..\\open',
    '/v2/things\\1',
    '\\open',
    'http://d/v2/../open',
    'http://d/v2\\..\\open',
  ]) {
    t.match(await statusOf(target), /^40[04]$/, target);
  }
  for (const target of ['/v2/things/..1', '/v2/things/1...', 'http://d/open']) {
    t.equal(await statusOf(target), 200, target);
  }
  t.equal(await statusOf('/open?of=/../x'), 400, 'a query may hold them: this one is refused for its name');
});

t.test('a request without a route is answered before its body has arrived', async (t) => {
  const { port } = await startHttp(t, { resources: () => [things] });
  for (const line of ['POST /v2/nothing', 'POST /open', 'POST /v2/%FF']) {
    const connection = await connectRaw(port);
    connection.send(`${line} HTTP/1.1\r\nHost: d\r\nContent-Length: 1000000000\r\n\r\n{`);
    await connection.received('"request_id"');
    connection.socket.end();
    await connection.closed;
  }
});

t.test('HTTP/1.1 needs exactly one valid Host header', async (t) => {
  const { port } = await startHttp(t, { resources: () => [things] });
  const statusOf = async (...lines: string[]) => (await answerTo(port, ...lines)).status;
  t.equal(await statusOf('GET /open HTTP/1.1', 'Host: d'), 200);
  t.equal(await statusOf('GET http://d/open HTTP/1.1', 'Host: d'), 200);
  t.equal(await statusOf('GET /open HTTP/1.1', 'Host: host', 'Forwarded-By: host'), 200);
  t.equal(await statusOf('GET /open HTTP/1.1'), 400);
  t.equal(await statusOf('GET /open HTTP/1.1', 'Host: d', 'Host: e'), 400);
  t.equal(await statusOf('GET /open HTTP/1.0'), 200);
  for (const host of [
    '',
    'a-b.example:80',
    '127.0.0.1:1',
    '[::1]:8080',
    '[fe80::1%25lo]',
    'a:',
    'under_score',
    'a%20b',
  ]) {
    t.equal(await statusOf('GET /open HTTP/1.1', `Host: ${host}`), 200, host);
  }
  for (const host of ['a b', 'a/b', 'a@b', '[::1', '::1', 'a:b', 'ä', 'a?b']) {
    t.equal(await statusOf('GET /open HTTP/1.1', `Host: ${host}`), 400, host);
  }
});

t.test('a repeated Authorization or Content-Type header is answered 400', async (t) => {
  const { port } = await startHttp(t, { resources: () => [things] });
  for (const [name, one, other] of [
    ['Authorization', 'Bearer one', 'Bearer other'],
    ['Content-Type', 'application/json', 'text/plain'],
  ] as const) {
    const repeated = [`${name}: ${one}`, `${name.toLowerCase()}: ${other}`];
    const response = await answerTo(port, 'GET /open HTTP/1.1', 'Host: d', ...repeated);
    t.match(response, { status: 400 });
    t.match(JSON.stringify(response), new RegExp(`${name}.*must be sent once`));
  }
});

t.test('a request target without a path is answered 400', async (t) => {
  const { port } = await startHttp(t, { resources: () => [things] });
  const targets = {
    'foo://bar': 400,
    'foo://bar?x=1#y': 400,
    'foo://': 400,
    'http://': 400,
    'http://d': 404,
    '*': 400,
  };
  for (const [target, status] of Object.entries(targets)) {
    for (const method of ['GET', 'HEAD', 'POST', 'OPTIONS']) {
      const answer = await answerTo(port, `${method} ${target} HTTP/1.1`, 'Host: d');
      t.equal(answer.status, status, `${method} ${target}`);
    }
  }
});

/** The one answer to a request of these lines, without a body. */
async function answerTo(port: number, ...lines: string[]): Promise<RawResponse> {
  const head = [...lines, 'Connection: close', '', ''].join('\r\n');
  const [answer, ...others] = parseResponses(await rawRequest(port, head));
  if (answer === undefined || others.length > 0) throw new Error('one request has one answer');
  return answer;
}
