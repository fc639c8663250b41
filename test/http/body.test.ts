import type { Plugin } from '@hapi/hapi';
import fc from 'fast-check';
import Joi from 'joi';
import t from 'tap';
import { BODY_MAX_BYTES, parseJson } from '../../src/http/body.ts';
import { connectRaw, parseResponses, rawRequest, startHttp } from '../helpers/http.ts';

const JSON_TYPE = 'Content-Type: application/json\r\n';

/** A route that takes any JSON and remembers what it was handed. */
function taker(): { taken: unknown[]; plugin: Plugin<void> } {
  const taken: unknown[] = [];
  return {
    taken,
    plugin: {
      name: 'taker',
      register(server) {
        server.route({
          method: 'POST',
          path: '/v2/taker',
          options: { auth: false, validate: { payload: Joi.any() } },
          handler(request) {
            taken.push(request.payload);
            return { taken: true };
          },
        });
        server.route({
          method: 'GET',
          path: '/v2/taker',
          options: { auth: false },
          handler: () => ({ got: true }),
        });
      },
    },
  };
}

function post(headers: string, body: string | Buffer = ''): Buffer {
  return Buffer.concat([
    Buffer.from(`POST /v2/taker HTTP/1.1\r\nHost: davit\r\nConnection: close\r\n${headers}\r\n`),
    Buffer.from(body),
  ]);
}

function withLength(body: string | Buffer, headers = JSON_TYPE): Buffer {
  return post(`${headers}Content-Length: ${Buffer.byteLength(body)}\r\n`, body);
}

function chunked(chunks: (string | Buffer)[], headers = JSON_TYPE): Buffer {
  const parts = chunks.flatMap((chunk) => [
    Buffer.from(`${Buffer.byteLength(chunk).toString(16)}\r\n`),
    Buffer.from(chunk),
    Buffer.from('\r\n'),
  ]);
  return post(
    `${headers}Transfer-Encoding: chunked\r\n`,
    Buffer.concat([...parts, Buffer.from('0\r\n\r\n')]),
  );
}

function stringOf(bytes: number): string {
  return JSON.stringify('a'.repeat(bytes - 2));
}

const ACCEPTED: { name: string; request: Buffer; payload: unknown }[] = [
  { name: 'an object', request: withLength('{"ref":"main"}'), payload: { ref: 'main' } },
  { name: 'a body in one chunk', request: chunked(['{"ref":"main"}']), payload: { ref: 'main' } },
  { name: 'a body in many chunks', request: chunked([...'{"ref":"main"}']), payload: { ref: 'main' } },
  { name: 'no body', request: post(''), payload: null },
  { name: 'an empty body of a form', request: withLength('', 'Content-Type: text/plain\r\n'), payload: null },
  { name: 'an empty chunked body without a type', request: chunked([], ''), payload: null },
  { name: 'white space around', request: withLength(' \r\n\t[1] '), payload: [1] },
  {
    name: 'a charset',
    request: withLength('[1]', 'Content-Type: application/JSON; charset="UTF-8"\r\n'),
    payload: [1],
  },
  {
    name: 'the charset as many write it',
    request: withLength('[1]', 'Content-Type: application/json; charset=utf8\r\n'),
    payload: [1],
  },
  {
    name: 'another parameter',
    request: withLength('[1]', 'Content-Type: application/json;profile=x\r\n'),
    payload: [1],
  },
  {
    name: 'identity',
    request: withLength('[1]', `${JSON_TYPE}Content-Encoding: identity\r\n`),
    payload: [1],
  },
  {
    name: 'the last byte allowed',
    request: withLength(stringOf(BODY_MAX_BYTES)),
    payload: 'a'.repeat(BODY_MAX_BYTES - 2),
  },
  {
    name: 'the last byte allowed, chunked',
    request: chunked([stringOf(BODY_MAX_BYTES)]),
    payload: 'a'.repeat(BODY_MAX_BYTES - 2),
  },
  { name: 'a pair of surrogates', request: withLength('["\\ud83d\\ude80"]'), payload: ['🚀'] },
  {
    name: 'one name in two objects',
    request: withLength('[{"a":1},{"a":1}]'),
    payload: [{ a: 1 }, { a: 1 }],
  },
  {
    name: 'colons and quotes in strings',
    request: withLength('{"a:\\"":":\\\\"}'),
    payload: { 'a:"': ':\\' },
  },
  {
    name: 'a constructor that is text',
    request: withLength('{"constructor":"a"}'),
    payload: { constructor: 'a' },
  },
  {
    name: '1,000 items in a list',
    request: withLength(`[${'1,'.repeat(999)}1]`),
    payload: Array.from({ length: 1_000 }, () => 1),
  },
  { name: '32 levels', request: withLength(`${'['.repeat(32)}${']'.repeat(32)}`), payload: nested(32) },
];

function nested(levels: number): unknown {
  return levels === 1 ? [] : [nested(levels - 1)];
}

t.test('a body is taken however it comes', async (t) => {
  const { taken, plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  for (const { name, request, payload } of ACCEPTED) {
    const [response] = parseResponses(await rawRequest(port, request));
    t.equal(response?.status, 200, name);
    t.strictSame(taken.pop(), payload, name);
  }
});

const REFUSED: { name: string; request: Buffer; status: number; code: string; reason?: RegExp }[] = [
  {
    name: 'null, which is not the same as no body',
    request: withLength('null'),
    status: 400,
    code: 'invalid_request',
    reason: /must be an object/,
  },
  {
    name: 'one byte too many',
    request: withLength(stringOf(BODY_MAX_BYTES + 1)),
    status: 413,
    code: 'payload_too_large',
  },
  {
    name: 'one byte too many, chunked',
    request: chunked([stringOf(BODY_MAX_BYTES + 1)]),
    status: 413,
    code: 'payload_too_large',
  },
  {
    name: 'far too many, in many chunks',
    request: chunked(Array(64).fill(Buffer.alloc(256 * 1024, 'a'))),
    status: 413,
    code: 'payload_too_large',
  },
  {
    name: 'far too many',
    request: withLength(Buffer.alloc(16 * 1024 * 1024)),
    status: 413,
    code: 'payload_too_large',
  },
  { name: 'no type', request: withLength('{}', ''), status: 415, code: 'unsupported_media_type' },
  { name: 'no type, chunked', request: chunked(['{}'], ''), status: 415, code: 'unsupported_media_type' },
  {
    name: 'a form',
    request: withLength('ref=main', 'Content-Type: application/x-www-form-urlencoded\r\n'),
    status: 415,
    code: 'unsupported_media_type',
  },
  {
    name: 'text',
    request: withLength('{}', 'Content-Type: text/json\r\n'),
    status: 415,
    code: 'unsupported_media_type',
  },
  {
    name: 'a charset that only begins as ours',
    request: withLength('{}', 'Content-Type: application/json; charset=utf-80\r\n'),
    status: 415,
    code: 'unsupported_media_type',
  },
  {
    name: 'another charset',
    request: withLength('{}', 'Content-Type: application/json; charset=latin1\r\n'),
    status: 415,
    code: 'unsupported_media_type',
  },
  {
    name: 'a compressed body',
    request: withLength('{}', `${JSON_TYPE}Content-Encoding: gzip\r\n`),
    status: 415,
    code: 'unsupported_media_type',
  },
  {
    name: 'a compressed transfer',
    request: post(`${JSON_TYPE}Transfer-Encoding: gzip, chunked\r\n`, '2\r\n{}\r\n0\r\n\r\n'),
    status: 400,
    code: 'invalid_request',
    reason: /chunked/,
  },
  {
    name: 'cut JSON',
    request: withLength('{"ref":'),
    status: 400,
    code: 'invalid_request',
    reason: /not valid JSON/,
  },
  {
    name: 'two values',
    request: withLength('{} {}'),
    status: 400,
    code: 'invalid_request',
    reason: /character 4/,
  },
  {
    name: 'a comment',
    request: withLength('{}//'),
    status: 400,
    code: 'invalid_request',
    reason: /not valid JSON/,
  },
  { name: 'NaN', request: withLength('NaN'), status: 400, code: 'invalid_request', reason: /not valid JSON/ },
  {
    name: 'white space only',
    request: withLength('  '),
    status: 400,
    code: 'invalid_request',
    reason: /not valid JSON/,
  },
  {
    name: 'a byte order mark',
    request: withLength('\ufeff{}'),
    status: 400,
    code: 'invalid_request',
    reason: /not valid JSON/,
  },
  {
    name: 'bytes that are not UTF-8',
    request: withLength(Buffer.from([0x22, 0xff, 0x22])),
    status: 400,
    code: 'invalid_request',
    reason: /UTF-8/,
  },
  {
    name: 'an overlong NUL',
    request: withLength(Buffer.from([0x22, 0xc0, 0x80, 0x22])),
    status: 400,
    code: 'invalid_request',
    reason: /UTF-8/,
  },
  {
    name: 'NUL in a value',
    request: withLength('{"a":["\\u0000"]}'),
    status: 400,
    code: 'invalid_request',
    reason: /NUL/,
  },
  {
    name: 'NUL in a name',
    request: withLength('{"a\\u0000":1}'),
    status: 400,
    code: 'invalid_request',
    reason: /NUL/,
  },
  {
    name: 'a lone surrogate',
    request: withLength('["\\ud800"]'),
    status: 400,
    code: 'invalid_request',
    reason: /surrogate/,
  },
  {
    name: 'a lone surrogate in a name',
    request: withLength('{"\\udc00":1}'),
    status: 400,
    code: 'invalid_request',
    reason: /surrogate/,
  },
  {
    name: 'a name twice',
    request: withLength('{"ref":"a","ref":"b"}'),
    status: 400,
    code: 'invalid_request',
    reason: /repeat a name/,
  },
  {
    name: 'a name twice, spelled differently',
    request: withLength('{"ref":1,"\\u0072ef":1}'),
    status: 400,
    code: 'invalid_request',
    reason: /repeat a name/,
  },
  {
    name: '__proto__',
    request: withLength('{"__proto__":{}}'),
    status: 400,
    code: 'invalid_request',
    reason: /prototype/,
  },
  {
    name: '__proto__ within, escaped',
    request: withLength('[{"_\\u005fproto__":1}]'),
    status: 400,
    code: 'invalid_request',
    reason: /prototype/,
  },
  {
    name: 'constructor.prototype',
    request: withLength('{"constructor":{"prototype":{}}}'),
    status: 400,
    code: 'invalid_request',
    reason: /prototype/,
  },
  {
    name: '33 levels',
    request: withLength(`${'['.repeat(33)}${']'.repeat(33)}`),
    status: 400,
    code: 'invalid_request',
    reason: /nested/,
  },
  {
    name: 'as many levels as fit',
    request: withLength(`${'['.repeat(32_000)}${']'.repeat(32_000)}`),
    status: 400,
    code: 'invalid_request',
    reason: /nested/,
  },
  {
    name: 'more items in a list than any of ours has',
    request: withLength(`{"events":[${'1,'.repeat(1_000)}1]}`),
    status: 400,
    code: 'invalid_request',
    reason: /at most 1000 items/,
  },
  {
    name: 'more names in an object than any of ours has',
    request: withLength(`{${Array.from({ length: 1_001 }, (_, index) => `"field${index}":1`).join()}}`),
    status: 400,
    code: 'invalid_request',
    reason: /at most 1000 items/,
  },
];

t.test('a body that is refused reaches no handler, and its sender always reads why', async (t) => {
  const { taken, plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  for (const { name, request, status, code, reason } of REFUSED) {
    const [response] = parseResponses(await rawRequest(port, request));
    t.equal(response?.status, status, name);
    const { error } = JSON.parse(response?.body ?? '{}');
    t.equal(error.code, code, name);
    if (reason !== undefined) t.match(error.message, reason, name);
    t.strictSame(taken, [], name);
  }
});

t.test('a body that is too large is answered before it is sent', async (t) => {
  const { plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const connection = await connectRaw(port);
  connection.send(post(`${JSON_TYPE}Content-Length: ${BODY_MAX_BYTES + 1}\r\n`));
  t.match(await connection.received('payload_too_large'), /^HTTP\/1\.1 413 /);
  connection.send('a'.repeat(BODY_MAX_BYTES + 1));
  await connection.closed;
});

t.test('whoever does not send the body in time is told so', async (t) => {
  const { taken, plugin } = taker();
  const { port } = await startHttp(t, {
    resources: () => [plugin],
    timeouts: { headersMs: 100, requestMs: 100, checkMs: 10 },
  });
  for (const request of [
    post(`${JSON_TYPE}Content-Length: 10\r\n`, '{"ref"'),
    post(`${JSON_TYPE}Content-Length: 10\r\n`),
    post(`${JSON_TYPE}Transfer-Encoding: chunked\r\n`, '5\r\n{"re'),
  ]) {
    const [response, ...others] = parseResponses(await rawRequest(port, request));
    t.match(response, { status: 408, headers: { connection: 'close', 'x-request-id': /^req_/ } });
    t.match(response?.body, /request_timeout/);
    t.strictSame(others, []);
  }
  t.strictSame(taken, []);
});

t.test('a body that breaks off or is not HTTP is answered 400', async (t) => {
  const { taken, plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });

  const notChunked = post(`${JSON_TYPE}Transfer-Encoding: chunked\r\n`, 'zz\r\n{}\r\n0\r\n\r\n');
  const [response] = parseResponses(await rawRequest(port, notChunked));
  t.match(response, { status: 400, headers: { connection: 'close' } });

  const connection = await connectRaw(port);
  connection.socket.end(post(`${JSON_TYPE}Content-Length: 10\r\n`, '{"ref"'));
  t.match(parseResponses(await connection.closed), [{ status: 400, body: /invalid_request/ }]);

  const later = await connectRaw(port);
  later.send(post(`${JSON_TYPE}Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n`));
  await later.received('100 Continue');
  later.send('zz\r\n');
  t.match(await later.closed, /HTTP\/1\.1 400 /);
  t.strictSame(taken, []);
});

t.test('Expect: 100-continue is answered when the body is wanted, and only then', async (t) => {
  const { taken, plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });

  const wanted = await connectRaw(port);
  wanted.send(post(`${JSON_TYPE}Content-Length: 2\r\nExpect: 100-continue\r\n`));
  await wanted.received('HTTP/1.1 100 Continue');
  wanted.send('{}');
  t.match(await wanted.closed, /HTTP\/1\.1 200 OK/);
  t.strictSame(taken, [{}]);

  const refused = await connectRaw(port);
  refused.send(post(`${JSON_TYPE}Content-Length: 99999\r\nExpect: 100-continue\r\n`));
  t.match(await refused.received('\r\n\r\n'), /^HTTP\/1\.1 413 /);
  refused.socket.end();
  await refused.closed;
  t.equal(taken.length, 1);
});

t.test('a body of a GET means nothing, and is not let in without bound', async (t) => {
  const { plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const get = (headers: string, body: string) =>
    rawRequest(port, `GET /v2/taker HTTP/1.1\r\nHost: davit\r\nConnection: close\r\n${headers}\r\n${body}`);
  t.match(await get('Content-Length: 5\r\n', 'hello'), /^HTTP\/1\.1 200 /);
  t.match(await get('Transfer-Encoding: chunked\r\n', '5\r\nhello\r\n0\r\n\r\n'), /^HTTP\/1\.1 200 /);
  const large = 'a'.repeat(1_000_000);
  t.match(await get(`Content-Length: ${large.length}\r\n`, large), /^HTTP\/1\.1 413 /);
});

t.test(
  'a connection goes on after a body that was read, and ends politely after one that was not',
  async (t) => {
    const { plugin } = taker();
    const { port } = await startHttp(t, { resources: () => [plugin] });
    const open = (request: Buffer) => request.toString('latin1').replace('Connection: close\r\n', '');
    const statuses = async (...requests: string[]) =>
      parseResponses(await rawRequest(port, requests.join(''))).map(({ status }) => status);
    t.strictSame(
      await statuses(open(withLength('{"a":')), open(chunked(['{}'])), post('').toString()),
      [400, 200, 200],
    );
    t.strictSame(await statuses(open(withLength('{}', '')), post('').toString()), [415]);
    const long = open(withLength(' '.repeat(1_000_000), ''));
    t.strictSame(await statuses(long, post('').toString()), [413]);
  },
);

t.test('what JSON.stringify writes is read back as it was', async (t) => {
  const clean = fc
    .jsonValue()
    .map((value) => JSON.stringify(value))
    .filter((text) => !/__proto__|prototype|\\u0000|\\ud/.test(text));
  fc.assert(fc.property(clean, (text) => t.strictSame(parseJson(Buffer.from(text)), JSON.parse(text))));
});
