import { execFileSync, spawn } from 'node:child_process';
import {
  type AddressInfo,
  createServer as createTcpServer,
  type Socket,
  type Server as TcpServer,
} from 'node:net';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import tls, { createServer, getCACertificates, setDefaultCACertificates, type TLSSocket } from 'node:tls';
import t, { type Test } from 'tap';
import { type Connector, type ConnectorOptions, createConnector } from '../../src/deliver/connect.ts';
import { cidr } from '../helpers/cidr.ts';
import { until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { ifHas } from '../helpers/programs.ts';
import { CA_PEM, hangUp, startReceiver, status, tlsFixture } from '../helpers/receiver.ts';

const OTHER_PEM = tlsFixture('self-signed.pem');
const LOCALHOST = { cert: tlsFixture('localhost.pem'), key: tlsFixture('localhost.key') };
const REQUEST = 'GET / HTTP/1.1\r\nHost: receiver\r\n\r\n';
const UNKNOWN_AUTHORITY = /^tls: certificate is from an unknown authority/;

t.test('an authority that was removed is no longer trusted, nor are sessions made with it', async (t) => {
  const receiver = await startReceiver(t, { tls: 'localhost' });
  const url = new URL(receiver.url);
  const connector = newConnector({ caPem: CA_PEM });
  t.match(await exchange(connector, url), /^HTTP\/1\.1 200 /);
  connector.trust(OTHER_PEM);
  await t.rejects(exchange(connector, url), { message: UNKNOWN_AUTHORITY });

  connector.trust(CA_PEM);
  // The session of TLS 1.3 comes behind the handshake.
  const answer = await exchange(connector, url, () => connector.trust(OTHER_PEM));
  t.match(answer, /^HTTP\/1\.1 200 /);
  await t.rejects(exchange(connector, url), { message: UNKNOWN_AUTHORITY });
  t.equal(receiver.requests.length, 2);
});

t.test('authorities that are trusted again take no more memory', async (t) => {
  const connector = newConnector({ caPem: CA_PEM });
  const before = process.memoryUsage.rss();
  for (let times = 0; times < 50; times++) connector.trust(CA_PEM);
  const grownBy = process.memoryUsage.rss() - before;
  t.ok(grownBy < 16 * 1024 * 1024, `grew by ${grownBy}`);
});

t.test('a session is resumed for an hour, and then the certificate is verified again', async (t) => {
  const effects = fakeEffects();
  const receiver = await startReceiver(t, { tls: 'localhost' });
  const connector = newConnector({ caPem: CA_PEM }, effects);
  for (const minutes of [0, 59, 2, 1]) {
    effects.advance(minutes * 60_000);
    await exchange(connector, new URL(receiver.url));
  }
  t.strictSame(
    receiver.requests.map(({ resumed }) => resumed),
    [false, true, false, true],
  );
});

t.test('a session that the receiver fails to resume is not offered again', async (t) => {
  // Record type alert, TLS 1.2, 2 bytes: fatal, handshake_failure (RFC 8446, section 6).
  const alert = Buffer.from([0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 0x28]);
  const { url, resumed } = await receiverExcept(t, (third) => third.end(alert));
  const connector = newConnector({ caPem: CA_PEM });
  await exchange(connector, url);
  await exchange(connector, url);
  await t.rejects(exchange(connector, url), { message: /^tls: .*handshake failure: / });
  await exchange(connector, url);
  t.strictSame(resumed, [false, true, false]);
});

t.test('a session with which the receiver broke a handshake off is not offered again', async (t) => {
  const { url, resumed } = await receiverExcept(t, (third) =>
    third.once('data', () => third.resetAndDestroy()),
  );
  const connector = newConnector({ caPem: CA_PEM });
  await exchange(connector, url);
  await exchange(connector, url);
  await t.rejects(exchange(connector, url), { code: 'ECONNRESET' });
  await exchange(connector, url);
  t.strictSame(resumed, [false, true, false]);
});

t.test('a session over which a handshake hung until it was given up is not offered again', async (t) => {
  const hello = Promise.withResolvers<Buffer>();
  const { url, resumed } = await receiverExcept(t, (third) => third.once('data', hello.resolve));
  const connector = newConnector({ caPem: CA_PEM });
  await exchange(connector, url);
  await exchange(connector, url);
  const socket = connector.connect(url, { connected() {}, received() {}, closed() {} }, null);
  await hello.promise;
  socket.destroy();
  await exchange(connector, url);
  t.strictSame(resumed, [false, true, false]);
});

/** A receiver that records which sessions it resumed. Its third connection is left to `onThird`. */
async function receiverExcept(t: Test, onThird: (socket: Socket) => void) {
  const resumed: boolean[] = [];
  const receiver = createServer(LOCALHOST, (socket) => {
    resumed.push(socket.isSessionReused());
    socket.once('data', () => socket.end('HTTP/1.1 200 OK\r\n\r\n'));
  });
  let connections = 0;
  const front = createTcpServer((socket) => {
    connections += 1;
    if (connections === 3) onThird(socket);
    else receiver.emit('connection', socket);
  });
  return { url: new URL(`https://localhost:${await portOf(t, front)}/`), resumed };
}

t.test(
  'no cipher suite is offered with which a receiver chooses the group of the key exchange',
  async (t) => {
    const hello = Promise.withResolvers<Buffer>();
    const server = createTcpServer((socket) =>
      socket.once('data', (bytes) => socket.end(() => hello.resolve(bytes))),
    );
    const url = new URL(`https://localhost:${await portOf(t, server)}/`);
    await t.rejects(exchange(newConnector({}), url));
    const offered = cipherSuitesOf(await hello.promise);
    t.ok(offered.includes('c02f'), 'ECDHE-RSA-AES128-GCM-SHA256');
    // DHE-RSA with AES128-GCM, AES256-GCM, ChaCha20, AES128-CBC and AES256-CBC, each with SHA-256
    for (const suite of ['009e', '009f', 'ccaa', '0067', '006b']) t.notOk(offered.includes(suite), suite);
  },
);

t.test('a receiver that answers in very many tiny records is left, whatever came before', async (t) => {
  const answers = [1024, 1025];
  const server = createServer(LOCALHOST, (socket) => {
    socket.on('error', () => undefined);
    socket.on('data', () => sendRecords(socket, answers.shift() ?? 0));
  });
  const url = new URL(`https://localhost:${await portOf(t, server)}/`);
  const came: number[] = [];
  const ended = Promise.withResolvers<Error | null>();
  const events = {
    connected: () => socket.write(REQUEST),
    received(bytes: Buffer) {
      came.push(bytes.length);
      if (came.length === 1024) socket.write(REQUEST);
      if (came.length > 2048) ended.resolve(null);
    },
    closed: ended.resolve,
  };
  const socket = newConnector({ caPem: CA_PEM }).connect(url, events, null);
  t.teardown(() => socket.destroy());
  t.match(await ended.promise, { message: 'invalid_response' });
  t.strictSame(came, Array(2048).fill(1));
});

/** Each of one byte: what is written before the last write has ended would come in one record with others. */
function sendRecords(socket: TLSSocket, count: number): void {
  if (count > 0) socket.write('x', () => sendRecords(socket, count - 1));
}

t.test('a receiver that gives sessions without end is left', ifHas('openssl'), async (t) => {
  const { url } = await opensslReceiver(t, '-www', '-num_tickets', '40');
  await t.rejects(exchange(newConnector({ caPem: CA_PEM }), url), { message: 'invalid_response' });
});

t.test('a receiver may update its keys now and then, but not without end', ifHas('openssl'), async (t) => {
  const { url, ask, heard } = await opensslReceiver(t, '-msg');
  const came: string[] = [];
  const ended = Promise.withResolvers<Error | null>();
  const events = {
    connected: () => socket.write('first\n'),
    received: (bytes: Buffer) => came.push(bytes.toString()),
    closed: ended.resolve,
  };
  const socket = newConnector({ caPem: CA_PEM }).connect(url, events, null);
  t.teardown(() => socket.destroy());
  await heard('first');
  // K asks for an update of the other side's keys in return, which may come with the next request only.
  for (const [update, times] of [
    ['K', 6],
    ['k', 12],
    ['k', 12],
  ] as const) {
    for (let updates = 0; updates < times; updates++) await ask(update);
    const answer = `answer ${came.length}`;
    await ask(answer, () => came.at(-1) === `${answer}\n`);
    if (came.length < 3) socket.write('next\n');
  }
  // Nothing is asked of it now, as of a connection that is idle. The last of these is the 17th.
  for (let updates = 0; updates < 5; updates++) await ask('k');
  t.match(await ended.promise, { message: 'invalid_response' });
});

t.test('the hour ends too if a receiver gives a new session each time', ifHas('openssl'), async (t) => {
  const effects = fakeEffects();
  const { url } = await opensslReceiver(t, '-www');
  const connector = newConnector({ caPem: CA_PEM }, effects);
  const handshakes: unknown[] = [];
  for (const minutes of [0, 59, 2]) {
    effects.advance(minutes * 60_000);
    handshakes.push(/^(New|Reused), TLSv1\.3/m.exec(await exchange(connector, url))?.[1]);
  }
  t.strictSame(handshakes, ['New', 'Reused', 'New']);
});

/** `ask` gives a command of s_server, or a text to be sent, and waits: for the key update by default, which needs -msg. */
async function opensslReceiver(t: Test, ...more: string[]) {
  const key = join(import.meta.dirname, '../fixtures/tls/localhost.key');
  const words = ['s_server', '-accept', '127.0.0.1:0', '-cert', key.replace('.key', '.pem'), '-key', key];
  const openssl = spawn('openssl', [...words, '-tls1_3', ...more], { stdio: ['pipe', 'pipe', 'ignore'] });
  t.teardown(() => openssl.kill());
  let said = '';
  openssl.stdout.on('data', (bytes) => {
    said += bytes;
  });
  await until(() => /ACCEPT .*:\d+\n/.test(said));
  const url = new URL(`https://localhost:${/ACCEPT .*:(\d+)\n/.exec(said)?.[1]}/`);
  const updates = () => said.match(/>>> .*KeyUpdate/g)?.length ?? 0;
  return {
    url,
    heard: (text: string) => until(() => said.includes(text)),
    async ask(command: string, isDone?: () => boolean) {
      const before = updates();
      openssl.stdin.write(`${command}\n`);
      await until(isDone ?? (() => updates() > before));
    },
  };
}

t.test('a receiver may ask for an optional client certificate once it has the request', async (t) => {
  const url = await renegotiatingReceiver(t, (socket) => {
    socket.on('data', () => askForCertificate(socket, () => socket.write('HTTP/1.1 200 OK\r\n\r\n')));
  });
  let answers = 0;
  const ended = Promise.withResolvers<Error | null>();
  const events = {
    connected: () => socket.write(REQUEST),
    received() {
      answers += 1;
      if (answers < 20) socket.write(REQUEST);
      else ended.resolve(null);
    },
    closed: ended.resolve,
  };
  const socket = newConnector({ caPem: CA_PEM }).connect(url, events, null);
  t.teardown(() => socket.destroy());
  t.equal(await ended.promise, null);
  t.equal(answers, 20, 'over one connection');
});

t.test('a receiver that asks for handshakes without end is left', async (t) => {
  let count = 0;
  const url = await renegotiatingReceiver(t, (socket) => {
    const again = () => {
      count += 1;
      askForCertificate(socket, again);
    };
    socket.once('data', again);
  });
  await t.rejects(exchange(newConnector({ caPem: CA_PEM }), url), { message: 'invalid_response' });
  t.ok(count <= 17, `${count}`);
});

/** On TLS 1.2, and without Node's own bound for handshakes. */
async function renegotiatingReceiver(t: Test, onConnection: (socket: TLSSocket) => void): Promise<URL> {
  const { CLIENT_RENEG_LIMIT } = tls;
  t.teardown(() => Object.assign(tls, { CLIENT_RENEG_LIMIT }));
  Object.assign(tls, { CLIENT_RENEG_LIMIT: Number.POSITIVE_INFINITY });
  const server = createServer({ ...LOCALHOST, maxVersion: 'TLSv1.2' }, (socket) => {
    socket.on('error', () => undefined);
    onConnection(socket);
  });
  return new URL(`https://localhost:${await portOf(t, server)}/`);
}

function askForCertificate(socket: TLSSocket, onAnswer: () => void): void {
  socket.renegotiate({ requestCert: true, rejectUnauthorized: false }, (error) => {
    if (error === null) onAnswer();
  });
}

/** In a ClientHello they follow the record's head, the message's, the version, 32 random bytes and a session id. */
function cipherSuitesOf(hello: Buffer): string[] {
  const start = 5 + 4 + 2 + 32 + 1 + hello.readUInt8(5 + 4 + 2 + 32);
  return hello.toString('hex', start + 2, start + 2 + hello.readUInt16BE(start)).match(/.{4}/g) ?? [];
}

t.test('a receiver that demands a client certificate fails with that reason', async (t) => {
  const server = createServer({ ...LOCALHOST, requestCert: true, rejectUnauthorized: true }, () =>
    t.fail('nobody gets in'),
  );
  const url = new URL(`https://127.0.0.1:${await portOf(t, server)}/`);
  await t.rejects(exchange(newConnector({ caPem: CA_PEM }), url), {
    message: 'tls: the receiver requires a client certificate',
  });
});

t.test('a receiver that speaks only older TLS fails with that reason', async (t) => {
  const versions = { minVersion: 'TLSv1', maxVersion: 'TLSv1.1' } as const;
  const old = createServer({ ...LOCALHOST, ...versions, ciphers: 'DEFAULT@SECLEVEL=0' });
  // A ServerHello of TLS 1.1 (RFC 4346, section 7.4.1.3), whatever the client offered.
  const hello = Buffer.from(`160302002a020000260302${'00'.repeat(32)}00002f00`, 'hex');
  const stubborn = createTcpServer((socket) => socket.once('data', () => socket.end(hello)));
  for (const server of [old, stubborn]) {
    const url = new URL(`https://127.0.0.1:${await portOf(t, server)}/`);
    await t.rejects(exchange(newConnector({ caPem: CA_PEM }), url), {
      message: 'tls: the receiver speaks no TLS 1.2 or newer',
    });
  }
});

t.test(
  'a certificate that breaks a rule without a code of its own is refused with the reason',
  ifHas('openssl'),
  async (t) => {
    const [curve, extension] = ['ec_paramgen_curve:prime256v1', '1.2.3.4=critical,DER:0500'];
    const words = ['req', '-x509', '-newkey', 'ec', '-pkeyopt', curve, '-nodes', '-subj', '/CN=localhost'];
    const made = execFileSync('openssl', [...words, '-addext', extension, '-keyout', '-', '-out', '-'], {
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    const port = await portOf(t, createServer({ cert: made, key: made }));
    await t.rejects(exchange(newConnector({ caPem: made }), new URL(`https://127.0.0.1:${port}/`)), {
      message: 'tls: unhandled critical extension',
    });
  },
);

t.test('NODE_TLS_REJECT_UNAUTHORIZED=0 does not disable certificate checks', async (t) => {
  const receiver = await startReceiver(t, { tls: 'self-signed' });
  t.teardown(() => delete process.env['NODE_TLS_REJECT_UNAUTHORIZED']);
  process.env['NODE_TLS_REJECT_UNAUTHORIZED'] = '0';
  const connector = newConnector({ caPem: CA_PEM });
  await t.rejects(exchange(connector, new URL(receiver.url)), { message: 'tls: certificate is self-signed' });
  t.equal(receiver.requests.length, 0);
});

t.test('certificates of your own are trusted in addition to the usual ones', async (t) => {
  const receiver = await startReceiver(t, { tls: 'localhost' });
  const usual = getCACertificates('default');
  t.teardown(() => setDefaultCACertificates(usual));
  setDefaultCACertificates([CA_PEM]);
  const connector = newConnector({ caPem: OTHER_PEM });
  t.match(await exchange(connector, new URL(receiver.url)), /^HTTP\/1\.1 200 /);
});

t.test('the handshake sends the host name without a final dot, no address, and HTTP/1.1', async (t) => {
  const told: unknown[] = [];
  const server = createServer(
    {
      cert: tlsFixture('localhost.pem'),
      key: tlsFixture('localhost.key'),
      ALPNProtocols: ['h2', 'http/1.1'],
    },
    (socket) => {
      told.push([socket.servername, socket.alpnProtocol]);
      socket.end('HTTP/1.1 200 OK\r\n\r\n');
    },
  );
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  t.teardown(() => server.close());
  const { port } = server.address() as AddressInfo;
  const connector = newConnector({
    caPem: CA_PEM,
    lookUp: async () => [{ address: '127.0.0.1', family: 4 }],
  });
  for (const host of ['receiver.example', 'receiver.example.', '127.0.0.1'])
    await exchange(connector, new URL(`https://${host}:${port}/`));
  t.strictSame(told, [
    ['receiver.example', 'http/1.1'],
    ['receiver.example', 'http/1.1'],
    [false, 'http/1.1'],
  ]);
});

t.test('a URL without a port uses the default port of its scheme', async (t) => {
  // A public address that a test machine has not: nothing is sent to it, as it is refused.
  const machineAddresses = () => ['93.184.216.34'];
  for (const [url, port] of [
    ['http://93.184.216.34/', 80],
    ['https://93.184.216.34/', 443],
  ] as const) {
    const connector = newConnector({ refusedAddresses: [{ host: '0.0.0.0', port }], machineAddresses });
    await t.rejects(exchange(connector, new URL(url)), { message: 'address_refused' }, url);
  }
});

t.test('the addresses of this machine are read once for all addresses of a name', async (t) => {
  let reads = 0;
  const connector = newConnector({
    refusedAddresses: [{ host: '0.0.0.0', port: 443 }],
    machineAddresses: () => {
      reads += 1;
      return ['93.184.216.34'];
    },
    lookUp: async () =>
      ['93.184.216.35', '93.184.216.36', '93.184.216.34'].map((address) => ({ address, family: 4 })),
  });
  const url = new URL('https://receiver.example/');
  await t.rejects(exchange(connector, url), { message: 'address_refused' });
  t.equal(reads, 1);
});

t.test('if the addresses of this machine cannot be read, a connection ends with that error', async (t) => {
  const connector = newConnector({
    refusedAddresses: [{ host: '0.0.0.0', port: 8080 }],
    machineAddresses() {
      throw new Error('too many open files');
    },
  });
  const ended = new Promise<Error | null>((closed) => {
    const events = { connected() {}, received() {}, closed };
    t.doesNotThrow(() => connector.connect(new URL('http://93.184.216.34:8080/'), events, null));
  });
  t.match(await ended, { message: 'too many open files' });
});

t.test('the end of a connection is reported once, and not for one that was destroyed', async (t) => {
  const closing = await startReceiver(t, { answers: [hangUp()] });
  const answering = await startReceiver(t, { answers: [status(200)] });
  const gone = await startReceiver(t);
  await gone.close();
  const connector = newConnector({});
  const ends: string[] = [];
  const open = (url: string) => {
    const socket = connector.connect(
      new URL(url),
      {
        connected: () => (url === answering.url ? socket.destroy() : socket.write(REQUEST)),
        received() {},
        closed: (error) => ends.push(error?.message ?? 'in order'),
      },
      null,
    );
    return socket;
  };
  open('http://10.0.0.1/').destroy();
  open(answering.url);
  open(closing.url);
  open(gone.url);
  await Promise.all([closing.next().then(() => closing.deserted()), connected(answering)]);
  await answering.deserted();
  await until(() => ends.length >= 2);
  for (let turn = 0; turn < 10; turn++) await nextTurn();
  t.strictSame(ends.map((end) => end.replace(/ 127.*/, '')).sort(), ['connect ECONNREFUSED', 'in order']);

  async function connected({ connections }: typeof answering): Promise<void> {
    while (connections() === 0) await nextTurn();
  }
});

function newConnector(options: Partial<ConnectorOptions>, effects = fakeEffects()): Connector {
  return createConnector({ timeoutMs: 10_000, allowedCidrs: [cidr('127.0.0.0/8')], ...options }, effects);
}

/** Listens until the test ends. */
async function portOf(t: Test, server: TcpServer): Promise<number> {
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  t.teardown(() => server.close());
  return (server.address() as AddressInfo).port;
}

/** The first that comes back; rejects if nothing does. `onConnected` is called before anything is sent. */
function exchange(
  { connect }: Connector,
  url: URL,
  onConnected: () => void = () => undefined,
): Promise<string> {
  return new Promise((resolve, reject) => {
    const socket = connect(
      url,
      {
        connected() {
          onConnected();
          socket.write(REQUEST);
        },
        received(bytes) {
          resolve(bytes.toString());
          socket.destroy();
        },
        closed: (error) => reject(error ?? new Error('closed in order')),
      },
      null,
    );
  });
}
