import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { copyFileSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import type { IncomingMessage } from 'node:http';
import { Agent, request } from 'node:https';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { connect, type TLSSocket } from 'node:tls';
import t, { type Test } from 'tap';
import { type Place, place } from '../helpers/cli.ts';
import { startReceiver } from '../helpers/receiver.ts';
import { type ServedWithLog, serveWithLog } from '../helpers/served.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');
const fixture = (name: string) => readFileSync(join(FIXTURES, name), 'utf8');
/** Of both certificates for localhost: one signed by the authority, one by itself. */
const ca = [fixture('ca.pem'), fixture('self-signed.pem')];

const RELOADED = 'reloaded: the certificate';

t.test('after SIGHUP new connections get the new certificate, and open ones go on', async (t) => {
  const { service, use, json, davit, directory, port } = await withCertificate(t);
  const command = ['sh', '-c', 'echo one; while [ ! -e go ]; do sleep 0.02; done; echo two'];
  await davit(['admin', 'project', 'create', '--name', 'slow', '--dir', '.', '--', ...command]);
  const key = await json<{ secret: string }>([
    ...['admin', 'key', 'create', '--name', 'ci'],
    ...['--all-scopes', '--all-projects'],
  ]);
  const { id } = await json<{ id: string }>(['admin', 'deployment', 'create', 'slow', 'main']);
  const agent = new Agent({ keepAlive: true, maxSockets: 1 });
  t.teardown(() => agent.destroy());
  const followed = await get(port, `/v2/deployments/${id}/logs`, {
    agent: false,
    headers: { authorization: `Bearer ${key.secret}`, accept: 'text/event-stream' },
  });
  let log = '';
  followed.setEncoding('utf8').on('data', (piece: string) => {
    log += piece;
  });
  while (!log.includes('data: one')) await once(followed, 'data');
  const before = await get(port, '/healthz', { agent });
  const { socket } = before;
  t.equal(await text(before), '{"status":"ok"}');
  const oldSession = await sessionOf(port);
  t.equal(await issuerShown(port), 'CN=davit test CA');

  use('self-signed');
  service.signal('SIGHUP');
  await service.logged(RELOADED);

  t.equal(await issuerShown(port), 'CN=localhost');
  t.equal(await issuerShown(port, oldSession), 'CN=localhost', 'also when a session is resumed');
  const after = await get(port, '/healthz', { agent });
  t.ok(after.socket === socket, 'the connection is the same');
  await text(after);
  writeFileSync(join(directory, 'go'), '');
  await once(followed, 'end');
  t.match(log, /data: one\n[\s\S]*data: two\n[\s\S]*event: end/);
  t.equal(await service.stop(), 0);
});

t.test('a broken certificate or key is reported, and the old one stays in use', async (t) => {
  const { service, use, port, certPath, keyPath } = await withCertificate(t);
  const breaks: [how: () => void, problem: RegExp][] = [
    [
      () => copyFileSync(join(FIXTURES, 'self-signed.pem'), certPath),
      /--tls-key: .* is not the key of the first/,
    ],
    [() => writeFileSync(certPath, 'rubbish'), /--tls-cert: .*cert\.pem holds no certificate in PEM/],
    [() => writeFileSync(certPath, ''), /--tls-cert: .* holds no certificate in PEM/],
    [() => writeFileSync(keyPath, fixture('localhost.pem')), /--tls-(?:cert|key): .* holds no/],
    [() => rmSync(certPath), /--tls-cert: .*cert\.pem cannot be read \(ENOENT\)/],
    [() => replaceByPipe(keyPath), /key\.pem is not a regular file/],
  ];
  for (const [index, [breakIt, problem]] of breaks.entries()) {
    breakIt();
    service.signal('SIGHUP');
    const failures = () => service.log().filter(({ msg }) => /^not reloaded/.test(String(msg)));
    while (failures().length <= index) await service.more();
    t.match(failures().at(-1), {
      level: 'error',
      problem,
      msg: 'not reloaded, the old one stays in use: the certificate',
    });
    t.equal(await issuerShown(port), 'CN=davit test CA');
  }
  rmSync(keyPath);
  use('self-signed');
  service.signal('SIGHUP');
  await service.logged(RELOADED);
  t.equal(await issuerShown(port), 'CN=localhost');
});

function replaceByPipe(path: string): void {
  rmSync(path);
  execFileSync('mkfifo', [path]);
}

t.test('no request fails while certificates are reloaded 20 times', async (t) => {
  const { service, use, port } = await withCertificate(t);
  let asked = 0;
  let stop = false;
  const ask = async () => {
    while (!stop) {
      const response = await get(port, '/healthz', { agent: false });
      await text(response);
      if (response.statusCode !== 200) throw new Error(`answered ${response.statusCode}`);
      asked += 1;
    }
  };
  const asking = Promise.all([ask(), ask(), ask()]);
  for (let round = 1; round <= 20; round++) {
    use(round % 2 === 0 ? 'localhost' : 'self-signed');
    const [askedBefore, readBefore] = [asked, renewals(service)];
    service.signal('SIGHUP');
    while (renewals(service) === readBefore) await service.more();
    while (asked < askedBefore + 3) await new Promise(setImmediate);
  }
  stop = true;
  await asking;
  t.ok(asked >= 60);
});

t.test('an expired certificate is served with a warning, and can be replaced', async (t) => {
  const { service, use, port } = await withCertificate(t, 'expired');
  const warning = await service.logged(
    'the certificate has expired, and clients refuse it: renew it, then send SIGHUP',
  );
  t.match(warning, { level: 'warn', valid_to: '2021-01-01T00:00:00.000Z' });
  const refused = connect({ port, host: '127.0.0.1', servername: 'localhost', ca });
  const [error] = await once(refused, 'error').then(([thrown]) => [thrown as NodeJS.ErrnoException]);
  t.equal(error?.code, 'CERT_HAS_EXPIRED');
  use('localhost');
  service.signal('SIGHUP');
  await service.logged(RELOADED);
  t.equal(await issuerShown(port), 'CN=davit test CA');
  t.equal(service.log().filter(({ level }) => level === 'warn').length, 1);
});

t.test('without certificates, SIGHUP changes nothing', async (t) => {
  const service = await serveWithLog(t, place(t).directory);
  service.signal('SIGHUP');
  t.match(await service.logged('there are no certificates to reload'), { level: 'info' });
  t.equal((await fetch(`${service.url}/healthz`)).status, 200);
  t.equal(await service.stop(), 0);
});

t.test('SIGHUP reloads --webhook-ca-file, and a broken one is not used', async (t) => {
  const { directory, davit, json } = place(t);
  const path = join(directory, 'authorities.pem');
  writeFileSync(path, fixture('self-signed.pem'));
  const service = await serveWithLog(t, directory, {
    options: ['--webhook-ca-file', path, '--webhook-allow-cidr', '127.0.0.0/8'],
  });
  const receiver = await startReceiver(t, { tls: 'localhost' });
  await davit(['admin', 'project', 'create', '--name', 'website']);
  const { secret } = await json<{ secret: string }>([
    ...['admin', 'key', 'create', '--name', 'ci'],
    ...['--all-scopes', '--all-projects'],
  ]);
  const post = async (path: string, body?: unknown) => {
    const response = await fetch(`${service.url}${path}`, {
      method: 'POST',
      headers: { authorization: `Bearer ${secret}`, 'content-type': 'application/json' },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    return (await response.json()) as Record<string, unknown>;
  };
  const webhook = await post('/v2/webhooks', { url: receiver.url, events: ['deployment.succeeded'] });
  const ping = () => post(`/v2/webhooks/${webhook['id']}/ping`);
  t.match(await ping(), { status_code: null, error: 'tls: certificate is from an unknown authority' });

  writeFileSync(path, 'rubbish');
  service.signal('SIGHUP');
  t.match(await service.logged(/^not reloaded/), {
    problem: /--webhook-ca-file: .* holds no certificate in PEM/,
    msg: /the certificates of --webhook-ca-file$/,
  });
  t.match(await ping(), { status_code: null });

  writeFileSync(path, fixture('ca.pem'));
  service.signal('SIGHUP');
  await service.logged('reloaded: the certificates of --webhook-ca-file');
  t.match(await ping(), { status_code: 200, error: null });
});

/** `davit serve` over TLS, with copies of a certificate and its key that can be exchanged. */
async function withCertificate(t: Test, name = 'localhost') {
  const there: Place = place(t);
  const [certPath, keyPath] = [join(there.directory, 'cert.pem'), join(there.directory, 'key.pem')];
  const use = (name: string) => {
    copyFileSync(join(FIXTURES, `${name}.pem`), certPath);
    copyFileSync(join(FIXTURES, `${name}.key`), keyPath);
  };
  use(name);
  const options = ['--tls-cert', certPath, '--tls-key', keyPath];
  const service = await serveWithLog(t, there.directory, { options });
  return { ...there, service, use, certPath, keyPath, port: Number(new URL(service.url).port) };
}

function renewals(service: ServedWithLog): number {
  return service.log().filter(({ msg }) => msg === RELOADED).length;
}

async function get(port: number, path: string, options: object): Promise<IncomingMessage> {
  const sent = request({ port, host: '127.0.0.1', servername: 'localhost', path, ca, ...options }).end();
  const [response] = (await once(sent, 'response')) as [IncomingMessage];
  return response;
}

/** Who signed the certificate that a new connection is shown. */
async function issuerShown(port: number, session?: Buffer): Promise<string | undefined> {
  const socket = connect({
    ...{ port, host: '127.0.0.1', servername: 'localhost', ca },
    ...(session === undefined ? {} : { session }),
  });
  await once(socket, 'secureConnect');
  const issuer = issuerOf(socket);
  socket.destroy();
  return issuer;
}

function issuerOf(socket: TLSSocket): string | undefined {
  return socket.getPeerX509Certificate()?.issuer;
}

/** What such a connection can be resumed with. */
async function sessionOf(port: number): Promise<Buffer> {
  const socket = connect({ port, host: '127.0.0.1', servername: 'localhost', ca });
  const [session] = (await once(socket, 'session')) as [Buffer];
  socket.destroy();
  return session;
}
