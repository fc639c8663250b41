import { randomBytes } from 'node:crypto';
import { readFileSync } from 'node:fs';
import type { Plugin } from '@hapi/hapi';
import Joi from 'joi';
import t from 'tap';
import { notFound } from '../../src/http/errors.ts';
import {
  bodySchema,
  creationParameters,
  idSchema,
  oneOrMoreOf,
  PAGE_MAX_LIMIT,
  pageParameters,
  querySchema,
  refSchema,
  textSchema,
  timestampRoundedUp,
  wholeNumber,
} from '../../src/http/input-schemas.ts';
import { idempotencyKey, pathId } from '../../src/http/validation.ts';
import { newKeySecret, newSigningSecret } from '../../src/secrets.ts';
import { rawRequest, requestJson, startHttp, toldBy } from '../helpers/http.ts';

const refs = JSON.parse(readFileSync(new URL('../vectors/refs.json', import.meta.url), 'utf8'));

const KEY_SECRET = newKeySecret(randomBytes);
const SIGNING_SECRET = newSigningSecret(randomBytes);
/** As `rawRequest` reads it. */
const asLatin1 = (text: string) => Buffer.from(text).toString('latin1');

interface Taken {
  payload?: unknown;
  query?: unknown;
}

function routes(): { taken: Taken[]; plugin: Plugin<void> } {
  const taken: Taken[] = [];
  const plugin: Plugin<void> = {
    name: 'routes',
    register(server) {
      const take = ({ payload, query }: Taken) => {
        taken.push({ payload, query: { ...(query as object) } });
        return {};
      };
      server.route({
        method: 'POST',
        path: '/v2/write',
        options: {
          auth: false,
          plugins: {
            input: {
              payload: bodySchema({
                ref: refSchema.required(),
                count: Joi.number().integer().min(0).max(9),
                events: Joi.array().items(Joi.string().valid('a', 'b')).min(1).unique(),
                project_id: idSchema('prj'),
                note: Joi.string().max(5),
                since: timestampRoundedUp,
                outputs: Joi.object().pattern(Joi.string().max(3), Joi.string()).max(2),
              }),
            },
          },
        },
        handler: take,
      });
      server.route({ method: 'POST', path: '/v2/plain', options: { auth: false }, handler: take });
      server.route({
        method: 'GET',
        path: '/v2/list',
        options: {
          auth: false,
          plugins: {
            input: {
              query: querySchema({
                ...pageParameters,
                status: oneOrMoreOf(['queued', 'running']),
                ref: refSchema,
                wait: wholeNumber({ min: 0, max: 60 }),
                ...creationParameters,
              }),
            },
          },
        },
        handler: take,
      });
      server.route({
        method: 'GET',
        path: '/v2/things/{id}',
        options: { auth: false },
        handler: (request) => ({ id: pathId('prj', String(request.params['id'])) }),
      });
      server.route({
        method: 'POST',
        path: '/v2/key',
        options: { auth: false },
        handler: (request) => ({ key: idempotencyKey(request) ?? null }),
      });
    },
  };
  return { taken, plugin };
}

const BODIES: { name: string; body: unknown; details: [field: string, reason: string | RegExp][] }[] = [
  { name: 'a missing field', body: {}, details: [['ref', 'required']] },
  { name: 'a number for a string', body: { ref: 5 }, details: [['ref', 'must be a string']] },
  { name: 'null for a string', body: { ref: null }, details: [['ref', 'must be a string']] },
  { name: 'an empty string', body: { ref: '' }, details: [['ref', 'must not be empty']] },
  { name: 'a bad ref', body: { ref: 'a..b' }, details: [['ref', 'must not contain ..']] },
  { name: 'a long ref', body: { ref: 'a'.repeat(256) }, details: [['ref', 'must be at most 255 bytes']] },
  { name: 'a ref with a blank', body: { ref: 'a b' }, details: [['ref', /^may hold only (?!.*query)/]] },
  { name: 'an unknown field', body: { ref: 'main', reff: 1 }, details: [['reff', 'is not allowed']] },
  {
    name: 'an empty name',
    body: { ref: 'main', outputs: { '': 'x' }, '': 1 },
    details: [
      ['outputs.""', 'is not allowed'],
      ['""', 'is not allowed'],
    ],
  },
  {
    name: 'several mistakes at once',
    body: { ref: 'HEAD', count: '5', extra: {} },
    details: [
      ['ref', /HEAD/],
      ['count', 'must be a whole number'],
      ['extra', 'is not allowed'],
    ],
  },
  { name: 'a fraction', body: { ref: 'main', count: 1.5 }, details: [['count', 'must be a whole number']] },
  { name: 'too small', body: { ref: 'main', count: -1 }, details: [['count', 'must be at least 0']] },
  { name: 'too large', body: { ref: 'main', count: 10 }, details: [['count', 'must be at most 9']] },
  {
    name: 'an integer that a double does not hold exactly',
    body: { ref: 'main', count: 2 ** 53 },
    details: [['count', 'must be a whole number']],
  },
  {
    name: 'a number that is infinite as a double',
    body: '{"ref":"main","count":1e999}',
    details: [['count', 'must be a whole number']],
  },
  {
    name: 'a string for a list',
    body: { ref: 'main', events: 'a' },
    details: [['events', 'must be a list']],
  },
  {
    name: 'an empty list',
    body: { ref: 'main', events: [] },
    details: [['events', 'must have at least 1 item']],
  },
  {
    name: 'an unknown item',
    body: { ref: 'main', events: ['a', 'c'] },
    details: [['events.1', 'must be one of a, b']],
  },
  {
    name: 'a list with a number',
    body: { ref: 'main', events: ['a', 5] },
    details: [['events.1', 'must be one of a, b']],
  },
  {
    name: 'a repeated item',
    body: { ref: 'main', events: ['a', 'a'] },
    details: [['events.1', 'must not be repeated']],
  },
  {
    name: 'a bad id',
    body: { ref: 'main', project_id: 'dpl_1' },
    details: [['project_id', /^must be an id that begins with prj_$/]],
  },
  {
    name: 'too long',
    body: { ref: 'main', note: 'abcdef' },
    details: [['note', 'must be at most 5 characters']],
  },
  { name: 'leading white space', body: { ref: ' main' }, details: [['ref', /^must begin/]] },
  { name: 'a number for a time', body: { ref: 'main', since: 0 }, details: [['since', 'must be a string']] },
  {
    name: 'a list for a time',
    body: { ref: 'main', since: ['x'] },
    details: [['since', 'must be a string']],
  },
  {
    name: 'too many fields in an object',
    body: { ref: 'main', outputs: { a: 'x', b: 'x', c: 'x' } },
    details: [['outputs', 'must have at most 2 fields']],
  },
  {
    name: 'a list for an object',
    body: { ref: 'main', outputs: [] },
    details: [['outputs', 'must be an object']],
  },
  {
    name: 'a name too long',
    body: { ref: 'main', outputs: { abcd: 'x' } },
    details: [['outputs.abcd', 'is not allowed']],
  },
  {
    name: 'a signing secret for a name',
    body: { ref: 'main', [SIGNING_SECRET]: 'x' },
    details: [['whsec_…', 'is not allowed']],
  },
  {
    name: 'a value of the wrong type',
    body: { ref: 'main', outputs: { a: 1 } },
    details: [['outputs.a', 'must be a string']],
  },
  { name: 'a list as the body', body: [], details: [['body', 'must be an object']] },
  { name: 'a string as the body', body: '"main"', details: [['body', 'must be an object']] },
  { name: 'null as the body', body: 'null', details: [['body', 'must be an object']] },
  { name: 'no body', body: undefined, details: [['body', 'required']] },
];

t.test('an invalid body is rejected with a reason for each field, and reaches no handler', async (t) => {
  const { taken, plugin } = routes();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  for (const { name, body, details } of BODIES) {
    const response = await requestJson(port, 'POST', '/v2/write', { body });
    t.equal(response.status, 400, name);
    const { error } = response.body as { error: { code: string; details: unknown[] } };
    t.equal(error.code, 'invalid_request', name);
    t.equal(error.details.length, details.length, name);
    for (const [index, [field, reason]] of details.entries()) {
      t.match(error.details[index], { in: 'body', field, reason }, name);
    }
    t.strictSame(taken, [], name);
  }
});

t.test(
  'an error echoes no value, and of field names at most 64 characters, without control characters',
  async (t) => {
    const { plugin } = routes();
    const { port } = await startHttp(t, { resources: () => [plugin] });
    const refusal = async (body: object) => {
      const response = await requestJson(port, 'POST', '/v2/write', { body });
      t.equal(response.status, 400);
      return JSON.stringify(response.body);
    };
    const secret = 'hunter2-..-~';
    for (const field of ['ref', 'count', 'events', 'project_id', 'note', 'since', 'outputs']) {
      t.notMatch(await refusal({ ref: 'main', [field]: secret }), /hunter2/, field);
      t.notMatch(await refusal({ ref: 'main', [field]: { [field]: [secret] } }), /hunter2/, field);
    }

    const terminal = await refusal({ ref: 'main', 'a\u001b[31m\u202eb\u2028\u2029': 1 });
    for (const character of ['\\u001b', '\u001b', '\u202e', '\u2028', '\u2029'])
      t.notOk(terminal.includes(character));
    const fitting = JSON.parse(await refusal({ ref: 'main', ['🚀'.repeat(64)]: 1 }));
    t.equal(fitting.error.details[0].field, '🚀'.repeat(64));
    const long = JSON.parse(await refusal({ ref: 'main', ['🚀'.repeat(10_000)]: 1 }));
    t.equal(long.error.details[0].field, `${'🚀'.repeat(64)}…`);
    const many = Object.fromEntries(Array.from({ length: 100 }, (_, index) => [`field${index}`, 1]));
    t.equal(JSON.parse(await refusal(many)).error.details.length, 10);
  },
);

t.test('refs are accepted or rejected as the test vectors say', async (t) => {
  const { taken, plugin } = routes();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const statusOf = async (ref: unknown) =>
    (await requestJson(port, 'POST', '/v2/write', { body: { ref } })).status;
  for (const ref of refs.valid) {
    t.equal(await statusOf(ref), 200, ref);
    t.strictSame(taken.pop(), { payload: { ref }, query: {} });
  }
  const invalid: { ref: unknown }[] = refs.invalid.map((one: unknown) =>
    typeof one === 'object' && one !== null ? one : { ref: one },
  );
  for (const { ref } of invalid) {
    t.equal(await statusOf(ref), 400, String(ref));
  }
  t.strictSame(taken, []);
});

const QUERIES: { query: string; taken?: object; details?: [field: string, reason: string | RegExp][] }[] = [
  { query: '', taken: { limit: 50 } },
  { query: '?', taken: { limit: 50 } },
  { query: '?limit=1', taken: { limit: 1 } },
  { query: '?limit=200', taken: { limit: PAGE_MAX_LIMIT } },
  { query: '?limit=201', taken: { limit: PAGE_MAX_LIMIT } },
  { query: `?limit=${'9'.repeat(400)}`, taken: { limit: PAGE_MAX_LIMIT } },
  { query: '?limit=0', details: [['limit', /^must be a whole number from 1 to 200$/]] },
  { query: '?limit=05', details: [['limit', /whole number/]] },
  { query: '?limit=1.5', details: [['limit', /whole number/]] },
  { query: '?limit=-1', details: [['limit', /whole number/]] },
  { query: '?limit=%2B1', details: [['limit', /whole number/]] },
  { query: '?limit=1e1', details: [['limit', /whole number/]] },
  { query: '?limit=0x1', details: [['limit', /whole number/]] },
  { query: '?limit=%201', details: [['limit', /whole number/]] },
  { query: '?limit=%D9%A1', details: [['limit', /whole number/]] },
  { query: '?limit=', details: [['limit', 'must not be empty']] },
  { query: '?limit', details: [['limit', 'must not be empty']] },
  { query: '?limit=1&limit=1', details: [['limit', 'must not be repeated']] },
  { query: '?limit[]=1', details: [['limit[]', 'is not allowed']] },
  { query: '?cursor=abc', taken: { limit: 50, cursor: 'abc' } },
  { query: '?cursor=', details: [['cursor', 'must not be empty']] },
  { query: '?cursor=a&cursor=b', details: [['cursor', 'must not be repeated']] },
  { query: `?cursor=${'a'.repeat(1025)}`, details: [['cursor', /1024/]] },
  { query: '?=1', details: [['""', 'is not allowed']] },
  { query: '?Limit=1', details: [['Limit', 'is not allowed']] },
  { query: `?${KEY_SECRET}`, details: [[asLatin1('davit_…'), 'is not allowed']] },
  { query: `?x_${KEY_SECRET}=1`, details: [[asLatin1('x_davit_…'), 'is not allowed']] },
  { query: '?limit=1&__proto__=1', details: [['__proto__', 'is not allowed']] },
  { query: '?status=queued', taken: { limit: 50, status: ['queued'] } },
  {
    query: '?status=queued&status=running&status=queued',
    taken: { limit: 50, status: ['queued', 'running'] },
  },
  { query: '?status=queued,running', details: [['status', 'must be one of queued, running']] },
  { query: '?status=', details: [['status', 'must be one of queued, running']] },
  { query: '?status=queued&status=gone', details: [['status', 'must be one of queued, running']] },
  { query: '?ref=release%2F1', taken: { limit: 50, ref: 'release/1' } },
  { query: '?ref=v1.0+build', details: [['ref', /^may hold only .* \(in a query, write %2B for \+\)$/]] },
  { query: '?ref=v1.0%2Bbuild', taken: { limit: 50, ref: 'v1.0+build' } },
  { query: '?ref=a%3Bb', details: [['ref', /^may hold only .*#$/]] },
  { query: '?created_after=2026-01-31T12:00:00+02:00', details: [['created_after', /%2B/]] },
  { query: '?wait=0', taken: { limit: 50, wait: 0 } },
  { query: '?wait=60', taken: { limit: 50, wait: 60 } },
  { query: '?wait=61', details: [['wait', 'must be a whole number from 0 to 60']] },
  {
    query: '?created_after=2026-01-31T12:00:00Z',
    taken: { limit: 50, created_after: Date.UTC(2026, 0, 31, 12) },
  },
  {
    query: '?created_after=2026-01-31T12:00:00.123456789Z',
    taken: { limit: 50, created_after: Date.UTC(2026, 0, 31, 12, 0, 0, 123) },
  },
  {
    query: '?created_after=2026-01-31T12:00:00.9995Z',
    taken: { limit: 50, created_after: Date.UTC(2026, 0, 31, 12, 0, 0, 999) },
  },
  {
    query: '?created_after=2026-01-31T12:00:00%2B02:00',
    taken: { limit: 50, created_after: Date.UTC(2026, 0, 31, 10) },
  },
  {
    query: '?created_after=2028-02-29T00:00:00Z',
    taken: { limit: 50, created_after: Date.UTC(2028, 1, 29) },
  },
  {
    query: '?created_after=9999-12-31T23:59:59.999Z',
    taken: { limit: 50, created_after: Date.UTC(9999, 11, 31, 23, 59, 59, 999) },
  },
  {
    query: '?created_after=0000-01-01T01:00:00%2B01:00',
    taken: { limit: 50, created_after: Date.parse('0000-01-01T00:00:00Z') },
  },
  {
    query: '?created_before=2026-01-31T12:00:00.123Z',
    taken: { limit: 50, created_before: Date.UTC(2026, 0, 31, 12, 0, 0, 123) },
  },
  {
    query: '?created_before=2026-01-31T12:00:00.057000Z',
    taken: { limit: 50, created_before: Date.UTC(2026, 0, 31, 12, 0, 0, 57) },
  },
  {
    query: '?created_before=2026-01-31T12:00:00.1230%2B00:00',
    taken: { limit: 50, created_before: Date.UTC(2026, 0, 31, 12, 0, 0, 123) },
  },
  {
    query: '?created_before=2026-01-31T12:00:00.123000001Z',
    taken: { limit: 50, created_before: Date.UTC(2026, 0, 31, 12, 0, 0, 124) },
  },
  {
    query: '?created_before=2026-01-31T12:00:00.9995Z',
    taken: { limit: 50, created_before: Date.UTC(2026, 0, 31, 12, 0, 0, 1000) },
  },
  { query: '?created_after=9999-12-31T23:59:59-00:01', details: [['created_after', /time/]] },
  { query: '?created_after=0000-01-01T00:00:00%2B00:01', details: [['created_after', /time/]] },
  { query: '?created_after=2026-02-29T00:00:00Z', details: [['created_after', /^must be a time such as/]] },
  { query: '?created_after=2026-02-30T00:00:00Z', details: [['created_after', /time/]] },
  { query: '?created_after=2026-01-31T24:00:00Z', details: [['created_after', /time/]] },
  { query: '?created_after=2026-01-31T12:00:00', details: [['created_after', /time/]] },
  { query: '?created_after=2026-01-31T12:00:00%2B99:00', details: [['created_after', /time/]] },
  { query: '?created_after=2026-01-31T12:00:00.1234567890Z', details: [['created_after', /time/]] },
  { query: '?created_after=2026-01-31', details: [['created_after', /time/]] },
  { query: '?created_after=1769860800', details: [['created_after', /time/]] },
  { query: '?limit=%', details: [['query', /percent/]] },
  { query: '?limit=%FF', details: [['query', /percent/]] },
  { query: '?limit=%00', details: [['query', /NUL/]] },
  { query: `?${'limit=1&'.repeat(100)}`, details: [['query', /100 parameters/]] },
];

t.test('a query parameter must be known, sent once and of the right form', async (t) => {
  const { taken, plugin } = routes();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  for (const { query, taken: expected, details } of QUERIES) {
    const target = `/v2/list${query.replaceAll(' ', '+')}`;
    const request = `GET ${target} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n`;
    const text = await rawRequest(port, Buffer.from(request));
    if (details === undefined) {
      t.match(text, /^HTTP\/1\.1 200 /, query);
      t.strictSame(taken.pop()?.query, expected, query);
    } else {
      t.match(text, /^HTTP\/1\.1 400 /, query);
      const { error } = JSON.parse(text.slice(text.indexOf('\r\n\r\n')));
      t.match(
        error.details,
        details.map(([field, reason]) => ({ in: 'query', field, reason })),
        query,
      );
    }
    t.strictSame(taken, [], query);
  }
});

t.test('a route without schemas takes neither query parameters nor body fields', async (t) => {
  const { taken, plugin } = routes();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const statusOf = async (path: string, body?: string) =>
    (await requestJson(port, 'POST', path, { body })).status;
  t.equal(await statusOf('/v2/plain'), 200);
  t.equal(await statusOf('/v2/plain', '{}'), 200);
  t.strictSame(taken.splice(0), [
    { payload: {}, query: {} },
    { payload: {}, query: {} },
  ]);
  t.equal(await statusOf('/v2/plain', '{"a":1}'), 400);
  t.equal(await statusOf('/v2/plain', '[]'), 400);
  t.equal(await statusOf('/v2/plain', 'null'), 400, 'null is not the same as no body');
  t.equal(await statusOf('/v2/plain?a=1'), 400);
  t.strictSame(taken, []);
});

t.test('a rule that throws is answered 500, as the request is not to blame', async (t) => {
  const broken = Joi.any().custom(() => {
    throw new Error('a bug');
  });
  const plugin: Plugin<void> = {
    name: 'broken',
    register(server) {
      const options = { auth: false, plugins: { input: { query: querySchema({ broken }) } } } as const;
      server.route({ method: 'GET', path: '/v2/broken', options, handler: () => ({}) });
    },
  };
  const { port } = await startHttp(t, { resources: () => [plugin] });
  t.equal((await requestJson(port, 'GET', '/v2/broken?broken=1')).status, 500);
});

t.test('a malformed id in a path is answered 404 like anything unknown', async (t) => {
  const { plugin } = routes();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const good = await requestJson(port, 'GET', '/v2/things/prj_1');
  t.strictSame(good.body, { id: 'prj_1' });
  const unknownRoute = await requestJson(port, 'GET', '/v2/nothing');
  for (const id of ['1', 'dpl_1', 'prj_', 'prj_%00', 'prj_a-b', `prj_${'a'.repeat(100)}`]) {
    const response = await requestJson(port, 'GET', `/v2/things/${id}`);
    t.equal(response.status, 404, id);
    t.equal(toldBy(response), toldBy(unknownRoute), id);
  }
});

t.test('an idempotency key is visible ASCII, quoted or not, and sent once', async (t) => {
  const { plugin } = routes();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const rows: [headers: string, key: string | null | 'refused'][] = [
    ['', null],
    ['Idempotency-Key: abc\r\n', 'abc'],
    ['Idempotency-Key:   abc  \r\n', 'abc'],
    ['Idempotency-Key: "abc"\r\n', 'abc'],
    ['Idempotency-Key: ""abc""\r\n', '"abc"'],
    ['Idempotency-Key: "abc\r\n', '"abc'],
    [`Idempotency-Key: ${'a'.repeat(255)}\r\n`, 'a'.repeat(255)],
    [`Idempotency-Key: "${'a'.repeat(255)}"\r\n`, 'a'.repeat(255)],
    ['Idempotency-Key: !~\r\n', '!~'],
    [`Idempotency-Key: ${'a'.repeat(256)}\r\n`, 'refused'],
    ['Idempotency-Key:\r\n', 'refused'],
    ['Idempotency-Key: ""\r\n', 'refused'],
    ['Idempotency-Key: a b\r\n', 'refused'],
    ['Idempotency-Key: a\tb\r\n', 'refused'],
    ['Idempotency-Key: sch\xc3\xb6n\r\n', 'refused'],
    ['Idempotency-Key: a\r\nIdempotency-Key: a\r\n', 'refused'],
    ['Idempotency-Key: "a\r\nIdempotency-Key: a"\r\n', 'refused'],
  ];
  for (const [headers, key] of rows) {
    const text = await rawRequest(
      port,
      `POST /v2/key HTTP/1.1\r\nHost: d\r\nConnection: close\r\n${headers}\r\n`,
    );
    const body = JSON.parse(text.slice(text.indexOf('\r\n\r\n')));
    if (key === 'refused') {
      t.match(
        body.error,
        { code: 'invalid_request', details: [{ in: 'header', field: 'Idempotency-Key' }] },
        headers,
      );
    } else t.strictSame(body, { key }, headers);
  }
});

t.test('a malformed idempotency key is rejected before the handler looks anything up', async (t) => {
  const reached: string[] = [];
  const { port } = await startHttp(t, {
    resources: () => [
      {
        name: 'things',
        register(server) {
          server.route({
            method: ['GET', 'POST', 'DELETE'],
            path: '/v2/things/{id}',
            options: { auth: false },
            handler(request) {
              reached.push(request.method);
              throw notFound();
            },
          });
        },
      },
    ],
  });
  const headers = { 'idempotency-key': 'a b' };
  for (const method of ['POST', 'DELETE']) {
    t.match(await requestJson(port, method, '/v2/things/1', { headers }), {
      status: 400,
      body: { error: { details: [{ in: 'header', field: 'Idempotency-Key' }] } },
    });
  }
  t.strictSame(reached, []);
  t.match(await requestJson(port, 'GET', '/v2/things/1', { headers }), { status: 404 });
});

t.test('the length of a text is counted in characters, not in UTF-16 units', async (t) => {
  const text = textSchema(4);
  for (const value of ['x', 'xxxx', '\u{1f6a2}\u{1f6a2}\u{1f6a2}\u{1f6a2}', '\u{1f6a2}xxx']) {
    t.equal(text.validate(value).error, undefined, value);
  }
  for (const value of ['xxxxx', '\u{1f6a2}xxxx', '\u{1f6a2}'.repeat(5), 'x'.repeat(9)]) {
    t.match(text.validate(value).error?.details, [{ type: 'string.max', context: { limit: 4 } }], value);
  }
  t.equal(text.allow(null, '').validate(null).error, undefined);
});
