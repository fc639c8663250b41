import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { proxiesOf } from '../../src/cli/proxies.ts';
import { runHere } from '../helpers/cli.ts';
import { NOWHERE } from '../helpers/nowhere.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');
const NOBODY = 'http://127.0.0.1:1';

/** `davit deploy` without retries, in this environment. */
const deployTo = (url: string, environment: Record<string, string>, ...options: string[]) =>
  runHere(['deploy', 'prj_1', 'main', '--retry-for', '0', '--url', url, ...options], {
    environment: { DAVIT_KEY: 'davit_key', ...environment },
  });

t.test('a proxy without a scheme is http, lower-case names win, and empty means none', async (t) => {
  const [plain, tls] = [new URL('http://davit.corp'), new URL('https://davit.corp')];
  t.strictSame(proxiesOf({}, plain), { httpProxy: '', httpsProxy: '', noProxy: '' });
  t.strictSame(
    proxiesOf({ HTTP_PROXY: 'proxy.corp:3128', HTTPS_PROXY: 'u:p%40@proxy.corp', NO_PROXY: 'a' }, plain),
    {
      httpProxy: 'http://proxy.corp:3128/',
      httpsProxy: 'http://u:p%40@proxy.corp/',
      noProxy: 'a',
    },
  );
  const upper = { HTTP_PROXY: 'two', HTTPS_PROXY: 'two', NO_PROXY: 'two' };
  const both = { ...upper, http_proxy: 'HTTPS://one', https_proxy: '', no_proxy: 'one' };
  t.strictSame(proxiesOf(both, plain), { httpProxy: 'https://one/', httpsProxy: '', noProxy: 'one' });
  t.equal(proxiesOf({ ...upper, no_proxy: '' }, plain).noProxy, '');
  t.match(proxiesOf(both, tls), { httpProxy: '', httpsProxy: '' }, 'http_proxy does not apply to https');
});

t.test('an address in a block of NO_PROXY is reached without a proxy', async (t) => {
  const isDirect = (url: string, noProxy: string) =>
    proxiesOf({ NO_PROXY: noProxy }, new URL(url)).noProxy === '*';
  t.ok(isDirect('http://10.1.2.3:8080', 'localhost, 10.0.0.0/8'));
  t.ok(isDirect('https://[fd00::1]', '10.0.0.0/8,fd00::/8'));
  t.notOk(isDirect('http://11.1.2.3', '10.0.0.0/8'));
  t.ok(isDirect('http://127.0.0.2', '127.0.0.1/8'), 'any address of the block may stand for it');
  t.notOk(isDirect('http://128.0.0.1', '127.0.0.1/8'));
  t.notOk(isDirect('http://davit.corp', '0.0.0.0/0,::/0'), 'names are not looked up for it');
  const { stderr } = await deployTo(NOBODY, { HTTP_PROXY: `${NOWHERE}:3128`, NO_PROXY: '127.0.0.0/8' });
  t.match(lastLine(stderr), /^error: 127\.0\.0\.1:1 cannot be reached \(ECONNREFUSED\)/);
});

t.test('an unusable proxy is refused with the name of its variable, without its value', async (t) => {
  const others = ['http://x/y', 'http://x?y', 'http://x#y', '::bad', 'http://', 'a b'];
  for (const value of ['ftp://x', 'socks5://x:1080', 'http://user:p%ZZ@h:9', ...others]) {
    for (const name of ['http_proxy', 'HTTP_PROXY', 'HTTPS_PROXY']) {
      t.strictSame(await deployTo('http://127.0.0.1:1', { [name]: value }), {
        stdout: '',
        stderr: `error: ${name} is no proxy that davit can use: it must be like http://proxy.example.com:3128\n`,
        exitCode: 1,
      });
    }
  }
});

t.test('an unreachable proxy is named in the error', async (t) => {
  for (const url of ['http://davit.invalid', 'https://davit.invalid']) {
    const refused = await deployTo(url, through(url, 'user:secret@127.0.0.1:1'));
    t.equal(refused.exitCode, 1);
    t.equal(
      lastLine(refused.stderr),
      'error: the proxy 127.0.0.1:1 cannot be reached (ECONNREFUSED), and --retry-for is over: gave up',
    );
    const unknown = await deployTo(url, through(url, `http://${NOWHERE}:3128`));
    t.equal(lastLine(unknown.stderr), `error: the proxy ${NOWHERE}:3128 has no address: is the name right?`);
  }
  const direct = await deployTo(NOBODY, { HTTP_PROXY: `${NOWHERE}:3128`, NO_PROXY: '127.0.0.1' });
  t.match(lastLine(direct.stderr), /^error: 127\.0\.0\.1:1 cannot be reached \(ECONNREFUSED\)/);
  for (const environment of [{}, { https_proxy: '' }]) {
    const tls = await deployTo(`https://${NOWHERE}`, { HTTP_PROXY: 'http://127.0.0.1:1', ...environment });
    t.match(
      lastLine(tls.stderr),
      /^error: \w+\.invalid has no address/,
      'http_proxy does not apply to https',
    );
  }
});

t.test('a proxy that refuses is named beside the service', async (t) => {
  const cases: [status: number, message: RegExp][] = [
    [
      407,
      /^error: davit\.invalid behind the proxy HOST cannot be reached: the proxy requires a user and a password$/,
    ],
    [
      503,
      /^error: davit\.invalid behind the proxy HOST (?:answers 503|cannot be reached \(503\)), and --retry-for/,
    ],
  ];
  for (const [status, message] of cases) {
    const proxy = await startRefusing(t, status);
    for (const url of ['http://davit.invalid', 'https://davit.invalid']) {
      const { stderr, exitCode } = await deployTo(url, through(url, proxy));
      t.equal(exitCode, 1);
      t.match(lastLine(stderr).replace(proxy, 'HOST'), message);
    }
  }
});

t.test('the certificate of a proxy is checked, and that of --ca-file counts for it, too', async (t) => {
  const [key, cert] = ['key', 'pem'].map((ext) => readFileSync(join(FIXTURES, `localhost.${ext}`)));
  const proxy = await startRefusing(t, 407, createTlsServer({ key, cert }));
  for (const url of ['http://davit.invalid', 'https://davit.invalid']) {
    const environment = through(url, `https://localhost:${proxy.split(':')[1]}`);
    const untrusted = await deployTo(url, environment);
    t.match(
      lastLine(untrusted.stderr),
      /^error: the proxy localhost:\d+ cannot be trusted \(\w+\): --ca-file/,
    );
    const trusted = await deployTo(url, environment, '--ca-file', join(FIXTURES, 'ca.pem'));
    t.match(lastLine(trusted.stderr), /the proxy requires a user and a password$/);
  }
});

function through(url: string, proxy: string): Record<string, string> {
  return { [url.startsWith('https:') ? 'HTTPS_PROXY' : 'HTTP_PROXY']: proxy };
}

function lastLine(text: string): string {
  return text.trimEnd().split('\n').at(-1) ?? '';
}

/** A proxy that answers whatever it is asked for with this status; gives its host. */
async function startRefusing(t: Test, status: number, server = createServer()): Promise<string> {
  server.on('request', (_, response) => response.writeHead(status).end());
  server.on('connect', (_, client) => client.end(`HTTP/1.1 ${status} No\r\n\r\n`));
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.teardown(() => {
    server.closeAllConnections();
    server.close();
  });
  return `127.0.0.1:${(server.address() as AddressInfo).port}`;
}
