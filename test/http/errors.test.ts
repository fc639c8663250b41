import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import {
  badRequest,
  boomify,
  notFound as boomNotFound,
  unauthorized as boomUnauthorized,
  forbidden,
  methodNotAllowed,
  serverUnavailable,
} from '@hapi/boom';
import type { Plugin } from '@hapi/hapi';
import Sqlite from 'better-sqlite3';
import Joi from 'joi';
import t from 'tap';
import { newId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { AppError, invalid } from '../../src/errors.ts';
import { notFound, toErrorResponse } from '../../src/http/errors.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { connectRaw, parseResponses, rawRequest, startHttp } from '../helpers/http.ts';

const SECRET = 'hunter2';
const REQUEST_ID = newId('req', realEffects);

t.test('every error has the same shape', (t) => {
  const unavailable = new AppError('unavailable', 'the disk is full', { retryAfterSeconds: 7 });
  const rows: {
    error: unknown;
    status: number;
    code: string;
    message: RegExp;
    headers: Record<string, string>;
  }[] = [
    {
      error: invalid('body', 'ref', 'required'),
      status: 400,
      code: 'invalid_request',
      message: /^ref: required$/,
      headers: {},
    },
    {
      error: new AppError('unauthorized', 'no'),
      status: 401,
      code: 'unauthorized',
      message: /^no$/,
      headers: { 'WWW-Authenticate': 'Bearer' },
    },
    { error: notFound(), status: 404, code: 'not_found', message: /no such resource/, headers: {} },
    {
      error: boomify(new Sqlite.SqliteError('disk I/O error', 'SQLITE_IOERR_READ')),
      status: 503,
      code: 'unavailable',
      message: /^the database cannot be read at the moment: try again/,
      headers: { 'Retry-After': '5' },
    },
    {
      error: new Sqlite.SqliteError('no such column', 'SQLITE_ERROR'),
      status: 500,
      code: 'internal_error',
      message: /went wrong inside/,
      headers: {},
    },
    {
      error: new AppError('conflict', 'it ended'),
      status: 409,
      code: 'conflict',
      message: /^it ended$/,
      headers: {},
    },
    {
      error: unavailable,
      status: 503,
      code: 'unavailable',
      message: /disk/,
      headers: { 'Retry-After': '7' },
    },
    {
      error: boomify(unavailable),
      status: 503,
      code: 'unavailable',
      message: /disk/,
      headers: { 'Retry-After': '7' },
    },
    {
      error: new AppError('rate_limited', 'slowly'),
      status: 429,
      code: 'rate_limited',
      message: /slowly/,
      headers: { 'Retry-After': '1' },
    },
    {
      error: new AppError('internal_error', SECRET),
      status: 500,
      code: 'internal_error',
      message: /inside/,
      headers: {},
    },
    { error: new Error(SECRET), status: 500, code: 'internal_error', message: /inside/, headers: {} },
    {
      error: boomify(new TypeError(SECRET)),
      status: 500,
      code: 'internal_error',
      message: /inside/,
      headers: {},
    },
    { error: SECRET, status: 500, code: 'internal_error', message: /inside/, headers: {} },
    { error: undefined, status: 500, code: 'internal_error', message: /inside/, headers: {} },
    { error: badRequest(SECRET), status: 400, code: 'invalid_request', message: /malformed/, headers: {} },
    { error: boomNotFound(SECRET), status: 404, code: 'not_found', message: /no such resource/, headers: {} },
    {
      error: serverUnavailable(SECRET),
      status: 503,
      code: 'unavailable',
      message: /again/,
      headers: { 'Retry-After': '1' },
    },
    {
      error: methodNotAllowed(SECRET, null, ['GET', 'HEAD']),
      status: 405,
      code: 'method_not_allowed',
      message: /Allow/,
      headers: { Allow: 'GET, HEAD' },
    },
    {
      error: methodNotAllowed(SECRET, null, []),
      status: 405,
      code: 'method_not_allowed',
      message: /Allow/,
      headers: { Allow: '' },
    },
    {
      error: boomUnauthorized(SECRET),
      status: 401,
      code: 'unauthorized',
      message: /^send an API key/,
      headers: { 'WWW-Authenticate': 'Bearer' },
    },
    {
      error: forbidden(SECRET),
      status: 403,
      code: 'forbidden',
      message: /^this key may not do that$/,
      headers: {},
    },
    {
      error: forbidden(SECRET, {
        got: [],
        need: [{ required: ['a:read'], selection: ['b:read', 'c:read'] }],
      }),
      status: 403,
      code: 'forbidden',
      message: /scope b:read or c:read or a:read:/,
      headers: {},
    },
    {
      error: forbidden(SECRET, { got: [], need: [{ selection: ['logs:read'] }] }),
      status: 403,
      code: 'forbidden',
      message: /scope logs:read/,
      headers: {},
    },
  ];
  for (const { error, status, code, message, headers } of rows) {
    const response = toErrorResponse(error, REQUEST_ID);
    t.equal(response.statusCode, status, code);
    t.strictSame(response.headers, headers, code);
    const body = JSON.parse(response.body);
    t.strictSame(Object.keys(body), ['error']);
    t.match(body.error, { code, message, request_id: REQUEST_ID });
    t.notOk(response.body.includes(SECRET), code);
  }
  t.end();
});

t.test('details are there only where there are some', (t) => {
  t.strictSame(JSON.parse(toErrorResponse(invalid('query', 'limit', 'required'), REQUEST_ID).body), {
    error: {
      code: 'invalid_request',
      message: 'limit: required',
      request_id: REQUEST_ID,
      details: [{ in: 'query', field: 'limit', reason: 'required' }],
    },
  });
  t.notOk('details' in JSON.parse(toErrorResponse(notFound(), REQUEST_ID).body).error);
  t.end();
});

t.test('a resource that is not there is told from an invisible one by nothing', (t) => {
  const bodies = [
    notFound(),
    new AppError('not_found', 'prj_1 belongs to somebody else'),
    new AppError('not_found', 'never heard', {
      details: [{ in: 'path', field: 'project_id', reason: 'unknown' }],
    }),
    boomNotFound(),
  ].map((error) => toErrorResponse(error, REQUEST_ID));
  for (const body of bodies) t.strictSame(body, bodies[0]);
  t.end();
});

/** Handlers that fail in every way in which one can. */
const broken: Plugin<void> = {
  name: 'broken',
  register(server) {
    const handlers: Record<string, () => object> = {
      throws: () => {
        throw new TypeError(SECRET);
      },
      rejects: () => Promise.reject(new Error(SECRET)),
      'throws-text': () => {
        throw SECRET;
      },
      'returns-nothing': () => undefined as never,
      'cannot-be-json': () => ({ secret: SECRET, count: 1n }),
      'is-circular': () => {
        const self: Record<string, unknown> = { secret: SECRET };
        self['self'] = self;
        return self;
      },
    };
    for (const [name, handler] of Object.entries(handlers)) {
      server.route({ method: 'GET', path: `/v2/${name}`, options: { auth: false }, handler });
    }
    server.route({
      method: 'POST',
      path: '/v2/rule-throws',
      options: {
        auth: false,
        validate: {
          payload: Joi.object({
            name: Joi.any().custom(() => {
              throw new TypeError('a rule is wrong');
            }),
          }),
        },
      },
      handler: () => ({}),
    });
    server.route({ method: 'GET', path: '/v2/slow', options: { auth: false }, handler: slowHandler });
  },
};

let release: () => void = () => {};
async function slowHandler(): Promise<object> {
  await new Promise<void>((resolve) => {
    release = resolve;
  });
  return { slow: true };
}

t.test('a bug is answered 500, says nothing, and is in the log with its stack', async (t) => {
  const { server, log } = await startHttp(t, { resources: () => [broken] });
  const printed = t.capture(console, 'error');
  for (const name of [
    'throws',
    'rejects',
    'throws-text',
    'returns-nothing',
    'cannot-be-json',
    'is-circular',
  ]) {
    const response = await server.inject(`/v2/${name}`);
    t.equal(response.statusCode, 500, name);
    t.equal(response.headers['content-type'], 'application/json; charset=utf-8', name);
    const { error } = JSON.parse(response.payload);
    t.match(error, { code: 'internal_error', request_id: response.headers['x-request-id'] }, name);
    t.notOk(response.payload.includes(SECRET), name);
    const line = log.find(({ msg, request_id }) => msg === 'bug' && request_id === error.request_id);
    t.match(line, { level: 50, route: `/v2/${name}`, err: { stack: /\n +at / } }, name);
  }
  t.strictSame(printed(), [], 'and nowhere else');
});

t.test('why the service is unavailable is in the log, as a warning', async (t) => {
  const full: Plugin<void> = {
    name: 'full',
    register(server) {
      const handler = () => Promise.reject(new AppError('unavailable', 'the disk is full'));
      server.route({ method: 'GET', path: '/v2/full', options: { auth: false }, handler });
    },
  };
  const { server, log } = await startHttp(t, { resources: () => [full] });
  const { statusCode, headers } = await server.inject('/v2/full');
  t.equal(statusCode, 503);
  t.match(log, [
    {
      level: 40,
      msg: 'unavailable',
      route: '/v2/full',
      request_id: headers['x-request-id'],
      err: { message: 'the disk is full' },
    },
    { msg: 'request', status: 503 },
  ]);
});

t.test('a rule that throws is a bug, not a bad request, and the body stays out of the log', async (t) => {
  const { server, log } = await startHttp(t, { resources: () => [broken] });
  const response = await server.inject({ method: 'POST', url: '/v2/rule-throws', payload: { name: SECRET } });
  t.equal(response.statusCode, 500);
  t.match(JSON.stringify(log), /a rule is wrong/);
  t.notOk(JSON.stringify(log).includes(SECRET));
});

const NOT_REQUESTS: { name: string; bytes: string | Buffer; status: number; code: string }[] = [
  { name: 'noise', bytes: '\x00\x01\x02\r\n\r\n', status: 400, code: 'invalid_request' },
  {
    name: 'the start of TLS',
    bytes: Buffer.from('1603010200010001fc0303', 'hex'),
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'an unknown method',
    bytes: 'FETCH / HTTP/1.1\r\nHost: d\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'another version',
    bytes: 'GET / HTTP/3.0\r\nHost: d\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'the preface of HTTP/2',
    bytes: 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'white space in a name',
    bytes: 'GET / HTTP/1.1\r\nHost : d\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'a bare CR',
    bytes: 'GET / HTTP/1.1\r\nHost: d\r\nA: b\rc\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'a length that is none',
    bytes: 'POST / HTTP/1.1\r\nHost: d\r\nContent-Length: -1\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'two lengths',
    bytes: 'POST / HTTP/1.1\r\nHost: d\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'a length and chunks',
    bytes: 'POST / HTTP/1.1\r\nHost: d\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'a header too large',
    bytes: `GET / HTTP/1.1\r\nHost: d\r\nA: ${'a'.repeat(17_000)}\r\n\r\n`,
    status: 431,
    code: 'headers_too_large',
  },
  {
    name: 'a header far too large',
    bytes: `GET / HTTP/1.1\r\nHost: d\r\nA: ${'a'.repeat(1_000_000)}\r\n\r\n`,
    status: 431,
    code: 'headers_too_large',
  },
  {
    name: 'too many headers',
    bytes: `GET / HTTP/1.1\r\nHost: d\r\n${'A: b\r\n'.repeat(3_000)}\r\n`,
    status: 431,
    code: 'headers_too_large',
  },
  {
    name: 'a path too long',
    bytes: `GET /${'a'.repeat(17_000)} HTTP/1.1\r\nHost: d\r\n\r\n`,
    status: 431,
    code: 'headers_too_large',
  },
  {
    name: 'CONNECT',
    bytes: 'CONNECT d:1 HTTP/1.1\r\nHost: d\r\n\r\n',
    status: 405,
    code: 'method_not_allowed',
  },
];

t.test('what is no request is answered in the same shape, and its sender always reads it', async (t) => {
  const { port, log } = await startHttp(t);
  for (const { name, bytes, status, code } of NOT_REQUESTS) {
    const [response, ...others] = parseResponses(await rawRequest(port, bytes));
    t.match(
      response,
      {
        status,
        headers: {
          'content-type': 'application/json; charset=utf-8',
          'x-request-id': /^req_/,
          'x-content-type-options': 'nosniff',
          'cache-control': 'no-store',
          connection: 'close',
          date: /GMT$/,
        },
      },
      name,
    );
    t.match(
      JSON.parse(response?.body ?? '{}').error,
      { code, request_id: response?.headers['x-request-id'] },
      name,
    );
    t.strictSame(others, [], name);
    t.match(
      log.at(-1),
      { msg: 'not a request', request_id: response?.headers['x-request-id'], status },
      name,
    );
  }
});

t.test('who resets a connection is told nothing, and nothing is said of it', async (t) => {
  const { port, log, server } = await startHttp(t);
  for (const bytes of ['', 'GET / HT', 'CONNECT d:1 HTTP/1.1\r\nHost: d\r\n\r\n']) {
    const accepted = once(server.listener, 'connection');
    const { socket, send } = await connectRaw(port);
    const [connection] = (await accepted) as [Socket];
    const lines = log.length;
    send(bytes);
    await until(() => connection.bytesRead === bytes.length);
    const closed = closeOf(connection);
    socket.resetAndDestroy();
    await closed;
    t.match(log.slice(lines), bytes.startsWith('CONNECT') ? [{ msg: 'not a request', status: 405 }] : []);
  }
});

t.test('who has read why and does not hang up is hung up on after two seconds', async (t) => {
  const effects = fakeEffects();
  const { port, server } = await startHttp(t, { effects });
  for (const bytes of ['noise\r\n\r\n', 'CONNECT d:1 HTTP/1.1\r\nHost: d\r\n\r\n']) {
    for (const hangsUp of [false, true]) {
      const accepted = once(server.listener, 'connection');
      const client = connect({ port, host: '127.0.0.1', allowHalfOpen: true });
      const [connection] = (await accepted) as [Socket];
      const closed = closeOf(connection);
      client.write(bytes);
      client.resume();
      await once(client, 'end');
      if (hangsUp) client.end();
      else {
        effects.advance(1_999);
        await nextTurn();
        t.notOk(connection.destroyed);
        effects.advance(1);
      }
      await closed;
      client.destroy();
    }
  }
});

function closeOf(socket: Socket): Promise<void> {
  return new Promise((resolve) => socket.once('close', () => resolve()));
}

t.test('a request that never comes to its end is told so', async (t) => {
  const { port } = await startHttp(t, { timeouts: { headersMs: 50, requestMs: 50, checkMs: 10 } });
  for (const bytes of ['', 'GET / HT', 'GET / HTTP/1.1\r\nHost: d\r\n']) {
    t.match(parseResponses(await rawRequest(port, bytes)), [{ status: 408, body: /request_timeout/ }]);
  }
});

t.test('what is no request is answered behind one that was', async (t) => {
  const { port } = await startHttp(t);
  const connection = await connectRaw(port);
  connection.send('GET /v2/nothing HTTP/1.1\r\nHost: d\r\n\r\n');
  await connection.received('not_found');
  connection.send('NOT HTTP AT ALL\r\n\r\n');
  t.match(parseResponses(await connection.closed), [{ status: 404 }, { status: 400 }]);
});

t.test('what follows a request cannot be answered in its name', async (t) => {
  const { port } = await startHttp(t, { resources: () => [broken] });
  const connection = await connectRaw(port);
  connection.send('GET /v2/slow HTTP/1.1\r\nHost: d\r\n\r\n');
  connection.send('NOT HTTP AT ALL\r\n\r\n');
  // The second has been seen when another connection's answer is there.
  await rawRequest(port, 'GET / HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n');
  release();
  t.match(parseResponses(await connection.closed), [{ status: 200, body: '{"slow":true}' }, { status: 400 }]);
});
