import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import type { ServerResponse } from 'node:http';
import { type AddressInfo, connect as connectPlain, createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { connect } from 'node:tls';
import type { Plugin } from '@hapi/hapi';
import t from 'tap';
import { readCertificate } from '../../src/http/tls.ts';
import { limitHandshakes } from '../../src/http/tls-connections.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { followRaw, heldResource, PATIENT, parseResponses, startHttp } from '../helpers/http.ts';
import { ifHas } from '../helpers/programs.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');
const fixture = (name: string) => join(FIXTURES, name);

t.test('a connection that sends too much before its handshake is over is closed', async (t) => {
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  const { port } = await startHttp(t, { tls: pair, timeouts: PATIENT });
  const record = Buffer.concat([Buffer.from([22, 3, 1, 0x40, 0]), Buffer.alloc(0x4000)]);
  // The beginning of a ClientHello of 131,000 bytes, which is the most that OpenSSL takes.
  record.writeUIntBE(1, 5, 1);
  record.writeUIntBE(131_000, 6, 3);
  const socket = connectPlain(port, '127.0.0.1');
  const closed = new Promise<void>((resolve) => socket.once('close', () => resolve()));
  socket.on('error', () => undefined);
  socket.write(record);
  socket.resume();
  await closed;
});

t.test('what a connection sends counts until its handshake is over, however slowly it comes', async (t) => {
  const effects = fakeEffects();
  const { after } = effects;
  let looks = 0;
  effects.after = (delayMs, action) => {
    looks += 1;
    return after(delayMs, action);
  };
  const accepted: Socket[] = [];
  const listener = createServer((socket) => accepted.push(socket.resume()));
  limitHandshakes(listener as never, effects);
  await new Promise<void>((resolve) => listener.listen(0, '127.0.0.1', resolve));
  t.teardown(() => listener.close());
  const { port } = listener.address() as AddressInfo;
  const connected = async () => {
    const count = accepted.length + 1;
    const client = connectPlain(port, '127.0.0.1').on('error', () => undefined);
    t.teardown(() => client.destroy());
    await until(() => accepted.length === count);
    const socket = accepted[count - 1] as Socket;
    const send = async (bytes: number) => {
      const total = socket.bytesRead + bytes;
      client.write(Buffer.alloc(bytes));
      await until(() => socket.bytesRead === total);
    };
    return { socket, send };
  };
  const most = 16 * 1024;
  const slow = await connected();
  const other = await connected();
  t.equal(looks, 1, 'all are looked at together');
  for (const { send } of [slow, other]) await send(most);
  effects.advance(100);
  listener.emit('secureConnection', other.socket);
  for (const { send } of [slow, other]) await send(1);
  t.notOk(slow.socket.destroyed);
  const closed = new Promise((resolve) => slow.socket.once('close', resolve));
  effects.advance(100);
  t.strictSame([slow.socket.destroyed, other.socket.destroyed], [true, false]);
  await closed;
  effects.advance(100);
  looks = 0;
  effects.advance(100);
  t.equal(looks, 0, 'there is nothing left to look at');

  const later = await connected();
  await later.send(most + 1);
  effects.advance(100);
  t.ok(later.socket.destroyed, 'a later one is looked at as well');
});

t.test(
  'a TLS client that updates its keys without end, or begins another handshake, is left',
  ifHas('openssl'),
  async (t) => {
    const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
    const { port } = await startHttp(t, {
      tls: pair,
      timeouts: { ...PATIENT, idleMs: 600_000 },
    });
    const cases = [
      ['-tls1_3', 'k', /^>>> .*KeyUpdate/gm, 17],
      ['-tls1_2', 'R', /^RENEGOTIATING/gm, 1],
    ] as const;
    for (const [version, command, done, doneMax] of cases) {
      const words = ['s_client', '-connect', `127.0.0.1:${port}`, '-msg', version];
      const client = spawn('openssl', words, { stdio: ['pipe', 'pipe', 'ignore'] });
      t.teardown(() => client.kill());
      client.stdin.on('error', () => undefined);
      let said = '';
      client.stdout.on('data', (bytes) => (said += bytes));
      const count = () => said.match(done)?.length ?? 0;
      const hasLeft = () => client.exitCode !== null;
      await until(() => said.includes('Verify return code'));
      for (let times = 1; times <= doneMax; times++) {
        t.notOk(hasLeft(), `${version}: ${times}`);
        client.stdin.write(`${command}\n`);
        await until(() => count() === times || hasLeft());
      }
      await until(hasLeft);
    }
  },
);

t.test('a TLS client is answered all requests that it sends behind answers that wait', async (t) => {
  const { plugin: held, release } = heldResource();
  const large: ServerResponse[] = [];
  let small = 0;
  const answering: Plugin<void> = {
    name: 'answering',
    register(server) {
      const options = { auth: false } as const;
      server.route({
        method: 'GET',
        path: '/large',
        options,
        handler({ raw }) {
          large.push(raw.res);
          return 'x'.repeat(50_000);
        },
      });
      server.route({
        method: 'GET',
        path: '/small',
        options,
        handler() {
          small += 1;
          return 'x';
        },
      });
    },
  };
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  const { port } = await startHttp(t, { tls: pair, resources: () => [held, answering] });
  const ca = readFileSync(fixture('ca.pem'));
  const client = await followRaw(connect({ port, host: '127.0.0.1', servername: 'localhost', ca }));
  const get = (path: string, header = '') => `GET ${path} HTTP/1.1\r\nHost: d\r\n${header}\r\n`;
  client.send(get('/held') + get('/large').repeat(3));
  await until(() => large.length === 3 && large.every(({ writableEnded }) => writableEnded));
  // In one read, several records of 16 KiB.
  client.send(
    get('/small', `X-Long: ${'x'.repeat(1_000)}\r\n`).repeat(50) + get('/small', 'Connection: close\r\n'),
  );
  await until(() => small > 0);
  release();
  t.strictSame(
    parseResponses(await client.closed).map(({ status }) => status),
    Array.from({ length: 55 }, () => 200),
  );
});
