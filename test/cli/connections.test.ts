import { once } from 'node:events';
import { createServer } from 'node:net';
import t, { type Test } from 'tap';
import { EnvHttpProxyAgent, request } from 'undici';
import { watchConnections } from '../../src/cli/connections.ts';
import { NOWHERE } from '../helpers/nowhere.ts';
import { hangUp, startReceiver } from '../helpers/receiver.ts';

t.test('a request whose connection was not established was not sent', async (t) => {
  const untrusted = await startReceiver(t, { tls: 'self-signed' });
  // An alert in place of a greeting: no version of TLS that both speak.
  const alert = await speaking(t, Buffer.from([0x15, 3, 3, 0, 2, 2, 70]));
  const forbidding = await speaking(t, 'HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n');
  for (const [url, httpsProxy] of [
    ['http://127.0.0.1:1/'],
    [`http://${NOWHERE}/`],
    [untrusted.url],
    [`https://${alert}/`],
    ['https://deploy.example.com/', `http://${forbidding}`],
    ['https://deploy.example.com/', 'http://127.0.0.1:1'],
  ]) {
    t.equal(await isUnsent(t, url ?? '', httpsProxy), true, `${url} ${httpsProxy}`);
  }
});

t.test('a request whose connection was lost later may have been sent', async (t) => {
  const receiver = await startReceiver(t, { answers: [hangUp()] });
  t.equal(await isUnsent(t, receiver.url), false);
});

async function isUnsent(t: Test, url: string, httpsProxy = ''): Promise<boolean> {
  const proxies = { httpProxy: '', httpsProxy, noProxy: '' };
  const watched = watchConnections(proxies);
  const dispatcher = new EnvHttpProxyAgent(proxies);
  t.teardown(() => dispatcher.destroy());
  try {
    const { statusCode } = await request(url, { method: 'POST', dispatcher, body: '{}' });
    throw new Error(`answered with ${statusCode}`);
  } catch (error) {
    return watched.isUnsent(error);
  } finally {
    watched.stop();
  }
}

/** The address of a server that answers whatever comes first with this, and hangs up. */
async function speaking(t: Test, answer: string | Buffer): Promise<string> {
  const server = createServer((socket) => {
    socket.on('error', () => undefined);
    socket.once('data', () => socket.end(answer));
  }).listen(0, '127.0.0.1');
  t.teardown(() => server.close());
  await once(server, 'listening');
  const address = server.address();
  return typeof address === 'object' ? `127.0.0.1:${address?.port}` : '';
}
