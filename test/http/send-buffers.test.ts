import { once } from 'node:events';
import { IncomingMessage, ServerResponse } from 'node:http';
import { Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { connect as connectTls } from 'node:tls';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { Plugin } from '@hapi/hapi';
import { pino } from 'pino';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { docs } from '../../src/http/docs.ts';
import { openapi } from '../../src/http/openapi.ts';
import { createSendBufferLimit } from '../../src/http/send-buffers.ts';
import { collectGarbage } from '../../src/memory.ts';
import { until } from '../helpers/commands.ts';
import { type FakeEffects, fakeEffects } from '../helpers/effects.ts';
import {
  connectRaw,
  followRaw,
  parseResponses,
  type RawConnection,
  rawRequest,
  startHttp,
} from '../helpers/http.ts';
import { tlsFixture } from '../helpers/receiver.ts';

/** More than the kernel buffers for a client that reads nothing. */
const LARGE_BYTES = 32 * 1024 * 1024;

/** About as much as a page of 200 deployments. */
const PAGE_BYTES = 1024 * 1024;

const LOCALHOST = {
  chain: tlsFixture('localhost.pem'),
  key: tlsFixture('localhost.key'),
};

const large: Plugin<void> = {
  name: 'large',
  register(server) {
    server.route({
      method: 'GET',
      path: '/large',
      options: { auth: false },
      handler: () => 'x'.repeat(LARGE_BYTES),
    });
    server.route({ method: 'GET', path: '/own', handler: () => 'x'.repeat(LARGE_BYTES) });
    server.route({
      method: 'GET',
      path: '/page',
      options: { auth: false },
      handler: () => 'x'.repeat(PAGE_BYTES),
    });
  },
};

/** `key`: none for a stranger. */
function getLarge(key?: string): string {
  const [path, authorization] =
    key === undefined ? ['/large', ''] : ['/own', `Authorization: Bearer ${key}\r\n`];
  return `GET ${path} HTTP/1.1\r\nHost: d\r\n${authorization}Connection: close\r\n\r\n`;
}

t.test('beyond the limit of unread answers the oldest is cut off; the others arrive whole', async (t) => {
  const { port, log } = await startHttp(t, {
    resources: () => [large],
    sendBufferMaxBytes: 2 * LARGE_BYTES,
  });
  for (const times of [1, 2]) {
    const [oldest, second, third] = [await asked(port), await asked(port), await asked(port)];
    const warnings = log.filter(({ msg }) => /cut off/.test(String(msg)));
    t.match(warnings, Array(times).fill({ level: 40 }), 'the three together exceed the limit');
    const [received, ...others] = await Promise.all([oldest, second, third].map(taken));
    t.ok((received ?? '').length < LARGE_BYTES);
    for (const whole of others) t.ok(whole.endsWith('x'.repeat(LARGE_BYTES)));
  }
});

t.test('the oldest of the key that holds the most is cut off, and strangers count as one', async (t) => {
  const { port, store } = await startHttp(t, {
    effects: fakeEffects(), // with a clock that stands, none has taken nothing for long
    resources: () => [large],
    sendBufferMaxBytes: 3 * LARGE_BYTES,
  });
  const { secret: greedy } = await store.key();
  const { secret: modest } = await store.key();
  for (const [few, many] of [
    [modest, greedy],
    [modest, undefined],
    [undefined, greedy],
  ]) {
    const first = await asked(port, few);
    const oldestOfMany = await asked(port, many);
    const others = [first, await asked(port, many), await asked(port, many)];
    t.ok((await taken(oldestOfMany)).length < LARGE_BYTES);
    for (const whole of await Promise.all(others.map(taken))) t.ok(whole.endsWith('x'.repeat(LARGE_BYTES)));
  }
});

t.test(
  'whose client has read nothing for seconds is cut off first, however little its key holds',
  async (t) => {
    const effects = fakeEffects();
    const { port, store } = await startHttp(t, {
      effects,
      resources: () => [large],
      sendBufferMaxBytes: 4 * LARGE_BYTES,
    });
    const { secret: hoarder } = await store.key();
    const { secret: other } = await store.key();
    const { secret: reader } = await store.key();
    const unread = [await asked(port, hoarder), await asked(port, other)];
    await untilKernelIsFull(effects);
    const oldestRead = await asked(port, reader);
    const read = [await asked(port, reader), await asked(port, reader), await asked(port, reader)];
    for (const cut of unread) t.ok((await taken(cut)).length < LARGE_BYTES);
    read.push(await asked(port, reader));
    t.ok((await taken(oldestRead)).length < LARGE_BYTES, 'of those that read');
    for (const whole of await Promise.all(read.map(taken))) t.ok(whole.endsWith('x'.repeat(LARGE_BYTES)));
  },
);

t.test(
  'of those that seem not to read, over TLS too, the oldest that still does not is cut off',
  async (t) => {
    const effects = fakeEffects();
    const { port, store } = await startHttp(t, {
      effects,
      resources: () => [large],
      sendBufferMaxBytes: 3 * LARGE_BYTES,
      tls: LOCALHOST,
    });
    const { secret } = await store.key();
    const askedOne = async (key?: string) => {
      const socket = connectTls({ port, host: '127.0.0.1', rejectUnauthorized: false });
      const connection = await asked(port, key, followRaw(socket));
      effects.advance(1); // the next one is later
      return connection;
    };
    const [patient, unread, younger] = [await askedOne(secret), await askedOne(), await askedOne(secret)];
    await untilKernelIsFull(effects);
    const readOn = patient.received('x'.repeat(LARGE_BYTES / 2));
    patient.socket.resume();
    await readOn;
    patient.socket.pause();
    const latest = await askedOne(secret);
    t.ok((await taken(unread)).length < LARGE_BYTES);
    for (const whole of await Promise.all([patient, younger, latest].map(taken)))
      t.ok(whole.endsWith('x'.repeat(LARGE_BYTES)));
  },
);

t.test('unread answers to one client are cut off, too, when they exceed the limit', async (t) => {
  const { port, log } = await startHttp(t, { resources: () => [large], sendBufferMaxBytes: LARGE_BYTES });
  const connection = await connectRaw(port);
  connection.socket.pause();
  connection.send('GET /page HTTP/1.1\r\nHost: d\r\n\r\n'.repeat((2 * LARGE_BYTES) / PAGE_BYTES));
  await until(() => log.some(({ msg }) => /cut off/.test(String(msg))));
  t.ok((await taken(connection)).length < 2 * LARGE_BYTES);
});

t.test('for a large answer as many are cut off as it needs, and small ones do not count', async (t) => {
  const hold = createSendBufferLimit(fakeEffects(), pino({ level: 'silent' }), 100 * 1024);
  const held = (kibibytes: number) => {
    const socket = new Socket();
    const res = new ServerResponse(new IncomingMessage(socket));
    hold({ raw: { res }, auth: {}, response: { source: 'x'.repeat(kibibytes * 1024) } } as never);
    return socket;
  };
  const sockets = [15, 15, 15, 40, 40, 90].map(held);
  t.strictSame(
    sockets.map(({ destroyed }) => destroyed),
    [false, false, false, true, true, false],
  );
});

t.test('an answer that was read no longer counts, and a single one is never cut off', async (t) => {
  const { port, log } = await startHttp(t, { resources: () => [large], sendBufferMaxBytes: LARGE_BYTES - 1 });
  for (let times = 0; times < 3; times++) {
    t.ok((await taken(await asked(port))).endsWith('x'.repeat(LARGE_BYTES)));
  }
  t.notMatch(JSON.stringify(log), /cut off/);
});

t.test('unread descriptions of the API take no memory of their own, but over TLS', async (t) => {
  const options = { resources: () => [openapi(), docs()], sendBufferMaxBytes: 1 };
  const { port } = await startHttp(t, options);
  for (const path of ['/docs', '/v2/openapi.json']) {
    const answers = parseResponses(await rawRequest(port, threeTimes(path)));
    t.strictSame(
      answers.map(({ status, body }) => [status, body.length > 16 * 1024]),
      Array(3).fill([200, true]),
    );
  }
  const { port: tlsPort, log } = await startHttp(t, { ...options, tls: LOCALHOST });
  const client = connectTls({ port: tlsPort, host: '127.0.0.1', rejectUnauthorized: false });
  client.on('error', () => undefined).end(threeTimes('/docs'));
  await once(client.resume(), 'close');
  t.match(JSON.stringify(log), /cut off/);
});

function threeTimes(path: string): string {
  const request = `GET ${path} HTTP/1.1\r\nHost: d\r\n`;
  return `${request}\r\n${request}\r\n${request}Connection: close\r\n\r\n`;
}

setFlagsFromString('--expose-gc');
const collect: NodeJS.GCFunction = runInNewContext('gc');

t.test('answers that were read are freed by minor garbage collections', async (t) => {
  const hold = createSendBufferLimit(realEffects, pino({ level: 'silent' }));
  const source = 'x'.repeat(PAGE_BYTES);
  const roundOfAnswers = () => {
    const answers = Array.from({ length: 8 }, () =>
      Object.assign(new ServerResponse(new IncomingMessage(new Socket())), { ballast: Array(2_000).fill(0) }),
    );
    for (const answer of answers) hold({ raw: { res: answer }, auth: {}, response: { source } } as never);
    for (const answer of answers) answer.emit('close');
  };
  roundOfAnswers();
  collectGarbage();
  const before = process.memoryUsage().heapUsed;
  for (let round = 0; round < 200; round++) {
    roundOfAnswers();
    collect({ type: 'minor' });
  }
  const grownBytes = process.memoryUsage().heapUsed - before;
  t.ok(grownBytes < 5e6, `${grownBytes} of the ${200 * 8 * 2_000 * 8} that they took`);
});

/** Until the kernel has taken what it takes of answers that nobody reads, and two looks have seen that. */
async function untilKernelIsFull(effects: FakeEffects): Promise<void> {
  for (let turn = 0; turn < 50; turn++) {
    effects.advance(5_000);
    await nextTurn();
  }
}

/** A client that has read the beginning of its answer, and paused. */
async function asked(port: number, key?: string, connected = connectRaw(port)): Promise<RawConnection> {
  const connection = await connected;
  connection.send(getLarge(key));
  await once(connection.socket, 'data');
  connection.socket.pause();
  return connection;
}

/** Reads on; gives all that the client received. */
function taken({ socket, closed }: RawConnection): Promise<string> {
  socket.resume();
  return closed;
}
