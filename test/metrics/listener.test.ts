import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import { once } from 'node:events';
import type { IncomingMessage, Server } from 'node:http';
import { connect, type Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { pino } from 'pino';
import t, { type Test } from 'tap';
import { startMetricsListener } from '../../src/metrics/listener.ts';
import { until } from '../helpers/commands.ts';
import { connectRaw, type RawConnection, rawRequest } from '../helpers/http.ts';
import { keptLog } from '../helpers/kept-log.ts';

const LOOPBACK = { host: '127.0.0.1', port: 0 };

t.test('the listener serves GET and HEAD of /metrics, and nothing else', async (t) => {
  const { url, port, scrapes } = await listener(t);
  const rows: [method: string, path: string, status: number][] = [
    ['GET', '/metrics', 200],
    ['GET', '/metrics?name=a', 200],
    ['HEAD', '/metrics', 200],
    ['POST', '/metrics', 405],
    ['PUT', '/metrics', 405],
    ['DELETE', '/metrics', 405],
    ['OPTIONS', '/metrics', 405],
    ['GET', '/', 404],
    ['GET', '/metrics/', 404],
    ['GET', '/Metrics', 404],
    ['GET', '//metrics', 404],
    ['GET', '/%6detrics', 404],
    ['POST', '/', 404],
    ['GET', '/healthz', 404],
    ['GET', '/v2/projects', 404],
  ];
  for (const [method, path, status] of rows) {
    const response = await fetch(`${url}${path}`, { method });
    const text = await response.text();
    t.equal(response.status, status, `${method} ${path}`);
    t.equal(response.headers.get('allow'), status === 405 ? 'GET, HEAD' : null);
    t.equal(response.headers.get('cache-control'), 'no-store');
    t.equal(response.headers.get('x-content-type-options'), 'nosniff');
    if (status !== 200) continue;
    t.equal(response.headers.get('content-type'), 'text/plain; version=0.0.4; charset=utf-8');
    t.equal(text, method === 'HEAD' ? '' : 'davit_x 1\n');
  }
  t.equal(scrapes.length, 2, 'metrics are gathered for GET only');
  t.match(await rawRequest(port, 'CONNECT /metrics HTTP/1.1\r\nHost: d\r\n\r\n'), /^$/);
  t.match(await rawRequest(port, 'nonsense\r\n\r\n'), /^HTTP\/1\.1 400 /);
});

t.test('a request is answered without waiting for its body', async (t) => {
  const { port } = await listener(t);
  const endless = 'POST /metrics HTTP/1.1\r\nHost: d\r\nContent-Length: 1000000000\r\n\r\nbeginning';
  t.match(await rawRequest(port, endless), /^HTTP\/1\.1 405 /);
});

t.test('the body of a request that waits for its answer is not kept', async (t) => {
  const { promise, resolve } = Promise.withResolvers<string>();
  const { port } = await listener(t, () => promise);
  const requests: IncomingMessage[] = [];
  const note = (message: unknown) => requests.push((message as { request: IncomingMessage }).request);
  subscribe('http.server.request.start', note);
  t.teardown(() => unsubscribe('http.server.request.start', note));
  const connection = await connectRaw(port);
  const rest = ` /metrics HTTP/1.1\r\nHost: d\r\nTransfer-Encoding: chunked\r\n\r\n${'1\r\n \r\n'.repeat(100)}0\r\n\r\n`;
  for (const method of ['GET', ...Array<string>(98).fill('PUT')]) connection.send(`${method}${rest}`);
  await until(() => requests.length === 99 && requests.every(({ complete }) => complete));
  t.equal(requests.filter(({ readableLength }) => readableLength > 0).length, 0);
  resolve('davit_x 1\n');
  t.match(await connection.received('HTTP/1.1 405 '), /^HTTP\/1\.1 200 .*davit_x 1\nHTTP\/1\.1 405 /s);
  connection.socket.destroy();
});

t.test('the cause of a failed scrape is logged, and not in the answer', async (t) => {
  const { url, log } = await listener(t, async () => {
    throw new Error('the inside');
  });
  const response = await fetch(`${url}/metrics`);
  t.equal(response.status, 500);
  t.equal(await response.text(), 'the metrics could not be read: see the log\n');
  t.match(log, [{ level: 50, msg: 'the metrics could not be read', err: { message: 'the inside' } }]);
});

t.test('a request whose headers do not arrive in time is answered 408', async (t) => {
  const { port } = await listener(t, undefined, { headersTimeout: 20, connectionsCheckingInterval: 10 });
  t.match(await rawRequest(port, 'GET /metrics HTTP/1.1\r\nHo'), /^HTTP\/1\.1 408 /);
});

t.test('headers may have 8 KiB', async (t) => {
  const { port } = await listener(t);
  for (const [name, status] of [
    ['x'.repeat(8_000), 200],
    ['x'.repeat(8_200), 431],
  ] as const) {
    const client = await connectRaw(port);
    client.send(`GET /metrics HTTP/1.1\r\nHost: d\r\n${name}: 1\r\n\r\n`);
    t.match(await client.received('\r\n\r\n'), new RegExp(`^HTTP/1\\.1 ${status} `));
    client.socket.destroy();
  }
});

t.test('connections have timeouts, and are kept open from one scrape in a minute to the next', async (t) => {
  t.match(await serverOf(await listener(t)), {
    headersTimeout: 5_000,
    requestTimeout: 10_000,
    keepAliveTimeout: 65_000,
    timeout: 30_000,
  });
});

t.test('a connection that cannot be accepted is logged, and others are served', async (t) => {
  const metrics = await listener(t);
  (await serverOf(metrics)).emit('error', new Error('accept ENFILE'));
  t.match(metrics.log, [
    { level: 40, msg: 'the listener for metrics failed, and tries again', err: { message: 'accept ENFILE' } },
  ]);
  t.equal((await fetch(`${metrics.url}/metrics`)).status, 200);
});

t.test('a connection beyond 32 is closed, and the others are served', async (t) => {
  const { port } = await listener(t);
  const open: RawConnection[] = [];
  for (let made = 0; made < 32; made++) open.push(await connectRaw(port));
  const oneMore = connect({ host: '127.0.0.1', port });
  await once(oneMore, 'close');
  open[0]?.send('GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n');
  await open[0]?.received('davit_x 1');
  for (const { socket } of open) socket.destroy();
});

t.test('idle connections keep no other out, and do not end scrapes under way', async (t) => {
  const { promise, resolve } = Promise.withResolvers<string>();
  const { port, scrapes } = await listener(t, async () => (scrapes.length === 3 ? promise : 'davit_x 1\n'));
  const get = 'GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n';
  const scraping = await connectRaw(port);
  scraping.send(get);
  await scraping.received('davit_x 1');
  const second = scraping.received('davit_x 1');
  scraping.send(get.repeat(2));
  await second;
  await until(() => scrapes.length === 3);
  const others: RawConnection[] = [];
  for (let made = 0; made < 32; made++) {
    const other = await connectRaw(port);
    other.send(get);
    t.match(await other.received('davit_x 1'), /^HTTP\/1\.1 200 /);
    others.push(other);
  }
  t.match(await others[0]?.closed, /davit_x 1/);
  resolve('davit_x 2\n');
  t.match(await scraping.received('davit_x 2'), /^HTTP\/1\.1 200 /);
  for (const { socket } of [scraping, ...others]) socket.destroy();
});

t.test('an idle connection that its client has closed is not closed again in place of another', async (t) => {
  const metrics = await listener(t);
  const get = 'GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n';
  const idle = async () => {
    const connection = await connectRaw(metrics.port);
    connection.send(get);
    await connection.received('davit_x 1');
    return connection;
  };
  const accepted = once(await serverOf(metrics), 'connection');
  const gone = await idle();
  const [socket] = (await accepted) as [Socket];
  gone.socket.destroy();
  await once(socket, 'close');
  const others: RawConnection[] = [];
  for (let made = 0; made < 33; made++) others.push(await idle());
  t.match(await others[0]?.closed, /davit_x 1/);
  for (const { socket } of others) socket.destroy();
});

t.test('connections keep no other out that were all open before the first was idle', async (t) => {
  const { port } = await listener(t);
  const get = 'GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n';
  const others: RawConnection[] = [];
  for (let made = 0; made < 32; made++) others.push(await connectRaw(port));
  for (const other of others) {
    other.send(get);
    await other.received('davit_x 1');
  }
  const oneMore = await connectRaw(port);
  oneMore.send(get);
  t.match(await oneMore.received('davit_x 1'), /^HTTP\/1\.1 200 /);
  t.match(await others[0]?.closed, /davit_x 1/);
  for (const { socket } of [oneMore, ...others]) socket.destroy();
});

t.test('an answer that its client is slow to read is not cut off for another connection', async (t) => {
  const text = 'davit_x 1\n'.repeat(2_000_000); // more than the system buffers
  const { port } = await listener(t, async () => text);
  const slow = await connectRaw(port);
  slow.send('GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n');
  await slow.received('davit_x 1');
  slow.socket.pause();
  const others: RawConnection[] = [];
  for (let made = 0; made < 31; made++) others.push(await connectRaw(port));
  const oneMore = await connectRaw(port);
  await oneMore.closed;
  slow.socket.resume();
  slow.socket.end();
  t.equal((await slow.closed).split('\r\n\r\n')[1]?.length, text.length);
  for (const { socket } of others) socket.destroy();
});

t.test(
  'a connection is closed after the answer to its hundredth request; what is behind is ignored',
  async (t) => {
    const { port, scrapes } = await listener(t);
    const connection = await connectRaw(port);
    connection.send('GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n'.repeat(150));
    const answers = await connection.closed;
    t.equal(scrapes.length, 100);
    const heads = answers.split('davit_x 1\n').slice(0, -1);
    t.equal(heads.length, 100);
    t.strictSame(
      heads.map((head) => /Connection: close/i.test(head)),
      [...Array.from({ length: 99 }, () => false), true],
    );
  },
);

t.test('a client that ends its side behind its request is answered', async (t) => {
  const { promise, resolve } = Promise.withResolvers<string>();
  const { port, scrapes } = await listener(t, () => promise);
  const client = await connectRaw(port);
  client.socket.end('GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n');
  await until(() => scrapes.length === 1);
  await nextTurn();
  resolve('davit_x 2\n');
  t.match(await client.closed, /davit_x 2\n$/);
});

t.test('closing the listener cuts off scrapes under way', async (t) => {
  const { promise, resolve } = Promise.withResolvers<string>();
  const { url, close, scrapes, log } = await listener(t, () => promise);
  const waiting = fetch(`${url}/metrics`);
  await until(() => scrapes.length === 1);
  await Promise.all([t.rejects(waiting), close()]);
  resolve('too late\n');
  await promise;
  await t.rejects(fetch(`${url}/metrics`));
  t.strictSame(log, []);
});

t.test('an error about an address in use names --metrics-listen', async (t) => {
  const { port } = await listener(t);
  await t.rejects(
    startMetricsListener({ host: '127.0.0.1', port }, async () => '', pino({ level: 'silent' })),
    {
      code: 'unavailable',
      message: `cannot listen on 127.0.0.1:${port} (EADDRINUSE): choose another place with --metrics-listen`,
    },
  );
});

/** The server behind a listener: Node tells it with each request. */
async function serverOf({ url }: { url: string }): Promise<Server> {
  const { promise, resolve } = Promise.withResolvers<Server>();
  const note = (message: unknown) => resolve((message as { server: Server }).server);
  subscribe('http.server.request.start', note);
  await fetch(url);
  unsubscribe('http.server.request.start', note);
  return promise;
}

async function listener(
  t: Test,
  scrape: () => Promise<string> = async () => 'davit_x 1\n',
  timeouts: Parameters<typeof startMetricsListener>[3] = {},
) {
  const scrapes: string[] = [];
  const { logger, lines: log } = keptLog({ base: null });
  const counted = () => {
    scrapes.push('scrape');
    return scrape();
  };
  const { port, close } = await startMetricsListener(LOOPBACK, counted, logger, timeouts);
  let closed: Promise<void> | undefined;
  const closeOnce = () => {
    closed ??= close();
    return closed;
  };
  t.teardown(closeOnce);
  return { port, url: `http://127.0.0.1:${port}`, log, scrapes, close: closeOnce };
}
