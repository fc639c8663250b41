import { badRequest, boomify, notFound as boomNotFound, forbidden, methodNotAllowed } from '@hapi/boom';
import type { Plugin } from '@hapi/hapi';
import Sqlite from 'better-sqlite3';
import Joi from 'joi';
import t from 'tap';
import { newId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { AppError, invalid } from '../../src/errors.ts';
import { notFound, toErrorResponse } from '../../src/http/errors.ts';
import { requestJson, startHttp } from '../helpers/http.ts';

const SECRET = 'hunter2';
const REQUEST_ID = newId('req', realEffects);

t.test('every error becomes an answer of the same shape, without internal text', (t) => {
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
    { error: notFound(), status: 404, code: 'not_found', message: /no such resource.*\/docs/, headers: {} },
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

t.test('an error has details only if there are any', (t) => {
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

t.test('every not_found error has the same body, whatever its cause', (t) => {
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

/** A handler for each way in which a handler can fail. */
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
        plugins: {
          input: {
            payload: Joi.object({
              name: Joi.any().custom(() => {
                throw new TypeError('a rule is wrong');
              }),
            }),
          },
        },
      },
      handler: () => ({}),
    });
  },
};

t.test('a bug is answered 500 without details, and logged with its stack', async (t) => {
  const { port, log } = await startHttp(t, { resources: () => [broken] });
  const printed = t.capture(console, 'error');
  for (const name of [
    'throws',
    'rejects',
    'throws-text',
    'returns-nothing',
    'cannot-be-json',
    'is-circular',
  ]) {
    const { status, headers, body } = await requestJson(port, 'GET', `/v2/${name}`);
    t.equal(status, 500, name);
    t.equal(headers.get('content-type'), 'application/json; charset=utf-8', name);
    const requestId = headers.get('x-request-id');
    t.match(body, { error: { code: 'internal_error', request_id: requestId } }, name);
    t.notOk(JSON.stringify(body).includes(SECRET), name);
    const line = log.find(({ msg, request_id }) => msg === 'bug' && request_id === requestId);
    t.match(line, { level: 50, route: `/v2/${name}`, err: { stack: /\n +at / } }, name);
  }
  t.strictSame(printed(), [], 'nothing is printed to the console');
});

t.test('the cause of a 503 is logged as a warning', async (t) => {
  const full: Plugin<void> = {
    name: 'full',
    register(server) {
      const handler = () => Promise.reject(new AppError('unavailable', 'the disk is full'));
      server.route({ method: 'GET', path: '/v2/full', options: { auth: false }, handler });
    },
  };
  const { port, log } = await startHttp(t, { resources: () => [full] });
  const { status, headers } = await requestJson(port, 'GET', '/v2/full');
  t.equal(status, 503);
  t.match(log, [
    {
      level: 40,
      msg: 'unavailable',
      route: '/v2/full',
      request_id: headers.get('x-request-id'),
      reason: 'the disk is full',
    },
    { msg: 'request', status: 503 },
  ]);
  t.notMatch(JSON.stringify(log), /stack/, 'where davit decided it tells nothing');
});

t.test('a validation rule that throws is answered 500, and the body stays out of the log', async (t) => {
  const { port, log } = await startHttp(t, { resources: () => [broken] });
  const { status } = await requestJson(port, 'POST', '/v2/rule-throws', { body: { name: SECRET } });
  t.equal(status, 500);
  t.match(JSON.stringify(log), /a rule is wrong/);
  t.notOk(JSON.stringify(log).includes(SECRET));
});
