import { once } from 'node:events';
import { request as httpRequest } from 'node:http';
import type { Socket } from 'node:net';
import { Readable } from 'node:stream';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import type { DeploymentId } from '../../src/domain.ts';
import { until } from '../helpers/commands.ts';
import { openEvents } from '../helpers/events.ts';
import { connectRaw, requestJson, toldBy } from '../helpers/http.ts';
import { append, finish, getLog, print, running, textAt } from '../helpers/logs.ts';

t.test('a log is served byte for byte as it was printed, from ?offset or the last ?tail bytes', async (t) => {
  const { http, id, key } = await running(t);
  const bytes = Buffer.from(Array.from({ length: 200_000 }, (_, index) => (index * 7) % 256));
  await print(http.store, id, bytes);
  const rows: [query: string, from: number][] = [
    ['', 0],
    ['?offset=0', 0],
    ['?offset=65536', 65_536],
    ['?offset=199999', 199_999],
    ['?offset=200000', 200_000],
    ['?offset=200001', 200_001],
    ['?offset=999999999999999', 999_999_999_999_999],
    ['?tail=0', 200_000],
    ['?tail=1', 199_999],
    ['?tail=200000', 0],
    ['?tail=200001', 0],
    ['?tail=9007199254740991', 0],
  ];
  for (const [query, from] of rows) {
    const response = await getLog(http, id, key, query);
    t.equal(response.status, 200, query);
    t.equal(response.headers.get('content-type'), 'text/plain; charset=utf-8');
    t.equal(response.headers.get('log-next-offset'), String(Math.max(from, 200_000)), query);
    t.ok(Buffer.from(await response.arrayBuffer()).equals(bytes.subarray(from)), query);
  }
});

t.test('Log-Next-Offset continues a running log where the last answer ended', async (t) => {
  const { http, id, key } = await running(t);
  let read = '';
  let offset = '0';
  for (const text of ['', 'one\n', 'tw', 'o\n', '']) {
    if (text !== '') await print(http.store, id, text);
    const response = await getLog(http, id, key, `?offset=${offset}`);
    read += await response.text();
    offset = response.headers.get('log-next-offset') ?? 'none';
  }
  t.equal(read, 'one\ntwo\n');
  t.equal(offset, '8');
});

t.test('a line says how many bytes are left out of the middle, and offsets count these', async (t) => {
  const { http, id, key } = await running(t);
  for (const [start, text] of [
    [0, 'head\n'],
    [100_005, 'tail\n'],
  ] as const) {
    await append(http.store, id, start, Buffer.from(text), start + text.length);
  }
  t.equal(await textAt(http, id, key, ''), 'head\n[davit: 100000 bytes left out]\ntail\n');
  t.equal(await textAt(http, id, key, '?offset=50005'), '[davit: 50000 bytes left out]\ntail\n');
  t.equal(await textAt(http, id, key, '?tail=7'), '[davit: 2 bytes left out]\ntail\n');
  t.equal((await getLog(http, id, key, '')).headers.get('log-next-offset'), '100010');
});

t.test('a malformed log request is 400, whether the deployment exists or not', async (t) => {
  const { http, id, key } = await running(t);
  const events = { accept: 'text/event-stream' };
  const rows: [query: string, headers: Record<string, string>, says: RegExp | null][] = [
    ['?offset=1&tail=1', {}, /tail: must not be sent together with offset/],
    ['?offset=0&tail=0', {}, /tail: must not be sent together with offset/],
    ['?offset=-1', {}, /offset: must be a whole number/],
    ['?offset=1.5', {}, /offset: must be a whole number/],
    ['?offset=1000000000000000', {}, /offset: must be a whole number/],
    ['?tail=', {}, /tail: must not be empty/],
    ['?tail=1&tail=2', {}, /tail: must not be repeated/],
    ['?follow=1', {}, /follow: is not allowed/],
    ['', { ...events, 'last-event-id': 'x' }, /Last-Event-ID: must be the id of an event/],
    ['', { ...events, 'last-event-id': '' }, /Last-Event-ID/],
    ['', { ...events, 'last-event-id': '01' }, /Last-Event-ID/],
    ['', { ...events, 'last-event-id': '1000000000000000' }, /Last-Event-ID/],
    ['', { 'last-event-id': 'x' }, null],
  ];
  for (const [query, headers, says] of rows) {
    for (const [one, status] of [
      [id, 200],
      ['dpl_unknown', 404],
    ] as const) {
      const response = await getLog(http, one, key, query, headers);
      t.equal(response.status, says === null ? status : 400, `${query} ${JSON.stringify(headers)}`);
      if (says !== null) t.match(await response.text(), says);
      else await response.text();
    }
  }
  await until(() => http.watches.size() === 0);
});

t.test('an answer breaks off if the log cannot be read, and the cause is logged', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'printed\n');
  http.store.execute('ALTER TABLE log_chunks RENAME TO lost');
  const lines = (text: string) => http.log.filter(({ msg }) => msg === text);
  for (const accept of ['text/plain', 'text/event-stream']) {
    http.log.length = 0;
    await t.rejects(
      getLog(http, id, key, '', { accept }).then((response) => response.text()),
      accept,
    );
    await until(() => lines('request').length === 1);
    t.match(lines('a response broke off'), [
      {
        level: 50,
        request_id: lines('request')[0]?.['request_id'],
        route: '/v2/deployments/{deployment_id}/logs',
        err: { message: /no such table/, stack: /\n +at / },
      },
    ]);
  }
  await until(() => http.watches.size() === 0);
});

t.test('a client that leaves before the end of a log is logged as 499, not as an error', async (t) => {
  const { http, id, key } = await running(t);
  const client = await connectRaw(http.port);
  client.send(follow(id, key));
  await client.received('retry: ');
  client.socket.resetAndDestroy();
  await until(() => http.log.some(({ msg }) => msg === 'request'));
  const lines = http.log.filter(({ msg }) => msg === 'request' || msg === 'a response broke off');
  t.strictSame(
    lines.map(({ msg, status }) => [msg, status]),
    [['request', 499]],
  );
});

t.test('an event stream ends once its client has ended its side', async (t) => {
  const { http, id, key } = await running(t);
  const client = await connectRaw(http.port);
  client.send(follow(id, key));
  await client.received('retry: ');
  t.equal(http.watches.size(), 1);
  client.socket.end();
  t.match(await client.closed, /retry: .*\r\n0\r\n\r\n$/s);
  t.equal(http.watches.size(), 0);
});

t.test('a client that has ended its side gets all that there is of a log', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'a line\n'.repeat(100_000));
  const soFar = await connectRaw(http.port);
  soFar.socket.end(follow(id, key));
  t.match(await soFar.closed, /id: 700000\n.*\r\n0\r\n\r\n$/s);
  await finish(http.store, id);
  const ended = await connectRaw(http.port);
  ended.socket.end(follow(id, key));
  t.match(await ended.closed, /id: 700000\nevent: end\n.*\r\n0\r\n\r\n$/s);
  t.equal(http.watches.size(), 0);
});

function follow(id: DeploymentId, key: string): string {
  return `GET /v2/deployments/${id}/logs HTTP/1.1\r\nHost: d\r\nAuthorization: Bearer ${key}\r\nAccept: text/event-stream\r\n\r\n`;
}

t.test('a log needs the scope logs:read and a project that the key sees', async (t) => {
  const { http, id } = await running(t);
  await print(http.store, id, 'secret\n');
  const { secret: withoutScope } = await http.store.key({ scopes: ['deployments:read'] });
  const { secret: withoutProject } = await http.store.key({ allProjects: false });
  for (const accept of ['text/plain', 'text/event-stream']) {
    const refused = await getLog(http, id, withoutScope, '', { accept });
    t.equal(refused.status, 403);
    t.match(await refused.text(), /logs:read/);
    const refusal = (one: string) =>
      requestJson(http.port, 'GET', `/v2/deployments/${one}/logs`, {
        key: withoutProject,
        headers: { accept },
      });
    const unseen = await refusal(id);
    t.match(unseen, { status: 404, body: { error: { code: 'not_found' } } });
    t.equal(toldBy(unseen), toldBy(await refusal('dpl_unknown')));
  }
  await until(() => http.watches.size() === 0);
});

t.test('a log is sent as events if Accept prefers text/event-stream, else as text', async (t) => {
  const { http, id, key } = await running(t);
  await finish(http.store, id);
  const rows: [accept: string | undefined, type: string][] = [
    [undefined, 'text/plain; charset=utf-8'],
    ['*/*', 'text/plain; charset=utf-8'],
    ['text/plain', 'text/plain; charset=utf-8'],
    ['application/json', 'text/plain; charset=utf-8'],
    ['text/event-streams', 'text/plain; charset=utf-8'],
    ['x-text/event-stream', 'text/plain; charset=utf-8'],
    ['text/event-stream', 'text/event-stream; charset=utf-8'],
    ['TEXT/Event-Stream;q=0.9', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0.001', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0', 'text/plain; charset=utf-8'],
    ['text/event-stream; Q=0.000, text/plain', 'text/plain; charset=utf-8'],
    ['text/html, text/event-stream', 'text/event-stream; charset=utf-8'],
    ['text/event-stream, */*', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0.1, */*', 'text/plain; charset=utf-8'],
    ['text/event-stream;q=0.999, text/*', 'text/plain; charset=utf-8'],
    ['*/*, text/*;q=0.5, text/event-stream;q=0.5', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0.5, text/plain;q=0.1, */*', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0, */*;q=0', 'text/plain; charset=utf-8'],
    [`text/event-stream${','.repeat(1_024)}text/plain`, 'text/event-stream; charset=utf-8'],
    [`text/event-stream;q=0.5,${'x'.repeat(994)},*/*;q=0.1`, 'text/event-stream; charset=utf-8'], // cut at its q
    ['text/plain, text/event-stream', 'text/plain; charset=utf-8'],
    ['text/event-stream,text/plain,application/json', 'text/plain; charset=utf-8'],
    ['text/plain;q=0.4, text/event-stream;q=0.5', 'text/event-stream; charset=utf-8'],
    ['text/plain, text/event-stream;q=0.5', 'text/plain; charset=utf-8'],
    ['text/event-stream;q=much', 'text/plain; charset=utf-8'],
  ];
  for (const [accept, type] of rows) {
    const asked = httpRequest({
      port: http.port,
      path: `/v2/deployments/${id}/logs`,
      headers: { authorization: `Bearer ${key}`, ...(accept === undefined ? {} : { accept }) },
    }).end();
    const [response] = await once(asked, 'response');
    response.resume();
    t.equal(response.headers['content-type'], type, accept ?? 'none');
  }
});

t.test('HEAD answers Log-Next-Offset without a body, and follows nothing', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'hello\n');
  for (const accept of ['text/plain', 'text/event-stream']) {
    const response = await fetch(`http://127.0.0.1:${http.port}/v2/deployments/${id}/logs`, {
      method: 'HEAD',
      headers: { authorization: `Bearer ${key}`, accept },
    });
    t.equal(response.status, 200);
    t.equal(await response.text(), '');
    if (accept === 'text/plain') t.equal(response.headers.get('log-next-offset'), '6');
  }
  await until(() => http.watches.size() === 0);
});

t.test('a log is read and followed without all of its deployment', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'hello\n');
  let reads = 0;
  for (const read of ['get', 'visibleTo'] as const) {
    http.store.reads.deployments[read] = () => {
      reads += 1;
      return undefined;
    };
  }
  t.equal(await textAt(http, id, key, ''), 'hello\n');
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  t.match(await stream.next(), { data: 'hello\n' });
  await finish(http.store, id);
  t.match(await stream.rest(), [{ type: 'end' }]);
  t.equal(reads, 0);
});

t.test('a log is not read far ahead of a client that does not take it', async (t) => {
  const { http, id, key } = await running(t);
  const sockets = new Set<Socket>();
  http.server.listener.on('connection', (socket) => sockets.add(socket));
  let readAhead = () => 0;
  http.server.ext('onPreResponse', ({ response }, h) => {
    const source = 'isBoom' in response ? undefined : response.source;
    readAhead = () => (source instanceof Readable ? source.readableLength : Number.NaN);
    return h.continue;
  });
  const total = 48 * 1024 * 1024;
  await print(http.store, id, Buffer.alloc(total, 'ä\n'));
  for (const accept of ['text/plain', 'text/event-stream']) {
    sockets.clear();
    const client = await connectRaw(http.port);
    client.socket.pause();
    client.send(
      `GET /v2/deployments/${id}/logs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${key}\r\nAccept: ${accept}\r\n\r\n`,
    );
    await until(() => sockets.size === 1);
    const [socket] = sockets;
    if (socket === undefined) throw new Error('nobody connected');
    // Until the kernel's buffers are full: what is written then stays in this process.
    await until(() => socket.writableNeedDrain);
    let before = -1;
    while (before !== socket.bytesWritten) {
      before = socket.bytesWritten;
      for (let turn = 0; turn < 200; turn++) await nextTurn();
    }
    t.ok(socket.bytesWritten < total / 2, 'less than half of the log was read');
    t.ok(socket.writableLength < 256 * 1024, `${accept}: ${socket.writableLength} bytes wait in memory`);
    t.ok(readAhead() < 64 * 1024, `${accept}: ${readAhead()} bytes are read ahead`);
    client.socket.destroy();
  }
  await until(() => http.watches.size() === 0);
});

t.test('a client that takes a long log as fast as it comes leaves turns to others', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, Buffer.alloc(2 * 1024 * 1024, 'x'));
  await finish(http.store, id);
  const sockets: Socket[] = [];
  http.server.listener.on('connection', (socket) => sockets.push(socket));
  const written = () => sockets.reduce((sum, { bytesWritten }) => sum + bytesWritten, 0);
  for (const accept of ['text/plain', 'text/event-stream']) {
    let isOver = false;
    const answer = getLog(http, id, key, '', { accept })
      .then((response) => response.text())
      .finally(() => {
        isOver = true;
      });
    let most = 0;
    while (!isOver) {
      const before = written();
      await nextTurn();
      most = Math.max(most, written() - before);
    }
    t.ok((await answer).length >= 2 * 1024 * 1024);
    t.ok(most < 64 * 1024, `${accept}: at most ${most} bytes in a turn`);
  }
  await until(() => http.watches.size() === 0);
});
