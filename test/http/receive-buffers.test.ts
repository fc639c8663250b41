import type { Socket } from 'node:net';
import type { Plugin } from '@hapi/hapi';
import Joi from 'joi';
import t from 'tap';
import { createReceiveBuffers } from '../../src/http/receive-buffers.ts';
import { until } from '../helpers/commands.ts';
import { connectRaw, type RawConnection, startHttp } from '../helpers/http.ts';

const sockets: Socket[] = [];

/** Takes any JSON. */
const taker: Plugin<void> = {
  name: 'taker',
  register(server) {
    server.ext('onRequest', (request, h) => {
      sockets.push(request.raw.req.socket);
      return h.continue;
    });
    server.route({
      method: 'POST',
      path: '/v2/taker',
      options: { auth: false, plugins: { input: { payload: Joi.any() } } },
      handler: () => ({ taken: true }),
    });
  },
};

t.test('beyond the limit the oldest bodies are given up until the others have room', (t) => {
  const buffers = createReceiveBuffers(100);
  const givenUp: string[] = [];
  const begin = (name: string) => {
    const receiving = buffers.begin(() => {
      givenUp.push(name);
      receiving.end();
    });
    return receiving;
  };
  const [one, two, three, four] = [begin('one'), begin('two'), begin('three'), begin('four')];
  one.add(40);
  two.add(30);
  three.add(30);
  t.strictSame(givenUp, []);
  two.end();
  two.end();
  four.add(31);
  t.strictSame(givenUp, ['one']);
  four.add(70);
  t.strictSame(givenUp, ['one', 'three']);
  four.add(100);
  t.strictSame(givenUp, ['one', 'three'], 'one body is bounded elsewhere');
  t.end();
});

const HEAD =
  'POST /v2/taker HTTP/1.1\r\nHost: d\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n';

/** A client that has sent 50,000 bytes of the 60,000 of its body. */
async function withMostSent(port: number): Promise<RawConnection> {
  const before = sockets.length;
  const client = await connectRaw(port);
  client.send(`${HEAD}"${'x'.repeat(50_000)}`);
  await until(() => (sockets[before]?.bytesRead ?? 0) > 50_000);
  return client;
}

const REST = `${'x'.repeat(9_998)}"`;
const WHOLE = `${HEAD}"${'x'.repeat(59_998)}"`;

t.test('a body that is given up is answered 503, and later ones are taken', async (t) => {
  const { port } = await startHttp(t, { resources: () => [taker], receiveBufferMaxBytes: 100_000 });
  const [slow, quick] = [await withMostSent(port), await connectRaw(port)];
  quick.send(WHOLE);
  t.match(await quick.closed, /^HTTP\/1\.1 200 /);
  slow.send(REST);
  const refused = await slow.closed;
  t.match(refused, /^HTTP\/1\.1 503 /);
  t.match(refused, /\r\nRetry-After: 5\r\n/i);
  t.match(refused, /too many bodies are being received/);
});

t.test('a body that broke off takes no room from the others', async (t) => {
  const { port } = await startHttp(t, { resources: () => [taker], receiveBufferMaxBytes: 120_000 });
  const [broken, slow, quick] = [await withMostSent(port), await withMostSent(port), await connectRaw(port)];
  broken.socket.end();
  t.match(await broken.closed, /^HTTP\/1\.1 400 /);
  quick.send(WHOLE);
  t.match(await quick.closed, /^HTTP\/1\.1 200 /);
  slow.send(REST);
  t.match(await slow.closed, /^HTTP\/1\.1 200 /);
});
