import { once } from 'node:events';
import type { IncomingMessage } from 'node:http';
import type { Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Plugin } from '@hapi/hapi';
import Joi from 'joi';
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
  const { port, log } = await startHttp(t, { resources: () => [open, plugin], pipelinedMax: 2 });
  const get = 'GET /held HTTP/1.1\r\nHost: d\r\n\r\n';
  const [first, second] = [await connectRaw(port), await connectRaw(port)];
  for (const { send, received } of [first, second]) {
    send(`GET /open HTTP/1.1\r\nHost: d\r\n\r\n${get}`);
    await received('open'); // the request behind it counts on
  }
  await until(() => heldCount() === 2);
  const refused = await connectRaw(port);
  refused.send(get.repeat(3));
  const alone = await connectRaw(port);
  alone.send(get);
  await until(() => heldCount() === 4); // the first of each of the two
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

t.test('pipelined requests take turns with what else there is to do', async (t) => {
  const { promise: done, resolve } = Promise.withResolvers<void>();
  const turns: number[] = [];
  let turn = 0;
  const counting: Plugin<void> = {
    name: 'counting',
    register(server) {
      server.route({
        method: 'GET',
        path: '/counted',
        options: { auth: false },
        handler() {
          if (turns.push(turn) === 200) resolve();
          return { counted: true };
        },
      });
    },
  };
  const { port, log } = await startHttp(t, { resources: () => [counting] });
  const clients = [await connectRaw(port), await connectRaw(port)];
  const get = `GET /counted HTTP/1.1\r\nHost: d\r\nX-Long: ${'x'.repeat(200)}\r\n\r\n`;
  for (const { send } of clients) send(get.repeat(100));
  let ended = false;
  void done.then(() => (ended = true));
  for (; !ended; turn++) await nextTurn();
  const most = Math.max(...turns.map((one) => turns.filter((other) => other === one).length));
  t.ok(most <= 2 * 16 + clients.length, `${most} of 200 in one turn`);
  for (const { received, socket } of clients) {
    t.equal(parseResponses(await received('d')).at(0)?.status, 200);
    socket.destroy();
  }
  t.strictSame(
    log.filter(({ status }) => status !== 200 && status !== undefined),
    [],
  );
});

t.test(
  'the body of a pipelined request that waits for its turn is kept, unless it is in tiny pieces',
  async (t) => {
    const bodies: unknown[] = [];
    const reading: Plugin<void> = {
      name: 'reading',
      register(server) {
        server.route({
          method: 'POST',
          path: '/read',
          options: { auth: false, plugins: { input: { payload: Joi.any() } } },
          handler({ payload }) {
            bodies.push(payload);
            return { read: true };
          },
        });
      },
    };
    const { port } = await startHttp(t, { resources: () => [open, reading] });
    const get = 'GET /open HTTP/1.1\r\nHost: d\r\n\r\n';
    const post = (pieces: string[]) =>
      `POST /read HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n${pieces
        .map((piece) => `${piece.length.toString(16)}\r\n${piece}\r\n`)
        .join('')}0\r\n\r\n`;
    const long = 'b'.repeat(40);
    const inPieces = ['["', ...Array<string>(100).fill(long), '"]'];
    const tiny = Array<string>(600).fill(' ');
    const client = await connectRaw(port);
    client.send(get.repeat(40) + post(['1']) + post(inPieces) + get + post(tiny));
    const statuses = parseResponses(await client.closed).map(({ status }) => status);
    t.strictSame(statuses, [...Array<number>(43).fill(200), 400]);
    t.strictSame(bodies, [1, [long.repeat(100)]]);

    const slow = await connectRaw(port);
    slow.send(get.repeat(40) + post(inPieces).slice(0, 900));
    await slow.received('open');
    slow.send(post(inPieces).slice(900));
    await slow.received('read');
    t.strictSame(bodies.at(-1), [long.repeat(100)], 'also one that is not complete at its turn');
    slow.socket.destroy();
  },
);

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
  // Not with FIN: such a client would be answered first.
  leaving.socket.resetAndDestroy();
  await until(() => socket.closed);
  const staying = await connectRaw(port);
  staying.send(`${get.repeat(2)}${get.replace('\r\n\r\n', '\r\nConnection: close\r\n\r\n')}`);
  t.strictSame(
    parseResponses(await staying.closed).map(({ status }) => status),
    [200, 200, 200],
  );
});

t.test('nor do those that waited before a CONNECT', async (t) => {
  const { plugin, heldCount, release } = heldResource();
  const { port, server } = await startHttp(t, { resources: () => [open, plugin], pipelinedMax: 2 });
  const connected = once(server.listener, 'connection');
  const leaving = await connectRaw(port);
  const [socket] = (await connected) as [Socket];
  leaving.send('GET /held HTTP/1.1\r\nHost: d\r\n\r\n'.repeat(3));
  await until(() => heldCount() === 3);
  const closed = once(socket, 'close');
  leaving.send('CONNECT d:1 HTTP/1.1\r\nHost: d\r\n\r\n');
  await leaving.received('405');
  leaving.socket.destroy();
  await closed;
  const staying = await connectRaw(port);
  const get = 'GET /open HTTP/1.1\r\nHost: d\r\n';
  staying.send(`${get}\r\n${get}\r\n${get}Connection: close\r\n\r\n`);
  t.strictSame(
    parseResponses(await staying.closed).map(({ status }) => status),
    [200, 200, 200],
  );
  const limited = await connectRaw(port);
  const held = get.replace('/open', '/held');
  limited.send(`${`${held}\r\n`.repeat(3)}${held}Connection: close\r\n\r\n`);
  await until(() => heldCount() === 6);
  release();
  t.strictSame(
    parseResponses(await limited.closed).map(({ status }) => status),
    [200, 200, 200, 503],
    'and the limit is as it was',
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
