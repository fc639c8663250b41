import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { createServer, IncomingMessage } from 'node:http';
import { connect as connectTcp, Socket } from 'node:net';
import { join } from 'node:path';
import { connect } from 'node:tls';
import type { Plugin } from '@hapi/hapi';
import Joi from 'joi';
import { pino } from 'pino';
import t, { type Test } from 'tap';
import { createConnectionPlaces, placesFor } from '../../src/http/connection-places.ts';
import { readCertificate } from '../../src/http/tls.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import {
  connectRaw,
  followRaw,
  type HttpTestOptions,
  heldResource,
  PATIENT,
  parseResponses,
  type RawConnection,
  rawRequest,
  startHttp,
} from '../helpers/http.ts';
import type { TestStore } from '../helpers/store.ts';

/** More than the kernel buffers for a client that reads nothing. */
const LARGE_BYTES = 32 * 1024 * 1024;

/** GET and POST /open, GET /large, and with a key GET /open-for-keys and /large-for-keys answer at once. */
const open: Plugin<void> = {
  name: 'open',
  register(server) {
    server.route({ method: 'GET', path: '/open', options: { auth: false }, handler: () => ({ open: true }) });
    server.route({
      method: 'POST',
      path: '/open',
      options: { auth: false, plugins: { input: { payload: Joi.any() } } },
      handler: () => ({ open: true }),
    });
    server.route({
      method: 'GET',
      path: '/large',
      options: { auth: false },
      handler: () => 'x'.repeat(LARGE_BYTES),
    });
    server.route({ method: 'GET', path: '/open-for-keys', handler: () => ({ open: true }) });
    server.route({ method: 'GET', path: '/large-for-keys', handler: () => 'x'.repeat(LARGE_BYTES) });
  },
};

const GET = 'GET /open HTTP/1.1\r\nHost: d\r\n\r\n';
/** With its body still to come: `10`. */
const POST =
  'POST /open HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n';

const GET_LARGE = GET.replace('/open', '/large');

async function getWithKey(store: TestStore, path: '/open-for-keys' | '/large-for-keys'): Promise<string> {
  const { secret } = await store.key();
  return GET.replace('/open', path).replace('\r\n\r\n', `\r\nAuthorization: Bearer ${secret}\r\n\r\n`);
}

/** The same request, after which the connection is closed. */
const closing = (request: string) => request.replace('\r\n\r\n', '\r\nConnection: close\r\n\r\n');

/** What a request is answered on a new connection. */
async function statusOn({ send, closed }: RawConnection): Promise<number | undefined> {
  send(closing(GET));
  return parseResponses(await closed)[0]?.status;
}

/** A server with two places, and the connections that have them, the first one idle for longer. */
async function startWithBothIdle(t: Test) {
  const { port } = await startHttp(t, { resources: () => [open], maxConnections: 2 });
  const first = await connectRaw(port);
  const second = await connectRaw(port);
  for (const { send, received } of [first, second]) {
    send(GET);
    await received('open');
  }
  return { port, first, second };
}

t.test('places depend on the open files allowed', async (t) => {
  t.equal(placesFor(Number.POSITIVE_INFINITY), 4_096);
  t.equal(placesFor(10_000), 4_096);
  t.equal(placesFor(512), 240, 'and 15 connections more have half of the files');
});

t.test('a request on a new connection closes the one that has been idle for the longest time', async (t) => {
  const { port, first, second } = await startWithBothIdle(t);
  first.send(GET.replace('/open', '/none'));
  await first.received('not_found');
  const third = await connectRaw(port);
  third.send(GET);
  t.match(await third.received('open'), /^HTTP\/1\.1 200 /);
  t.equal(parseResponses(await second.closed).length, 1);
  first.send(closing(GET.replace('/open', '/none')));
  t.equal(parseResponses(await first.closed).length, 3);
});

t.test('a request is answered 503 while others are carried out on all connections', async (t) => {
  const effects = fakeEffects();
  const { plugin, heldCount, release } = heldResource();
  const { port } = await startHttp(t, { effects, resources: () => [plugin, open], maxConnections: 2 });
  const held = [await connectRaw(port), await connectRaw(port)];
  // What was answered before makes no difference.
  for (const { send } of held) send(GET + GET.replace('/open', '/held'));
  for (const { received } of held) await received('open');
  await until(() => heldCount() === 2);
  for (const _ of ['look', 'look again']) {
    effects.advance(60_000);
    t.match(parseResponses(await rawRequest(port, GET)), [
      { status: 503, headers: { 'retry-after': '1', connection: 'close' }, body: /unavailable/ },
    ]);
  }
  release();
  for (const { received } of held) t.match(await received('held'), /^HTTP\/1\.1 200 /);
});

t.test('a body that does not end gives way to others, but not within its first second', async (t) => {
  const effects = fakeEffects();
  const { plugin, heldCount, release } = heldResource();
  const { port } = await startHttp(t, { effects, resources: () => [plugin, open], maxConnections: 2 });
  const held = await connectRaw(port);
  held.send(GET.replace('/open', '/held'));
  await until(() => heldCount() === 1);
  const slow = await connectRaw(port);
  slow.send(GET + POST); // a request that was answered before makes no difference
  await slow.received('100 Continue');
  slow.send('1');
  effects.advance(999);
  t.match(parseResponses(await rawRequest(port, GET)), [{ status: 503 }]);
  effects.advance(99);
  t.match(
    parseResponses(await rawRequest(port, GET)),
    [{ status: 503 }],
    'it is not looked for again so soon',
  );
  effects.advance(1);
  const next = await connectRaw(port);
  next.send(GET);
  t.match(await next.received('open'), /^HTTP\/1\.1 200 /);
  t.notMatch(await slow.closed, /open.*open/s);
  release();
  t.match(await held.received('held'), /^HTTP\/1\.1 200 /);
});

t.test(
  'an answer of which nothing is taken gives way to others, but not one that is being read',
  async (t) => {
    const effects = fakeEffects();
    const { port, store } = await startHttp(t, { effects, resources: () => [open], maxConnections: 2 });
    const [read, unread] = [await connectRaw(port), await connectRaw(port)];
    const request = closing(await getWithKey(store, '/large-for-keys'));
    for (const { send, received, socket } of [read, unread]) {
      send(request);
      await received('HTTP/1.1 200');
      socket.pause();
    }
    const statusAfter = async (ms: number) => {
      effects.advance(ms);
      return statusOn(await connectRaw(port));
    };
    t.equal(await statusAfter(1_000), 503);
    effects.advance(5_000);
    read.socket.resume();
    await until(() => read.socket.bytesRead > LARGE_BYTES / 2);
    read.socket.pause();
    t.equal(await statusAfter(4_900), 503);
    t.equal(await statusAfter(200), 200);
    const [all, part] = await Promise.all(
      [read, unread].map(({ socket, closed }) => socket.resume() && closed),
    );
    t.ok((all ?? '').length > LARGE_BYTES);
    t.ok((part ?? '').length < LARGE_BYTES);
  },
);

t.test(
  'an answer to a stranger gives way after a second, whatever the stranger takes of it or sends behind it',
  async (t) => {
    const effects = fakeEffects();
    const { port, server } = await startHttp(t, { effects, resources: () => [open], maxConnections: 1 });
    const stranger = await connectRaw(port);
    stranger.send(GET_LARGE);
    await stranger.received('HTTP/1.1 200');
    stranger.socket.pause();
    effects.advance(999);
    t.equal(await statusOn(await connectRaw(port)), 503);
    stranger.socket.resume();
    await until(() => stranger.socket.bytesRead > LARGE_BYTES / 2);
    stranger.socket.pause();
    const began = once(server.listener, 'request');
    stranger.send(closing(GET));
    await began;
    effects.advance(100);
    t.equal(await statusOn(await connectRaw(port)), 200);
    stranger.socket.resume();
    t.ok((await stranger.closed).length < LARGE_BYTES);
  },
);

t.test(
  'strangers have a second for their bodies, too, from the first one of a connection, not for each of them',
  async (t) => {
    const effects = fakeEffects();
    const { port } = await startHttp(t, { effects, resources: () => [open], maxConnections: 1 });
    const stranger = await connectRaw(port);
    stranger.send(POST);
    await stranger.received('100 Continue');
    effects.advance(999);
    stranger.send('10');
    await stranger.received('open');
    stranger.send(POST);
    await stranger.received('}HTTP/1.1 100 Continue');
    t.equal(await statusOn(await connectRaw(port)), 503);
    effects.advance(100);
    t.equal(await statusOn(await connectRaw(port)), 200);
  },
);

t.test('one that is idle gives way before one that is slow', async (t) => {
  const effects = fakeEffects();
  const { port } = await startHttp(t, { effects, resources: () => [open], maxConnections: 2 });
  const slow = await connectRaw(port);
  slow.send(POST);
  await slow.received('100 Continue');
  effects.advance(60_000);
  const idle = await connectRaw(port);
  idle.send(GET);
  await idle.received('open');
  t.match(parseResponses(await rawRequest(port, closing(GET))), [{ status: 200 }]);
  await idle.closed;
  slow.send('10');
  t.match(await slow.received('open'), /HTTP\/1\.1 200 /);
});

t.test('a body gives way a second after it began, whatever came before it on its connection', async (t) => {
  const effects = fakeEffects();
  const { plugin, heldCount, release } = heldResource();
  const { port, server, store } = await startHttp(t, {
    effects,
    resources: () => [plugin, open],
    maxConnections: 1,
  });
  const pipelining = await connectRaw(port);
  pipelining.send(await getWithKey(store, '/open-for-keys'));
  await pipelining.received('open');
  pipelining.send(GET.replace('/open', '/held'));
  await until(() => heldCount() === 1);
  effects.advance(60_000);
  const began = once(server.listener, 'request');
  pipelining.send(closing(POST.replace('Expect: 100-continue\r\n', '')));
  await began;
  effects.advance(999);
  t.match(parseResponses(await rawRequest(port, GET)), [{ status: 503 }]);
  pipelining.send('10');
  release();
  t.match(await pipelining.closed, /held.*HTTP\/1\.1 200 /s);
});

t.test(
  'a body that does not end gives way after a second, also of a client that is no stranger',
  async (t) => {
    const effects = fakeEffects();
    const { port, store } = await startHttp(t, { effects, resources: () => [open], maxConnections: 1 });
    const known = await connectRaw(port);
    known.send(await getWithKey(store, '/open-for-keys'));
    await known.received('open');
    effects.advance(60_000);
    known.send(POST);
    await known.received('100 Continue');
    effects.advance(999);
    t.equal(await statusOn(await connectRaw(port)), 503);
    effects.advance(100);
    t.equal(await statusOn(await connectRaw(port)), 200);
  },
);

t.test('those that were refused, and send a body for ever, keep nobody out', async (t) => {
  const effects = fakeEffects();
  const { port, server } = await startHttp(t, { effects, resources: () => [open], maxConnections: 16 });
  const slow: RawConnection[] = [];
  for (let count = 0; count < 16; count++) {
    const connection = await connectRaw(port);
    connection.send(POST);
    await connection.received('100 Continue');
    slow.push(connection);
  }
  const accepted = once(server.listener, 'connection');
  const refused = await connectRaw(port);
  const [connection] = (await accepted) as [Socket];
  refused.send(POST.replace('Expect: 100-continue\r\n', ''));
  await refused.received('unavailable');
  const { bytesRead } = connection;
  refused.send('1');
  await until(() => connection.bytesRead > bytesRead); // a byte left unread would turn the close into a reset
  effects.advance(1_000);
  t.match(parseResponses(await rawRequest(port, closing(GET))), [{ status: 200 }]);
  t.match(parseResponses(await refused.closed), [{ status: 503 }]);
  t.match(await slow[0]?.closed, /100 Continue\r\n\r\n$/);
});

/** Connects to a listener with so many places, without a network; `request` begins one on the connection. */
function withPlaces(count: number, effects = fakeEffects()) {
  const listener = createServer();
  const places = createConnectionPlaces(listener, count, effects, pino({ enabled: false }));
  return () => {
    const socket = new Socket();
    listener.emit('connection', socket);
    const connection = places.of(socket);
    return { socket, request: () => connection.begin(new IncomingMessage(socket)), ...connection };
  };
}

t.test('a refused connection gets no place any more, and gives way whatever else comes on it', async (t) => {
  const connect = withPlaces(1);
  const [first, refused] = [connect(), connect()];
  first.request();
  t.equal(first.takePlace(), true);
  refused.request();
  t.equal(refused.takePlace(), false);
  refused.request();
  first.socket.destroy();
  await once(first.socket, 'close');
  t.equal(refused.takePlace(), false);
  const [next, last] = [connect(), connect()];
  t.strictSame(
    [refused, next, last].map(({ socket }) => socket.destroyed),
    [true, false, false],
  );
});

t.test('a connection that was closed before its request is carried out keeps no place', async (t) => {
  const connect = withPlaces(1);
  const gone = connect();
  gone.request();
  gone.socket.destroy();
  await once(gone.socket, 'close');
  gone.takePlace();
  gone.request();
  const next = connect();
  next.request();
  t.equal(next.takePlace(), true);
});

t.test('a connection that gave way does not do so again in place of one that is there', (t) => {
  const effects = fakeEffects();
  const connect = withPlaces(1, effects);
  const first = connect();
  first.request();
  first.takePlace();
  first.rest();
  const second = connect();
  second.request();
  t.equal(second.takePlace(), true);
  t.equal(first.socket.destroyed, true);
  first.request(); // it had been read already
  second.rest();
  second.request();
  effects.advance(1_000);
  const third = connect();
  third.request();
  t.equal(third.takePlace(), true);
  t.equal(second.socket.destroyed, true);
  t.end();
});

t.test('the oldest request of a connection counts, whatever is pipelined behind it', (t) => {
  const effects = fakeEffects();
  const connect = withPlaces(2, effects);
  const [pipelining, later] = [connect(), connect()];
  for (const { request, takePlace } of [pipelining, later]) {
    request();
    takePlace();
  }
  pipelining.request();
  effects.advance(1_000);
  const next = connect();
  next.request();
  t.equal(next.takePlace(), true);
  t.strictSame(
    [pipelining, later].map(({ socket }) => socket.destroyed),
    [true, false],
  );
  t.end();
});

t.test('a stop lets clients take the answers that davit has given before', async (t) => {
  const { port, server } = await startHttp(t, { resources: () => [open] });
  const slow = await connectRaw(port);
  slow.send(GET_LARGE);
  await slow.received('HTTP/1.1 200');
  slow.socket.pause();
  const idle = await connectRaw(port);
  idle.send(GET);
  await idle.received('open');
  const stopped = server.stop({ timeout: 60_000 });
  await idle.closed;
  slow.socket.resume();
  t.ok((await slow.closed).length > LARGE_BYTES);
  await stopped;
});

t.test('a stop does not wait for clients that do not close their idle connections', async (t) => {
  const { port, server } = await startHttp(t, { resources: () => [open] });
  const idle = await followRaw(connectTcp({ port, host: '127.0.0.1', allowHalfOpen: true }));
  t.teardown(() => idle.socket.destroy());
  idle.send(GET);
  await idle.received('open');
  await server.stop({ timeout: 600_000 });
});

t.test('connections that say nothing take no place from those that were answered', async (t) => {
  const { port, first, second } = await startWithBothIdle(t);
  const silent = await connectRaw(port);
  const next = await connectRaw(port);
  t.equal(await silent.closed, '');
  for (const { send, received } of [first, second]) {
    send(GET.replace('/open', '/none'));
    t.match(await received('not_found'), /^HTTP\/1\.1 200 /);
  }
  next.send(GET);
  t.match(await next.received('open'), /^HTTP\/1\.1 200 /, 'once it says something, it does');
  t.equal(parseResponses(await first.closed).length, 2);
});

t.test('slow clients keep nobody out, and the log tells of them once a minute', async (t) => {
  const effects = fakeEffects();
  const { port, log } = await startHttp(t, { effects, resources: () => [open], maxConnections: 16 });
  const fill = async () => {
    for (let count = 0; count < 17; count++) (await connectRaw(port)).send('GET /open HTTP/1.1\r\n');
  };
  await fill();
  t.equal(await statusOn(await connectRaw(port)), 200);
  effects.advance(0);
  const warnings = () => log.filter(({ level }) => level === 40);
  t.match(warnings(), [{ closed: 1, msg: /^connections were closed for others: / }]);
  await fill();
  t.equal(await statusOn(await connectRaw(port)), 200);
  effects.advance(59_999);
  t.equal(warnings().length, 1);
  effects.advance(1);
  t.strictSame(
    warnings().map(({ closed }) => closed),
    [1, 17],
  );
});

/** A server with TLS, and a client that trusts it. */
async function startWithTls(t: Test, options: HttpTestOptions) {
  const fixture = (name: string) => join(import.meta.dirname, '../fixtures/tls', name);
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  const http = await startHttp(t, { tls: pair, resources: () => [open], maxConnections: 2, ...options });
  const ca = readFileSync(fixture('ca.pem'));
  const connectTls = () =>
    followRaw(connect({ port: http.port, host: '127.0.0.1', servername: 'localhost', ca }));
  return { ...http, connectTls };
}

t.test('over TLS, clients that never say hello keep nobody out, and idle ones give way', async (t) => {
  const { port, connectTls } = await startWithTls(t, {});
  const silent = [await connectRaw(port), await connectRaw(port), await connectRaw(port)];
  const clients = [await connectTls(), await connectTls(), await connectTls()];
  for (const { send, received } of clients) {
    send(GET);
    t.match(await received('open'), /^HTTP\/1\.1 200 /);
  }
  for (const { closed } of silent) t.equal(await closed, '');
  t.equal(parseResponses((await clients[0]?.closed) ?? '').length, 1);
  for (const { socket } of clients) socket.destroy();
});

t.test('over TLS, slow clients give way', async (t) => {
  const effects = fakeEffects();
  const { connectTls, store } = await startWithTls(t, { effects });
  const [sending, reading] = [await connectTls(), await connectTls()];
  sending.send(POST);
  await sending.received('100 Continue');
  reading.send(await getWithKey(store, '/large-for-keys'));
  await reading.received('HTTP/1.1 200');
  reading.socket.pause();
  const statusAfter = async (ms: number) => {
    effects.advance(ms);
    return statusOn(await connectTls());
  };
  t.equal(await statusAfter(1_000), 200);
  await sending.closed;
  for (const ms of [1_000, 10_000]) {
    const next = await connectTls();
    next.send(POST);
    await next.received('100 Continue');
    t.equal(await statusAfter(ms), 200);
    if (ms === 1_000) await next.closed;
    else next.socket.destroy();
  }
  reading.socket.resume();
  t.ok((await reading.closed).length < LARGE_BYTES);
});

t.test('over TLS, a stop does not wait for clients that never say hello', async (t) => {
  const { port, server } = await startWithTls(t, { timeouts: PATIENT });
  const silent = await connectRaw(port);
  await server.stop({ timeout: 600_000 });
  t.equal(await silent.closed, '');
});
