import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { connectRaw, heldResource, parseResponses, rawRequest, startHttp } from '../helpers/http.ts';

const NOT_REQUESTS: { name: string; bytes: string | Buffer; status: number; code: string }[] = [
  { name: 'binary noise', bytes: '\x00\x01\x02\r\n\r\n', status: 400, code: 'invalid_request' },
  {
    name: 'a TLS handshake',
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
    name: 'HTTP/3.0',
    bytes: 'GET / HTTP/3.0\r\nHost: d\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'the HTTP/2 preface',
    bytes: 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'white space in a header name',
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
    name: 'a negative Content-Length',
    bytes: 'POST / HTTP/1.1\r\nHost: d\r\nContent-Length: -1\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'two values of Content-Length',
    bytes: 'POST / HTTP/1.1\r\nHost: d\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n',
    status: 400,
    code: 'invalid_request',
  },
  {
    name: 'Content-Length with Transfer-Encoding',
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

t.test('bytes that are not an HTTP request are answered in the same shape, and logged', async (t) => {
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
    t.equal(response?.headers['allow'], status === 405 ? '' : undefined, `${name}: RFC 9110, 15.5.6`);
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

t.test('a request may have 1,000 headers, and the refusal of more says so', async (t) => {
  const { port } = await startHttp(t);
  const statusAndBody = async (count: number) => {
    const others = 'a:\r\n'.repeat(count - 2);
    const request = `GET / HTTP/1.1\r\nHost: d\r\nConnection: close\r\n${others}\r\n`;
    return parseResponses(await rawRequest(port, request)).map(({ status, body }) => `${status} ${body}`);
  };
  t.match(await statusAndBody(1_000), [/^404/]);
  t.match(await statusAndBody(1_001), [/^431 .*at most 16 KiB together, and at most 1,000 headers/]);
});

t.test('a connection that the client resets is not logged', async (t) => {
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
    const isAnswered = bytes.startsWith('CONNECT');
    t.strictSame(
      log.slice(lines).map(({ msg, status }) => [msg, status]),
      isAnswered ? [['not a request', 405]] : [],
    );
  }
});

t.test('a client that was told of a protocol error is disconnected after at most 2 s', async (t) => {
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

t.test('a request whose headers do not arrive in time is answered 408', async (t) => {
  const { port } = await startHttp(t, { timeouts: { headersMs: 50, requestMs: 50, checkMs: 10 } });
  for (const bytes of ['', 'GET / HT', 'GET / HTTP/1.1\r\nHost: d\r\n']) {
    t.match(parseResponses(await rawRequest(port, bytes)), [{ status: 408, body: /request_timeout/ }]);
  }
});

t.test('bytes that are not a request are answered 400 after an answered request', async (t) => {
  const { port } = await startHttp(t);
  const connection = await connectRaw(port);
  connection.send('GET /v2/nothing HTTP/1.1\r\nHost: d\r\n\r\n');
  await connection.received('not_found');
  connection.send('NOT HTTP AT ALL\r\n\r\n');
  t.match(parseResponses(await connection.closed), [{ status: 404 }, { status: 400 }]);
});

t.test('a slow request is answered before the malformed bytes behind it', async (t) => {
  const { plugin, release } = heldResource();
  const { port } = await startHttp(t, { resources: () => [plugin] });
  const connection = await connectRaw(port);
  connection.send('GET /held HTTP/1.1\r\nHost: d\r\n\r\n');
  connection.send('NOT HTTP AT ALL\r\n\r\n');
  // Once another connection is answered, the second line has been parsed.
  await rawRequest(port, 'GET / HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n');
  release();
  t.match(parseResponses(await connection.closed), [{ status: 200, body: /held/ }, { status: 400 }]);
});
