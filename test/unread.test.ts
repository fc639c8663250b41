import { once } from 'node:events';
import { createServer, type IncomingMessage } from 'node:http';
import type { AddressInfo } from 'node:net';
import { text } from 'node:stream/consumers';
import t, { type Test } from 'tap';
import { dropBody } from '../src/unread.ts';
import { until } from './helpers/commands.ts';
import { connectRaw } from './helpers/http.ts';

t.test('Node makes no Buffers of a body that is dropped, and those of the next one', async (t) => {
  const { port, pieces } = await dropper(t);
  const client = await connectRaw(port);
  client.send(post('/dropped', 'ab'));
  client.send(post('/read', 'cd'));
  await client.received('read cd');
  t.match(await client.received('read cd'), /dropped to its end/);
  t.strictSame(pieces, []);
  client.socket.destroy();
});

t.test('dropping a body that is complete takes nothing from the next one', async (t) => {
  const { port, pieces } = await dropper(t);
  const client = await connectRaw(port);
  client.send(post('/late', 'ab'));
  await client.received('dropped to its end');
  t.equal(pieces.length, 0);
  client.send(post('/late', 'ab') + post('/read', 'cd'));
  await client.received('read cd');
  client.socket.destroy();
});

t.test('a connection that closes within a dropped body leaves nothing to the next one', async (t) => {
  const { port, dropped } = await dropper(t);
  for (let times = 1; times <= 3; times++) {
    const leaving = await connectRaw(port);
    leaving.send(post('/dropped', 'ab').slice(0, -5));
    await until(() => dropped.length === times);
    leaving.socket.destroy();
    await until(() => dropped.at(-1)?.destroyed === true);
    const next = await connectRaw(port);
    next.send(post('/read', 'cd'));
    await next.received('read cd');
    next.socket.destroy();
  }
});

/** A server that reads the bodies for /read and drops all others. */
async function dropper(t: Test) {
  const dropped: IncomingMessage[] = [];
  const pieces: unknown[] = [];
  const server = createServer(async (req, res) => {
    if (req.url === '/read') {
      res.end(`read ${await text(req)}`);
      return;
    }
    if (req.url === '/late') await until(() => req.complete);
    dropBody(req);
    const { push } = req;
    req.push = (piece) => {
      if (piece !== null) pieces.push(piece);
      return push(piece);
    };
    dropped.push(req);
    req.resume().once('end', () => res.end('dropped to its end'));
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.teardown(() => server.close().closeAllConnections());
  return { port: (server.address() as AddressInfo).port, dropped, pieces };
}

/** In chunks of one byte. */
function post(path: string, body: string): string {
  const chunks = [...body].map((byte) => `1\r\n${byte}\r\n`).join('');
  return `POST ${path} HTTP/1.1\r\nHost: d\r\nTransfer-Encoding: chunked\r\n\r\n${chunks}0\r\n\r\n`;
}
