import { once } from 'node:events';
import type { IncomingMessage } from 'node:http';
import type { Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Plugin } from '@hapi/hapi';
import t from 'tap';
import { collectGarbage } from '../../src/memory.ts';
import { until } from '../helpers/commands.ts';
import { connectRaw, heldResource, parseResponses, rawRequest, startHttp } from '../helpers/http.ts';

/** Its one route, GET /open, answers at once. */
const open: Plugin<void> = {
  name: 'open',
  register(server) {
    server.route({
      method: 'GET',
      path: '/open',
      options: { auth: false },
      handler: () => ({ open: true }),
    });
  },
};

t.test('a connection beyond the maximum is answered 503, until another one has closed', async (t) => {
  const { port } = await startHttp(t, { resources: () => [open], maxConnections: 2 });
  const get = 'GET /open HTTP/1.1\r\nHost: d\r\n\r\n';
  const first = await connectRaw(port);
  const second = await connectRaw(port);
  for (const connection of [first, second]) {
    connection.send(get);
    t.match(await connection.received('open'), /^HTTP\/1\.1 200 /);
  }
  t.match(parseResponses(await rawRequest(port, get)), [
    { status: 503, headers: { 'retry-after': '1', connection: 'close' }, body: /unavailable/ },
  ]);
  first.socket.end();
  await first.closed;
  const third = await connectRaw(port);
  third.send(get);
  t.match(await third.received('open'), /^HTTP\/1\.1 200 /);
});

t.test('connections that say nothing beyond the maximum take no place from those before them', async (t) => {
  const { port } = await startHttp(t, { resources: () => [open], maxConnections: 2 });
  const get = 'GET /open HTTP/1.1\r\nHost: d\r\n\r\n';
  const first = await connectRaw(port);
  const second = await connectRaw(port);
  const silent = await connectRaw(port);
  t.equal(await rawRequest(port, get), '', 'dropped, as the silent one has been accepted');
  for (const connection of [first, second]) {
    connection.send(get);
    t.match(await connection.received('open'), /^HTTP\/1\.1 200 /);
  }
  silent.send(get);
  t.match(await silent.received('unavailable'), /^HTTP\/1\.1 503 /);
});

t.test('a connection may have 100 unanswered requests; the next one is 503 and closes it', async (t) => {
  const { promise: released, resolve: release } = Promise.withResolvers<void>();
  const reached: string[] = [];
  const held: Plugin<void> = {
    name: 'held',
    register(server) {
      server.route<{ Params: { id: string } }>({
        method: 'GET',
        path: '/held/{id}',
        options: { auth: false },
        async handler({ params }) {
          reached.push(params.id);
          // After all requests of the same read have been parsed.
          if (reached.length === 100) setImmediate(release);
          await released;
          return { held: params.id };
        },
      });
    },
  };
  const { port } = await startHttp(t, { resources: () => [held] });
  // Node emits another event for requests with `Expect: 100-continue`.
  const gets = (count: number) =>
    Array.from(
      { length: count },
      (_, index) =>
        `GET /held/${index} HTTP/1.1\r\nHost: d\r\n${index < 100 ? '' : 'Expect: 100-continue\r\n'}\r\n`,
    ).join('');
  const answers = parseResponses(await rawRequest(port, gets(200)));
  t.strictSame(
    answers.map(({ status }) => status),
    [...Array.from({ length: 100 }, () => 200), 503],
  );
  t.match(answers.at(-1), {
    headers: { 'retry-after': '1', connection: 'close' },
    body: /"unavailable","message":"[^"]*wait for their answers/,
  });
  t.equal(reached.length, 100);

  const patient = await connectRaw(port);
  for (let times = 0; times < 3; times++) {
    patient.send(`${gets(99)}GET /held/last${times} HTTP/1.1\r\nHost: d\r\n\r\n`);
    await patient.received(`"last${times}"`);
  }
  patient.socket.end();
  t.equal(parseResponses(await patient.closed).length, 300, 'requests that were answered do not count');
});

t.test('the number of requests behind an unanswered one is limited over all connections', async (t) => {
  const { plugin, heldCount, release } = heldResource();
  const { port, log } = await startHttp(t, { resources: () => [plugin], pipelinedMax: 2 });
  const get = 'GET /held HTTP/1.1\r\nHost: d\r\n\r\n';
  const [first, second] = [await connectRaw(port), await connectRaw(port)];
  for (const connection of [first, second]) connection.send(get.repeat(2));
  await until(() => heldCount() === 4);
  const refused = await connectRaw(port);
  refused.send(get.repeat(3));
  const alone = await connectRaw(port);
  alone.send(get);
  await until(() => heldCount() === 6); // the first of each of the two
  release();
  t.match(parseResponses(await refused.closed), [
    { status: 200 },
    { status: 503, headers: { 'retry-after': '1', connection: 'close' }, body: /wait for their answers/ },
  ]);
  t.match(
    await alone.received('held'),
    /^HTTP\/1\.1 200 /,
    'the first request of a connection does not count',
  );

  for (const { send, closed } of [first, second]) {
    send(`${get.repeat(2)}GET /last HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n`);
    t.strictSame(
      parseResponses(await closed).map(({ status }) => status),
      [200, 200, 200, 200, 404],
      'requests that were answered no longer count',
    );
  }
  t.equal(
    log.filter(({ msg, status }) => msg === 'request' && status !== 200 && status !== 404).length,
    1,
    'the request behind the rejected one is not carried out',
  );
});

t.test('after a 503 for too many requests, no more is read from the connection', async (t) => {
  const { plugin, release } = heldResource();
  const { port, server } = await startHttp(t, { resources: () => [plugin], pipelinedMax: 0 });
  const connected = once(server.listener, 'connection');
  let arrived = 0;
  const bothArrived = new Promise<void>((resolve) => {
    server.listener.on('request', () => {
      arrived += 1;
      if (arrived === 2) resolve();
    });
  });
  const client = await connectRaw(port);
  const [socket] = (await connected) as [Socket];
  const get = 'GET /held HTTP/1.1\r\nHost: d\r\n\r\n';
  client.send(get.repeat(2));
  await bothArrived;
  const before = socket.bytesRead;
  for (let times = 0; times < 4; times++) client.send(get.repeat(16_384));
  for (let turn = 0; turn < 1_000; turn++) await nextTurn();
  t.ok(socket.bytesRead - before < 256 * 1024, `${socket.bytesRead - before} bytes more were read`);
  release();
  client.socket.destroy();
});

t.test('of what is behind a 503 for too many requests, nothing is kept or made', async (t) => {
  const { plugin, release } = heldResource();
  const { port, server } = await startHttp(t, { resources: () => [plugin], pipelinedMax: 0 });
  const requests: IncomingMessage[] = [];
  server.listener.on('request', (request: IncomingMessage) => requests.push(request));
  const client = await connectRaw(port);
  const get = 'GET /held HTTP/1.1\r\nHost: d\r\n\r\n';
  const head = 'POST /held HTTP/1.1\r\nHost: d\r\nTransfer-Encoding: chunked\r\n\r\n';
  const body = `${'1\r\n \r\n'.repeat(4_000)}0\r\n\r\n`;
  const post = `${head}${body}`;
  client.send(`${get.repeat(2)}${post.repeat(2)}${get.repeat(1_000)}`);
  await until(() => requests.length === 3);
  release();
  t.strictSame(
    parseResponses(await client.closed).map(({ status }) => status),
    [200, 503],
  );
  t.strictSame(
    requests.map(({ readableLength }) => readableLength),
    [0, 0, 0],
    'and no request behind the first of them',
  );
  const next = await connectRaw(port);
  next.send(post);
  t.match(await next.received('}'), /^HTTP\/1\.1 405/, 'the next connection is served');
  next.socket.destroy();
});

t.test('the waiting requests of a client that left no longer count towards the limit', async (t) => {
  const { promise: reached, resolve: tellReached } = Promise.withResolvers<void>();
  const hanging: Plugin<void> = {
    name: 'hanging',
    register(server) {
      server.route({
        method: 'GET',
        path: '/hanging',
        options: { auth: false },
        handler: () => {
          tellReached();
          return new Promise<never>(() => undefined);
        },
      });
    },
  };
  const { port, server } = await startHttp(t, { resources: () => [open, hanging], pipelinedMax: 2 });
  const connected = once(server.listener, 'connection');
  const leaving = await connectRaw(port);
  const [socket] = (await connected) as [Socket];
  const get = 'GET /open HTTP/1.1\r\nHost: d\r\n\r\n';
  leaving.send(`GET /hanging HTTP/1.1\r\nHost: d\r\n\r\n${get.repeat(2)}`);
  await reached;
  const closed = once(socket, 'close');
  leaving.socket.destroy();
  await closed;
  const staying = await connectRaw(port);
  staying.send(`${get.repeat(2)}${get.replace('\r\n\r\n', '\r\nConnection: close\r\n\r\n')}`);
  t.strictSame(
    parseResponses(await staying.closed).map(({ status }) => status),
    [200, 200, 200],
  );
});

t.test('a request is not carried out once the server has ended its side of the connection', async (t) => {
  const { plugin, heldCount } = heldResource();
  const { port, server } = await startHttp(t, { resources: () => [plugin] });
  const connected = once(server.listener, 'connection');
  const connection = await connectRaw(port);
  const [socket] = (await connected) as [Socket];
  socket.end();
  connection.send('GET /held HTTP/1.1\r\nHost: d\r\n\r\n');
  await once(socket, 'close');
  t.equal(heldCount(), 0);
  t.equal(await connection.closed.catch(() => ''), '');
});

t.test('an idle keep-alive connection keeps nothing of its last request in memory', async (t) => {
  const answered: WeakRef<object>[] = [];
  const remembering: Plugin<void> = {
    name: 'remembering',
    register(server) {
      server.route({
        method: 'GET',
        path: '/remembered',
        options: { auth: false },
        handler({ raw }) {
          answered.push(new WeakRef(raw.req), new WeakRef(raw.res));
          return { remembered: true };
        },
      });
    },
  };
  const { port } = await startHttp(t, { resources: () => [remembering] });
  const connection = await connectRaw(port);
  connection.send('GET /remembered HTTP/1.1\r\nHost: d\r\n\r\n');
  await connection.received('remembered');
  const kept = () => answered.map((reference) => reference.deref());
  for (let turn = 0; turn < 100 && kept().some(Boolean); turn++) {
    await nextTurn();
    collectGarbage();
  }
  t.strictSame(kept(), [undefined, undefined]);
  connection.send('GET /remembered HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n');
  t.equal(parseResponses(await connection.closed).length, 2, 'the connection takes the next request');
});
