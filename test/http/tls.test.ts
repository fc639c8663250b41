import { execFileSync } from 'node:child_process';
import { chmodSync, copyFileSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { connect as connectPlain, type Socket } from 'node:net';
import { join } from 'node:path';
import tls, { connect } from 'node:tls';
import t from 'tap';
import { readCertificate } from '../../src/http/tls.ts';
import { openFilesOf } from '../../src/proc.ts';
import { until } from '../helpers/commands.ts';
import { PATIENT, rawRequest, startHttp } from '../helpers/http.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');
const fixture = (name: string) => join(FIXTURES, name);

t.test('a certificate and its key are read, with the dates of its validity', async (t) => {
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  t.equal(pair.chain, readFileSync(fixture('localhost.pem'), 'utf8'));
  t.equal(pair.validFromMs, Date.UTC(2020, 0, 1));
  t.equal(pair.validToMs, Date.UTC(2099, 11, 31, 23, 59, 59));
  const expired = readCertificate({ certPath: fixture('expired.pem'), keyPath: fixture('expired.key') });
  t.equal(expired.validToMs, Date.UTC(2021, 0, 1), 'a certificate that has expired is read, too');
  for (const label of ['X509 CERTIFICATE', 'TRUSTED CERTIFICATE']) {
    const certPath = join(temporaryDirectory(t), 'cert.pem');
    writeFileSync(certPath, pair.chain.replaceAll('CERTIFICATE', label));
    const { validToMs } = readCertificate({ certPath, keyPath: fixture('localhost.key') });
    t.equal(validToMs, pair.validToMs, `as ${label}, which OpenSSL reads, too`);
  }
});

t.test(
  'a chain with text in between and a key behind its EC parameters are read, too',
  ifHas('openssl'),
  async (t) => {
    const directory = temporaryDirectory(t);
    const [chain, key] = [join(directory, 'chain.pem'), join(directory, 'key.pem')];
    const read = (name: string) => readFileSync(fixture(name), 'utf8');
    writeFileSync(chain, `the server's own:\r\n${read('localhost.pem')}\nits authority:\n${read('ca.pem')}`);
    const parameters = execFileSync('openssl', ['ecparam', '-name', 'prime256v1'], { encoding: 'utf8' });
    const traditional = execFileSync('openssl', ['ec', '-in', fixture('localhost.key')], {
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    writeFileSync(key, parameters + traditional);
    t.equal(readCertificate({ certPath: chain, keyPath: key }).validFromMs, Date.UTC(2020, 0, 1));
  },
);

t.test('an unusable certificate or key is rejected with option and cause', ifHas('openssl'), async (t) => {
  const directory = temporaryDirectory(t);
  const made = (name: string, text: string) => {
    writeFileSync(join(directory, name), text);
    return join(directory, name);
  };
  const pem = readFileSync(fixture('localhost.pem'), 'utf8');
  const ca = readFileSync(fixture('ca.pem'), 'utf8');
  const key = readFileSync(fixture('localhost.key'), 'utf8');
  const encrypted = execFileSync(
    'openssl',
    ['pkey', '-in', fixture('localhost.key'), '-aes256', '-passout', 'pass:opensesame'],
    { encoding: 'utf8' },
  );
  mkdirSync(join(directory, 'folder'));
  const [weakPath, weakKeyPath] = [join(directory, 'weak.pem'), join(directory, 'weak.key')];
  const weak = ['req', '-x509', '-newkey', 'rsa:512', '-nodes', '-subj', '/CN=localhost'];
  execFileSync('openssl', [...weak, '-out', weakPath, '-keyout', weakKeyPath], { stdio: 'ignore' });
  const good = { certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') };
  const refusals: [changes: Partial<typeof good>, message: RegExp][] = [
    [
      { certPath: join(directory, 'none.pem') },
      /^--tls-cert: .*none\.pem cannot be read \(ENOENT\): check that it is there/,
    ],
    [{ certPath: join(directory, 'folder') }, /^--tls-cert: .*folder cannot be read \(EISDIR\)/],
    [{ keyPath: join(directory, 'none.key') }, /^--tls-key: .*none\.key cannot be read \(ENOENT\)/],
    [{ certPath: made('empty.pem', '') }, /^--tls-cert: .*empty\.pem holds no certificate in PEM$/],
    [{ certPath: good.keyPath }, /^--tls-cert: .*localhost\.key holds no certificate in PEM$/],
    [
      { certPath: made('cut.pem', pem.replace(/\n.{64}\n/, '\n')) },
      /^--tls-cert: .*cut\.pem holds a certificate that is damaged$/,
    ],
    [
      { certPath: made('second.pem', `${pem}${pem.replace(/\n.{64}\n/, '\n')}`) },
      /^--tls-cert: .*second\.pem holds a certificate that is damaged$/,
    ],
    [
      { certPath: made('joined.pem', pem.trimEnd() + ca) },
      /^--tls-cert: .*joined\.pem: .* must each stand on a line of their own$/,
    ],
    [
      { certPath: made('half.pem', pem.slice(0, 300)) },
      /^--tls-cert: .*half\.pem holds no certificate in PEM$/,
    ],
    [{ keyPath: good.certPath }, /^--tls-key: .*localhost\.pem holds no private key in PEM$/],
    [
      { keyPath: made('garbage.key', key.replace(/\n.{8}/, '\n!!!!!!!!')) },
      /^--tls-key: .*garbage\.key holds no private key/,
    ],
    [
      { keyPath: made('locked.key', encrypted) },
      /^--tls-key: .*locked\.key is encrypted.*: decrypt it with openssl pkey -in /,
    ],
    [
      { keyPath: fixture('wrong-host.key') },
      /^--tls-key: .*wrong-host\.key is not the key of the first certificate in .*localhost\.pem/,
    ],
    [
      { certPath: weakPath, keyPath: weakKeyPath },
      /^--tls-cert: OpenSSL refuses .*weak\.pem \(.*key too small.*\): have another one made$/,
    ],
    [
      { certPath: made('turned.pem', ca + pem) },
      /is not the key of the first certificate .* before those of its authorities$/,
    ],
  ];
  for (const [changes, message] of refusals) {
    t.throws(() => readCertificate({ ...good, ...changes }), { code: 'invalid_request', message });
  }
  const open = openFilesOf(process.pid).filter((path) => path.startsWith(directory));
  t.strictSame(open, [], 'each reload leaves no file open');
});

t.test(
  'a key without read permission is rejected with EACCES',
  { skip: process.getuid?.() === 0 && 'root may read it' },
  async (t) => {
    const path = join(temporaryDirectory(t), 'private.key');
    copyFileSync(fixture('localhost.key'), path);
    chmodSync(path, 0);
    t.throws(() => readCertificate({ certPath: fixture('localhost.pem'), keyPath: path }), {
      message: /\(EACCES\)/,
    });
  },
);

t.test(
  'TLS 1.2 and 1.3 with HTTP/1.1 are accepted, whatever Node does; older versions and HTTP/2 are not',
  async (t) => {
    const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
    // As NODE_OPTIONS can set it.
    const { DEFAULT_MIN_VERSION } = tls;
    Object.assign(tls, { DEFAULT_MIN_VERSION: 'TLSv1.3' });
    const { port } = await startHttp(t, { tls: pair }).finally(() =>
      Object.assign(tls, { DEFAULT_MIN_VERSION }),
    );
    const ca = readFileSync(fixture('ca.pem'));
    const handshake = (options: object) =>
      new Promise<{ protocol: string | null; alpn: string | false | null } | string>((resolve) => {
        const socket = connect({ port, host: '127.0.0.1', servername: 'localhost', ca, ...options }, () => {
          resolve({ protocol: socket.getProtocol(), alpn: socket.alpnProtocol });
          socket.destroy();
        });
        socket.on('error', (error: NodeJS.ErrnoException) => resolve(String(error.code)));
      });
    t.strictSame(await handshake({}), { protocol: 'TLSv1.3', alpn: false });
    t.strictSame(await handshake({ maxVersion: 'TLSv1.2', ALPNProtocols: ['h2', 'http/1.1'] }), {
      protocol: 'TLSv1.2',
      alpn: 'http/1.1',
    });
    const old = { minVersion: 'TLSv1', maxVersion: 'TLSv1.1', ciphers: 'DEFAULT@SECLEVEL=0' };
    t.match(await handshake(old), /PROTOCOL_VERSION/);
    t.match(await handshake({ ALPNProtocols: ['h2'] }), /NO_APPLICATION_PROTOCOL/);
  },
);

t.test('a connection that never begins a handshake is closed', async (t) => {
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  const { port } = await startHttp(t, { tls: pair, timeouts: { headersMs: 50, checkMs: 10 } });
  t.equal(await rawRequest(port, ''), '');
});

t.test('a connection whose client leaves before the handshake is over is closed at once', async (t) => {
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  const { server, port } = await startHttp(t, {
    tls: pair,
    timeouts: PATIENT,
  });
  let open = 0;
  let seen = 0;
  server.listener.on('connection', (socket: Socket) => {
    open += 1;
    seen += 1;
    socket.once('close', () => {
      open -= 1;
    });
  });
  // More than there are acceptors, so that several of them take part.
  for (let count = 0; count < 32; count++) connectPlain(port, '127.0.0.1').end();
  await until(() => seen === 32 && open === 0);
});

t.test('a request without encryption is told that the port speaks HTTPS', async (t) => {
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  const { port, log } = await startHttp(t, { tls: pair });
  const methods = ['GET', 'HEAD', 'POST', 'PUT'];
  for (const method of methods) {
    const answer = await rawRequest(port, `${method} /v2/projects HTTP/1.1\r\nHost: localhost\r\n\r\n`);
    const [head = '', body = ''] = answer.split('\r\n\r\n');
    t.match(head, /^HTTP\/1\.1 400 Bad Request\r\n/, method);
    const { error } = JSON.parse(body) as { error: Record<string, unknown> };
    t.match(error, { code: 'invalid_request', message: /speaks HTTPS: use https:\/\/ in the URL/ });
  }
  t.equal(log.filter(({ msg, status }) => msg === 'not a request' && status === 400).length, methods.length);
});

t.test('a TLS client that ends its side right behind its request is answered', async (t) => {
  const pair = readCertificate({ certPath: fixture('localhost.pem'), keyPath: fixture('localhost.key') });
  const { port } = await startHttp(t, { tls: pair });
  const ca = readFileSync(fixture('ca.pem'));
  const halfOpen = { port, host: '127.0.0.1', servername: 'localhost', ca, allowHalfOpen: true };
  const statusLine = () =>
    new Promise<string>((resolve, reject) => {
      let answer = '';
      const socket = connect(halfOpen);
      socket.once('secureConnect', () => socket.end('GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n'));
      socket.on('data', (bytes) => (answer += bytes.toString('latin1')));
      socket.on('error', reject);
      socket.on('close', () => resolve(answer.split('\r\n', 1)[0] ?? ''));
    });
  for (let count = 0; count < 5; count++) t.equal(await statusLine(), 'HTTP/1.1 404 Not Found');
});
