import { once } from 'node:events';
import type { IncomingMessage } from 'node:http';
import type { Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { connect as connectTls, type TLSSocket } from 'node:tls';
import type { Plugin } from '@hapi/hapi';
import Joi from 'joi';
import t from 'tap';
import { BODY_MAX_BYTES } from '../../src/http/body.ts';
import { collectGarbage } from '../../src/memory.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { connectRaw, PATIENT, parseResponses, rawRequest, startHttp } from '../helpers/http.ts';
import { tlsFixture } from '../helpers/receiver.ts';

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
          options: { auth: false, plugins: { input: { payload: Joi.any() } } },
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
  { name: 'null, kept as text', request: withLength('null'), payload: 'null' },
  {
    name: 'an empty text/plain body',
    request: withLength('', 'Content-Type: text/plain\r\n'),
    payload: null,
  },
  { name: 'an empty chunked body without a type', request: chunked([], ''), payload: null },
  { name: 'white space around the value', request: withLength(' \r\n\t[1] '), payload: [1] },
  {
    name: 'a quoted charset',
    request: withLength('[1]', 'Content-Type: application/JSON; charset="UTF-8"\r\n'),
    payload: [1],
  },
  {
    name: 'charset utf8',
    request: withLength('[1]', 'Content-Type: application/json; charset=utf8\r\n'),
    payload: [1],
  },
  {
    name: 'an unknown media type parameter',
    request: withLength('[1]', 'Content-Type: application/json;profile=x\r\n'),
    payload: [1],
  },
  {
    name: 'a charset behind an unknown parameter',
    request: withLength('[1]', 'Content-Type: application/json ; profile=x ; charset=utf-8\r\n'),
    payload: [1],
  },
  {
    name: 'Content-Encoding: identity',
    request: withLength('[1]', `${JSON_TYPE}Content-Encoding: Identity\r\n`),
    payload: [1],
  },
  {
    name: 'Transfer-Encoding in capitals',
    request: post(`${JSON_TYPE}Transfer-Encoding: CHUNKED\r\n`, '3\r\n[1]\r\n0\r\n\r\n'),
    payload: [1],
  },
  {
    name: 'a body of the maximum size',
    request: withLength(stringOf(BODY_MAX_BYTES)),
    payload: 'a'.repeat(BODY_MAX_BYTES - 2),
  },
  {
    name: 'a body of the maximum size, chunked',
    request: chunked([stringOf(BODY_MAX_BYTES)]),
    payload: 'a'.repeat(BODY_MAX_BYTES - 2),
  },
  { name: 'a pair of surrogates', request: withLength('["\\ud83d\\ude80"]'), payload: ['🚀'] },
  {
    name: 'the same name in two objects',
    request: withLength('[{"a":1},{"a":1}]'),
    payload: [{ a: 1 }, { a: 1 }],
  },
  {
    name: 'colons and quotes in strings',
    request: withLength('{"a:\\"":":\\\\"}'),
    payload: { 'a:"': ':\\' },
  },
  {
    name: 'a constructor that is a string',
    request: withLength('{"constructor":"a"}'),
    payload: { constructor: 'a' },
  },
  {
    name: '128 items in a list',
    request: withLength(`[${'1,'.repeat(127)}1]`),
    payload: Array(128).fill(1),
  },
  { name: '128 levels', request: withLength(`${'['.repeat(128)}${']'.repeat(128)}`), payload: nested(128) },
  {
    name: 'brackets and commas in strings',
    request: withLength(`["\\"${'[{,'.repeat(128)}"]`),
    payload: [`"${'[{,'.repeat(128)}`],
  },
];

function nested(levels: number): unknown {
  return levels === 1 ? [] : [nested(levels - 1)];
}

t.test('a valid body is accepted, however it is framed and spelled', async (t) => {
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
    name: 'far too many bytes, in many chunks',
    request: chunked(Array(64).fill(Buffer.alloc(256 * 1024, 'a'))),
    status: 413,
    code: 'payload_too_large',
  },
  {
    name: 'far too many bytes',
    request: withLength(Buffer.alloc(16 * 1024 * 1024)),
    status: 413,
    code: 'payload_too_large',
  },
  {
    name: 'chunk extensions that are too large',
    request: post(
      `${JSON_TYPE}Transfer-Encoding: chunked\r\n`,
      `2;${'a'.repeat(100_000)}\r\n{}\r\n0\r\n\r\n`,
    ),
    status: 413,
    code: 'payload_too_large',
  },
  { name: 'no Content-Type', request: withLength('{}', ''), status: 415, code: 'unsupported_media_type' },
  { name: 'chunks without type', request: chunked(['{}'], ''), status: 415, code: 'unsupported_media_type' },
  {
    name: 'a form',
    request: withLength('ref=main', 'Content-Type: application/x-www-form-urlencoded\r\n'),
    status: 415,
    code: 'unsupported_media_type',
  },
  {
    name: 'text/json',
    request: withLength('{}', 'Content-Type: text/json\r\n'),
    status: 415,
    code: 'unsupported_media_type',
  },
  {
    name: 'a charset that only begins with utf-8',
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
    name: 'another charset behind another parameter',
    request: withLength('{}', 'Content-Type: application/json; profile=x; charset=latin1\r\n'),
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
    name: 'truncated JSON',
    request: withLength('{"ref":'),
    status: 400,
    code: 'invalid_request',
    reason: /not valid JSON/,
  },
  {
    name: 'two JSON values',
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
    reason: /must not begin with a byte order mark/,
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
    name: 'a repeated name',
    request: withLength('{"ref":"a","ref":"b"}'),
    status: 400,
    code: 'invalid_request',
    reason: /repeat a name/,
  },
  {
    name: 'a repeated name, escaped',
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
    name: 'a nested __proto__, escaped',
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
    name: '129 levels',
    request: withLength(`${'['.repeat(129)}${']'.repeat(129)}`),
    status: 400,
    code: 'invalid_request',
    reason: /at most 128 items/,
  },
  {
    name: 'as many levels as fit',
    request: withLength(`${'['.repeat(32_000)}${']'.repeat(32_000)}`),
    status: 400,
    code: 'invalid_request',
    reason: /at most 128 items/,
  },
  {
    name: '129 items in a list',
    request: withLength(`[${'1,'.repeat(128)}1]`),
    status: 400,
    code: 'invalid_request',
    reason: /at most 128 items/,
  },
  {
    name: '129 names in an object',
    request: withLength(`{${Array.from({ length: 129 }, (_, index) => `"field${index}":1`).join()}}`),
    status: 400,
    code: 'invalid_request',
    reason: /at most 128 items/,
  },
  {
    name: '129 items in lists within lists',
    request: withLength(`{"events":[${Array(64).fill('[0]').join()}]}`),
    status: 400,
    code: 'invalid_request',
    reason: /at most 128 items/,
  },
];

t.test('a malformed body reaches no handler, and its client always receives the error', async (t) => {
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

t.test('a Content-Type with very many spaces takes no longer than one with as many letters', async (t) => {
  const { plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const fastestMs = async (filler: string) => {
    const request = withLength(
      '{}',
      `Content-Type: application/json; charset=${filler.repeat(15_000)} x y\r\n`,
    );
    const times: number[] = [];
    for (let time = 0; time < 3; time++) {
      const beganAtMs = performance.now();
      t.match(await rawRequest(port, request), /^HTTP\/1\.1 /);
      times.push(performance.now() - beganAtMs);
    }
    return Math.min(...times);
  };
  const lettersMs = await fastestMs('a');
  const spacesMs = await fastestMs(' ');
  t.ok(spacesMs < lettersMs * 20, `${spacesMs} ms for spaces, ${lettersMs} ms for letters`);
});

t.test('an error about NUL or a lone surrogate names a known field or the body', async (t) => {
  const { plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  for (const [body, field] of [
    ['{"ref":"\\u0000"}', 'ref'],
    ['{"outputs":{"Image_2":"\\u0000","b":""}}', 'outputs.Image_2'],
    ['{"outputs":{"inner":[{"a":"\\ud800"}]}}', 'outputs.inner'],
    ['{"outputs":{"Look here":"\\u0000"}}', 'outputs'],
    ['{"outputs":{"a\\u0000":""}}', 'outputs'],
    [`{"outputs":{"davit_${'x'.repeat(49)}":"\\u0000"}}`, 'outputs'],
    ['{"Look here":"\\u0000"}', 'body'],
    ['{"\\u001b[2J":"\\u0000"}', 'body'],
    ['["\\u0000"]', 'body'],
  ] as const) {
    const [response] = parseResponses(await rawRequest(port, withLength(body)));
    t.match(JSON.parse(response?.body ?? '{}'), { error: { details: [{ in: 'body', field }] } }, body);
  }
});

t.test('a Content-Length that is too large is answered 413 before the body is sent', async (t) => {
  const { plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const connection = await connectRaw(port);
  connection.send(post(`${JSON_TYPE}Content-Length: ${BODY_MAX_BYTES + 1}\r\n`));
  t.match(await connection.received('payload_too_large'), /^HTTP\/1\.1 413 /);
  connection.send('a'.repeat(BODY_MAX_BYTES + 1));
  await connection.closed;
});

t.test(
  'a body in very many tiny chunks is refused, and a client that sends all of it gets the answer',
  async (t) => {
    const { plugin, taken } = taker();
    const { port } = await startHttp(t, { resources: () => [plugin] });
    const tiny = chunked(Array(15_000).fill(' '));
    for (const [request, status] of [
      [tiny, 400],
      [chunked(Array(513).fill(' ')), 400],
      [Buffer.from(tiny.toString().replace('/v2/taker', '/v2/nowhere')), 404],
    ] as const) {
      const [response, ...others] = parseResponses(await rawRequest(port, request));
      t.match(response, { status, headers: { connection: 'close' } });
      t.match(response?.body, status === 400 ? /tiny pieces/ : /not_found/);
      t.strictSame(others, []);
    }
    t.strictSame(taken, []);
    const [response] = parseResponses(await rawRequest(port, chunked(Array.from(stringOf(512)))));
    t.equal(response?.status, 200, 'a report that is streamed token by token may have some 400');
    for (const [size, status] of [
      [31, 400],
      [32, 200],
    ] as const) {
      const pieces = stringOf(513 * size).match(new RegExp(`.{${size}}`, 'g')) ?? [];
      const [answered] = parseResponses(await rawRequest(port, chunked(pieces)));
      t.equal(answered?.status, status, `${size} bytes each`);
    }
  },
);

t.test(
  'the rest of a body in very many tiny chunks is dropped as it comes, and not read without end',
  async (t) => {
    const effects = fakeEffects();
    const { port, server } = await startHttp(t, { effects, timeouts: PATIENT });
    const arrived = once(server.listener, 'request');
    const connection = await connectRaw(port);
    const isClosed = connection.closed.catch(() => 'reset');
    connection.send(post(`${JSON_TYPE}Transfer-Encoding: chunked\r\n`));
    const [request] = (await arrived) as [IncomingMessage];
    await connection.received('HTTP/1.1 404');
    const { socket } = request;
    const pieces = piecesOf(request);
    const before = heldBytes();
    connection.send('1\r\n \r\n'.repeat(1_000_000));
    await until(() => socket.bytesRead > 500_000);
    const bytes = heldBytes() - before;
    t.ok(bytes < 4 * 1024 * 1024, `${bytes} bytes`);
    await until(() => {
      effects.advance(5_000);
      return socket.destroyed;
    });
    t.equal(pieces(), 0);
    t.ok(socket.bytesRead < 1_000_000, `${socket.bytesRead} of 6,000,000 bytes were read`);
    await isClosed;
  },
);

t.test('no Buffers are made of the rest of a refused body, whatever the length of its chunks', async (t) => {
  const { port, server } = await startHttp(t, { timeouts: PATIENT });
  const arrived = once(server.listener, 'request');
  const connection = await connectRaw(port);
  connection.send(post(`${JSON_TYPE}Transfer-Encoding: chunked\r\n`));
  const [request] = (await arrived) as [IncomingMessage];
  await connection.received('HTTP/1.1 404');
  const pieces = piecesOf(request);
  connection.send(`${`64\r\n${'a'.repeat(100)}\r\n`.repeat(20_000)}0\r\n\r\n`);
  t.equal(parseResponses(await connection.closed).length, 1);
  t.equal(pieces(), 0);
});

/** Counts the pieces of a body that Node makes from now on, also those that are dropped then. */
function piecesOf(request: IncomingMessage): () => number {
  let count = 0;
  const push = request.push.bind(request);
  request.push = (piece: Buffer | null) => {
    if (piece !== null) count += 1;
    return push(piece);
  };
  return () => count;
}

t.test('a body in very many tiny records of TLS is refused, and not read without end', async (t) => {
  const effects = fakeEffects();
  const { plugin, taken } = taker();
  const options = { resources: () => [plugin], tls: LOCALHOST, effects, timeouts: PATIENT };
  const { port, server } = await startHttp(t, options);
  for (const [count, status] of [
    [512, 200],
    [513, 400],
  ] as const) {
    const { socket, answer } = await postRecords(port, count);
    t.match(await answer, new RegExp(`^HTTP/1.1 ${status} `));
    t.match(await answer, status === 400 ? /tiny pieces/ : /taken/);
    socket.destroy();
  }
  t.equal(taken.length, 1);

  const connected = once(server.listener, 'secureConnection');
  const { socket } = await postRecords(port, 8_000);
  const [served] = (await connected) as [TLSSocket];
  await until(() => {
    effects.advance(5_000);
    return served.destroyed;
  });
  t.ok(served.bytesRead < 6_000, `${served.bytesRead} of 8,000 bytes were read`);
  socket.destroy();
});

const LOCALHOST = {
  chain: tlsFixture('localhost.pem'),
  key: tlsFixture('localhost.key'),
};

/** Posts a JSON string of `count` bytes, each in a record of its own: the next is written when the last has been. */
async function postRecords(port: number, count: number) {
  const socket = connectTls({ port, host: '127.0.0.1', rejectUnauthorized: false });
  socket.on('error', () => undefined);
  let came = '';
  const answer = new Promise<string>((resolve) => {
    socket.on('data', (text) => {
      came += text;
      if (came.endsWith('}')) resolve(came);
    });
  });
  const head = post(`${JSON_TYPE}Content-Length: ${count}\r\n`);
  for (const record of [head, ...stringOf(count)]) await new Promise((done) => socket.write(record, done));
  return { socket, answer };
}

t.test('a body in segments of one byte takes little memory', async (t) => {
  const { plugin, taken } = taker();
  const { port, server } = await startHttp(t, { resources: () => [plugin] });
  const connected = once(server.listener, 'connection');
  const connection = await connectRaw(port);
  connection.socket.setNoDelay();
  const [socket] = (await connected) as [Socket];
  const head = post(`${JSON_TYPE}Content-Length: 10002\r\n`);
  const before = heldBytes();
  connection.send(head);
  for (let sent = 1; sent <= 10_000; sent++) {
    connection.send(' ');
    while (socket.bytesRead < head.length + sent) await nextTurn();
  }
  const bytes = heldBytes() - before;
  t.ok(bytes < 1024 * 1024, `${bytes} bytes`);
  connection.send('{}');
  await connection.received('HTTP/1.1 2');
  t.strictSame(taken, [{}]);
  connection.socket.end();
});

t.test('what came of a body keeps no other memory alive', async (t) => {
  const { port, server } = await startHttp(t, { resources: () => [taker().plugin] });
  const head = post(`${JSON_TYPE}Content-Length: 10000\r\n`);
  collectGarbage();
  const before = process.memoryUsage().arrayBuffers;
  const clients = [];
  for (let opened = 0; opened < 32; opened++) {
    const connected = once(server.listener, 'connection');
    const { send, socket: client } = await connectRaw(port);
    client.setNoDelay();
    clients.push(client);
    const [socket] = (await connected) as [Socket];
    send(head);
    for (let sent = 1; sent <= 32; sent++) {
      send(' ');
      while (socket.bytesRead < head.length + sent) await nextTurn();
    }
    // Others take the rest of the memory that small Buffers share.
    for (let taken = 0; taken < 2 * Buffer.poolSize; taken += 8_000) Buffer.allocUnsafe(8_000);
  }
  collectGarbage();
  const bytes = process.memoryUsage().arrayBuffers - before;
  t.ok(bytes < 1024 * 1024, `${bytes} bytes`);
  for (const client of clients) client.destroy();
});

/** The heap of this thread in use after a garbage collection, and what Buffers hold outside of it. */
function heldBytes(): number {
  collectGarbage();
  const { heapUsed, external } = process.memoryUsage();
  return heapUsed + external;
}

t.test('a request whose body does not arrive in time is answered 408', async (t) => {
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

t.test('a body that breaks off or breaks the chunked coding is answered 400 at once', async (t) => {
  const { taken, plugin } = taker();
  const { port, log } = await startHttp(t, {
    resources: () => [plugin],
    effects: fakeEffects(),
    timeouts: PATIENT,
  });

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
  t.notOk(
    log.some(({ msg }) => msg === 'not a request'),
    'none is logged as bytes that are no request',
  );
});

t.test('Expect: 100-continue is answered 413 in place of 100 when the body is too large', async (t) => {
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

t.test('Expect: 100-continue is read in upper or lower case, and ignored for HTTP/1.0', async (t) => {
  const { plugin } = taker();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const expecting = withLength('{}', `${JSON_TYPE}Expect: 100-Continue\r\n`).toString();
  t.match(await rawRequest(port, expecting), /^HTTP\/1\.1 100 Continue\r\n\r\nHTTP\/1\.1 200 /);
  // RFC 9110, 10.1.1: such a client takes the 100 for the answer.
  t.match(await rawRequest(port, expecting.replace('HTTP/1.1', 'HTTP/1.0')), /^HTTP\/1\.1 200 /);
});

t.test(
  'the rest of a rejected body is discarded, up to 5 s of silence, 30 s in all, 64 MiB or an error',
  async (t) => {
    const effects = fakeEffects();
    const { plugin } = taker();
    const { port, server } = await startHttp(t, { resources: () => [plugin], effects, timeouts: PATIENT });
    const sockets: Socket[] = [];
    server.listener.on('connection', (socket: Socket) => sockets.push(socket));
    const bytesRead = () => sockets.at(-1)?.bytesRead ?? 0;
    const refused = async (head: string) => {
      const connection = await connectRaw(port);
      connection.send(post(`${JSON_TYPE}${head}`));
      await connection.received('payload_too_large');
      const { bytesRead = 0 } = sockets.at(-1) ?? {};
      const arrived = (count: number) => until(() => (sockets.at(-1)?.bytesRead ?? 0) >= bytesRead + count);
      return { ...connection, arrived };
    };
    const tooLong = 'Content-Length: 1000000000\r\n';

    const silent = await refused(tooLong);
    effects.advance(5_000);
    await silent.closed;

    const slow = await refused(tooLong);
    for (let look = 1; look <= 6; look++) {
      t.notOk(slow.socket.closed, `at look ${look}`);
      slow.send('a');
      await slow.arrived(look);
      effects.advance(5_000);
    }
    await slow.closed;

    const quick = await refused(tooLong);
    const piece = Buffer.alloc(1024 * 1024, 'a');
    for (let count = 0; count < 65; count++) quick.socket.write(piece);
    await quick.closed.catch(() => undefined);
    t.ok(bytesRead() > 64 * 1024 * 1024);

    const broken = await connectRaw(port);
    broken.send('POST /v2/nothing HTTP/1.1\r\nHost: davit\r\nTransfer-Encoding: chunked\r\n\r\n');
    await broken.received('not_found');
    broken.send('zz\r\n');
    await broken.closed;
  },
);

t.test('the body of a GET is ignored, and answered 413 if it is too large', async (t) => {
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
  'a connection is kept after a request whose body was read, and closed after one whose body was not',
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
