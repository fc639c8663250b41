import { once } from 'node:events';
import type { Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { Worker } from 'node:worker_threads';
import t, { type Test } from 'tap';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { heldResource, startHttp } from '../helpers/http.ts';

const OK = 'HTTP/1.1 200 OK';

t.test('a burst of connections is accepted at once, and a stop waits for their requests', async (t) => {
  const { plugin, heldCount, release } = heldResource();
  const { server, port } = await startHttp(t, { resources: () => [plugin] });
  let accepted = 0;
  server.listener.on('connection', () => {
    accepted += 1;
  });
  const answers = connectAtOnce(t, port, 16);
  // The first of these turns may have begun already.
  for (let turn = 0; turn < 2; turn++) await nextTurn();
  t.equal(accepted, 16);

  await until(() => heldCount() === 16);
  let stopped = false;
  const stop = server.stop({ timeout: 60_000 }).then(() => {
    stopped = true;
  });
  await nextTurn();
  t.notOk(stopped, 'the stop waits for the requests of every acceptor');
  release();
  await stop;
  t.strictSame(await answers(), Array(16).fill(OK));
  t.strictSame(await connectAtOnce(t, port, 1)(), ['ECONNREFUSED']);
});

t.test('at its timeout, a stop closes the connections of every acceptor unanswered', async (t) => {
  const { plugin, heldCount } = heldResource();
  const { server, port } = await startHttp(t, { resources: () => [plugin] });
  const answers = connectAtOnce(t, port, 16);
  await until(() => heldCount() === 16);
  await server.stop({ timeout: 1 });
  t.strictSame(await answers(), Array(16).fill(''));
});

t.test('the limit on connections holds for all acceptors together', async (t) => {
  const { plugin, release } = heldResource();
  const { server, port } = await startHttp(t, { resources: () => [plugin], maxConnections: 8 });
  release();
  const sockets: Socket[] = [];
  const open: number[] = [];
  server.listener.on('connection', (socket: Socket) => {
    sockets.push(socket);
    open.push(sockets.filter(({ destroyed }) => !destroyed).length);
  });
  await connectAtOnce(t, port, 32)();
  t.equal(sockets.length, 32);
  t.equal(Math.max(...open), 9, 'one more is accepted');
  t.strictSame(await connectAtOnce(t, port, 8)(), Array(8).fill(OK), 'closed connections no longer count');
});

t.test('an error while accepting a connection ends nothing, and is logged once a minute', async (t) => {
  const effects = fakeEffects();
  const { server, log } = await startHttp(t, { effects });
  const stumble = () => server.listener.emit('error', new Error('accept ENFILE'));
  for (let turn = 0; turn < 3; turn++) t.ok(stumble());
  effects.advance(60_000);
  stumble();
  t.match(log, Array(2).fill({ level: 40, msg: 'a connection could not be accepted' }));
  t.equal(log.length, 2);
});

/** Runs in a worker: opens `count` connections, tells once all are open, and posts the first line of each answer. */
const CLIENTS = `
  const { connect } = require('node:net');
  const { parentPort, workerData } = require('node:worker_threads');
  const { port, count, areConnected } = workerData;
  const tellConnected = () => {
    Atomics.store(areConnected, 0, 1);
    Atomics.notify(areConnected, 0);
  };
  let connected = 0;
  const ends = Array.from({ length: count }, () => new Promise((resolve) => {
    let text = '';
    const socket = connect(port, '127.0.0.1', () => {
      socket.write('GET /held HTTP/1.1\\r\\nHost: d\\r\\nConnection: close\\r\\n\\r\\n');
      connected += 1;
      if (connected === count) tellConnected();
    });
    socket.setEncoding('latin1').on('data', (part) => {
      text += part;
    });
    socket.on('error', ({ code }) => {
      text ||= code;
      tellConnected();
    });
    socket.on('close', () => resolve(text.split('\\r\\n')[0]));
  }));
  void Promise.all(ends).then((lines) => parentPort.postMessage(lines));`;

/** Connects while this thread is blocked; gives each answer's first line or error code once all are closed. */
function connectAtOnce(t: Test, port: number, count: number): () => Promise<string[]> {
  const areConnected = new Int32Array(new SharedArrayBuffer(4));
  const clients = new Worker(CLIENTS, { eval: true, workerData: { port, count, areConnected } });
  t.teardown(() => clients.terminate());
  const answered = once(clients, 'message');
  Atomics.wait(areConnected, 0, 0);
  return async () => (await answered)[0];
}
