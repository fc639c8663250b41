import { once } from 'node:events';
import { type AddressInfo, createServer, type Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import { version } from '../../src/assets.ts';
import { createSender, type SenderOptions } from '../../src/deliver/send.ts';
import { LONGEST_DURATION, parseDuration } from '../../src/durations.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { collectGarbage } from '../../src/memory.ts';
import { cidr } from '../helpers/cidr.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { NOWHERE } from '../helpers/nowhere.ts';
import {
  CA_PEM,
  endless,
  hangUp,
  held,
  type Receiver,
  raw,
  redirect,
  reset,
  silence,
  startReceiver,
  status,
  unfinished,
} from '../helpers/receiver.ts';

const BODY = '{"id":"evt_1","data":{"ref":"café 🚀"}}';
const TIMEOUT_MS = 10_000;

const LOOPBACK = [cidr('127.0.0.0/8'), cidr('::1/128')];
/** Of a connection to it, Linux says that there is no way to it, without sending anything. */
const BROADCAST = cidr('255.255.255.255');

/** A sender on a clock that stands, which may reach this machine; closed with the test. */
function newSender(t: Test, options: Partial<SenderOptions> = {}, effects = fakeEffects()) {
  const sender = createSender(
    {
      timeoutMs: TIMEOUT_MS,
      allowHttp: true,
      allowedCidrs: LOOPBACK,
      caPem: CA_PEM,
      ...options,
    },
    effects,
  );
  t.teardown(() => sender.close());
  const send = (url: string, headers: Record<string, string> = {}, body = BODY) =>
    sender.send({ url, headers, renewHeaders: () => headers, body, key: null });
  return { sender, send, effects };
}

/** A resolver that gives these answers one after the other, and counts the questions. */
function scripted(...answers: string[][]) {
  const asked: string[] = [];
  return {
    asked,
    lookUp: async (hostname: string) => {
      const addresses = answers[Math.min(asked.length, answers.length - 1)] ?? [];
      asked.push(hostname);
      return addresses.map((address) => ({ address, family: address.includes(':') ? 6 : 4 }));
    },
  };
}

/** The same place under a name that a resolver has to answer for. */
function named(receiver: Receiver, name = 'receiver.example'): string {
  return receiver.url.replace('127.0.0.1', name);
}

t.test('a delivery', async (t) => {
  t.test('is one POST with exactly the given bytes', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t);
    const outcome = await send(`${receiver.url}?a=1&b=%20`, {
      'Service-Signature': 't=1,v1=00',
      'webhook-id': 'evt_1',
    });
    t.same(outcome, {
      ok: true,
      statusCode: 200,
      error: null,
      durationMs: 0,
      remoteAddress: '127.0.0.1',
      responseBody: '',
      retryAfter: null,
    });
    const { method, path, headers, body } = await receiver.next();
    t.equal(method, 'POST');
    t.equal(path, '/hook?a=1&b=%20');
    t.equal(body.toString(), BODY);
    t.same(headers, {
      host: `127.0.0.1:${receiver.port}`,
      connection: 'keep-alive',
      'content-type': 'application/json',
      'content-length': String(Buffer.byteLength(BODY)),
      'user-agent': `davit/${version}`,
      'service-signature': 't=1,v1=00',
      'webhook-id': 'evt_1',
    });
    t.equal(receiver.requests.length, 1);
  });

  t.test('may have an empty body, or one longer than a single write', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t);
    for (const body of ['', 'é🚀'.repeat(200_000)]) {
      t.ok((await send(receiver.url, {}, body)).ok);
      const received = await receiver.next();
      t.equal(received.body.toString(), body);
      t.equal(received.headers['content-length'], String(Buffer.byteLength(body)));
    }
  });

  t.test('succeeds with every 2xx and with nothing else', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t);
    for (const code of [200, 201, 202, 204, 299, 300, 304, 400, 404, 410, 429, 500, 503, 599]) {
      receiver.answerWith(status(code));
      const { ok, statusCode, error } = await send(receiver.url);
      t.same({ ok, statusCode, error }, { ok: code < 300, statusCode: code, error: null });
    }
  });

  t.test('reports how long the receiver took', async (t) => {
    const later = held(status(200));
    const receiver = await startReceiver(t, { answers: [later.answer] });
    const { send, effects } = newSender(t);
    const outcome = send(receiver.url);
    await receiver.next();
    effects.advance(1_234.4);
    later.release();
    t.match(await outcome, { ok: true, durationMs: 1_234 });
  });

  t.test('reports the time until the status, not that of the body', async (t) => {
    const finish = Promise.withResolvers<() => void>();
    const receiver = await startReceiver(t, {
      answers: [
        (response) => {
          response.writeHead(200).write('a');
          finish.resolve(() => response.end('b'));
        },
      ],
    });
    const { send, effects } = newSender(t);
    const outcome = send(receiver.url);
    const end = await finish.promise;
    await quiet();
    effects.advance(3_000);
    end();
    t.match(await outcome, { ok: true, durationMs: 0, responseBody: 'ab' });
  });

  t.test('returns Retry-After unchanged', async (t) => {
    const receiver = await startReceiver(t, {
      answers: [status(429, { headers: { 'Retry-After': ' 120 ' } })],
    });
    const { send } = newSender(t);
    t.match(await send(receiver.url), { ok: false, statusCode: 429, retryAfter: '120' });
  });

  t.test('never follows a redirect', async (t) => {
    const second = await startReceiver(t);
    const first = await startReceiver(t, { answers: [redirect(second.url)] });
    const { send } = newSender(t);
    t.match(await send(first.url), { ok: false, statusCode: 302, error: null });
    t.equal(second.connections(), 0, 'the second receiver was never visited');
  });

  t.test('waits for the answer behind 100 Continue and 103 Early Hints', async (t) => {
    const receiver = await startReceiver(t, {
      answers: [
        raw(
          'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n',
        ),
      ],
    });
    const { send } = newSender(t);
    t.match(await send(receiver.url), { ok: true, statusCode: 202 });
  });
});

t.test('the body of an answer', async (t) => {
  const bodyOf = async (t: Test, body: string | Uint8Array) => {
    const receiver = await startReceiver(t, { answers: [status(200, { body })] });
    return (await newSender(t).send(receiver.url)).responseBody;
  };

  t.test('is kept up to 4 KiB', async (t) => {
    t.equal(await bodyOf(t, 'thanks'), 'thanks');
    t.equal(await bodyOf(t, 'x'.repeat(4_096)), 'x'.repeat(4_096));
    t.equal(await bodyOf(t, 'x'.repeat(4_097)), 'x'.repeat(4_096));
    t.equal(await bodyOf(t, `${'x'.repeat(4_093)}🚀y`), 'x'.repeat(4_093), 'no half characters');
  });

  t.test('has invalid UTF-8 and NUL replaced', async (t) => {
    t.equal(await bodyOf(t, Buffer.from([0x61, 0xff, 0x00, 0x62])), 'a\ufffd\ufffdb');
    t.equal(await bodyOf(t, Buffer.from([0x61, 0xf0, 0x9f])), 'a\ufffd');
    t.equal(await bodyOf(t, '\ufeffa'), '\ufeffa', 'and nothing else');
  });

  t.test('is kept up to 4 KiB also if replacing made it longer', async (t) => {
    const replaced = '\ufffd'.repeat(1_365); // of three bytes each
    t.equal(await bodyOf(t, Buffer.alloc(1_365, 0xff)), replaced);
    t.equal(await bodyOf(t, Buffer.alloc(4_096, 0xff)), replaced);
    t.equal(await bodyOf(t, Buffer.alloc(16_384)), replaced);
    const before = 'x'.repeat(4_090);
    t.equal(await bodyOf(t, `\0${before}🚀`), `\ufffd${before}`, 'no half characters');
  });

  t.test('is read up to 16 KiB, and the connection is reused', async (t) => {
    const receiver = await startReceiver(t, { answers: [status(200, { body: 'x'.repeat(16_384) })] });
    const { send } = newSender(t);
    t.ok((await send(receiver.url)).ok);
    t.ok((await send(receiver.url)).ok);
    t.equal(receiver.connections(), 1);
  });

  t.test('of more than 16 KiB is not waited for', async (t) => {
    const receiver = await startReceiver(t, { answers: [unfinished(200, 'x'.repeat(16_384))] });
    const { send, effects } = newSender(t);
    const attended = send(receiver.url);
    await receiver.next();
    t.equal(await Promise.race([attended, quiet()]), undefined);
    effects.advance(TIMEOUT_MS);
    t.match(await attended, { ok: true, durationMs: 0 });

    receiver.answerWith(unfinished(200, 'x'.repeat(16_385)));
    t.match(await send(receiver.url), { ok: true, statusCode: 200, error: null });
    await receiver.deserted();
  });

  t.test('without end is cut off, and the status counts', async (t) => {
    const receiver = await startReceiver(t, { answers: [endless(200), endless(500), status(200)] });
    const { send } = newSender(t);
    t.match(await send(receiver.url), {
      ok: true,
      statusCode: 200,
      error: null,
      responseBody: 'x'.repeat(4_096),
    });
    t.match(await send(receiver.url), { ok: false, statusCode: 500, error: null });
    await receiver.deserted();
    t.ok((await send(receiver.url)).ok);
    t.equal(receiver.connections(), 3);
  });

  t.test('in tiny chunks is cut off after 8 KiB of chunk lines, and the status counts', async (t) => {
    const tiny = `HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n${'1\r\nx\r\n'.repeat(1_800)}`;
    const receiver = await startReceiver(t, { answers: [raw(tiny)] });
    const { send } = newSender(t);
    const { ok, error, responseBody } = await send(receiver.url);
    t.strictSame({ ok, error }, { ok: true, error: null });
    t.equal(responseBody, 'x'.repeat(Math.floor(8_192 / '1\r\n\r\n'.length)));
  });

  t.test('is not waited for after the deadline, and the status counts', async (t) => {
    const receiver = await startReceiver(t, { answers: [unfinished(201, 'so far'), status(200)] });
    const { send, effects } = newSender(t);
    const outcome = send(receiver.url);
    await receiver.next();
    await quiet();
    effects.advance(TIMEOUT_MS);
    t.match(await outcome, { ok: true, statusCode: 201, error: null, responseBody: 'so far' });
    await receiver.deserted();
    t.ok((await send(receiver.url)).ok);
  });

  t.test('ends the attempt even if the receiver has not read the request', async (t) => {
    const { port } = await startTcp(t, (socket) => socket.pause().end('HTTP/1.1 413 Too Large\r\n\r\nno'));
    const { send } = newSender(t);
    // More than the system's buffers hold.
    const outcome = await send(`http://127.0.0.1:${port}/`, {}, 'x'.repeat(16e6));
    t.match(outcome, { ok: false, statusCode: 413, error: null, responseBody: 'no' });
  });

  t.test('that breaks off does not change the status', async (t) => {
    const receiver = await startReceiver(t, {
      answers: [raw('HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this')],
    });
    const { send } = newSender(t);
    t.match(await send(receiver.url), { ok: true, statusCode: 200, error: null, responseBody: 'only this' });
  });
});

/** A server below HTTP and TLS: `serve` gets each connection with the first bytes that come on it. */
async function startTcp(t: Test, serve: (socket: Socket) => void) {
  const accepted = Promise.withResolvers<void>();
  const server = createServer((socket) => {
    t.teardown(() => socket.destroy());
    socket.on('error', () => {}).once('data', () => serve(socket));
    accepted.resolve();
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  t.teardown(() => server.close());
  return { port: (server.address() as AddressInfo).port, accepted: accepted.promise };
}

/** A server that answers each request with 200, and whose sockets a test may write to. */
async function startTalkative(t: Test) {
  const sockets: Socket[] = [];
  const { port } = await startTcp(t, (socket) => {
    const answer = () => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n');
    sockets.push(socket.on('data', answer));
    answer();
  });
  return { port, sockets };
}

/** Lets what was written be read: on the loopback interface it is there when the write returns, some turns of the event loop away. */
async function quiet(): Promise<void> {
  for (let turn = 0; turn < 50; turn++) await new Promise((resolve) => setImmediate(resolve));
}

t.test('an attempt fails', async (t) => {
  const errorOf = async (t: Test, answer: Parameters<Receiver['answerWith']>[0]) => {
    const receiver = await startReceiver(t, { answers: [answer] });
    const outcome = await newSender(t).send(receiver.url);
    t.match(outcome, { ok: false, statusCode: null, responseBody: null, retryAfter: null });
    t.equal(receiver.requests.length, 1, 'and was made once');
    return outcome.error;
  };

  t.test('if the receiver is not there', async (t) => {
    const receiver = await startReceiver(t);
    await receiver.close();
    t.match(await newSender(t).send(receiver.url), {
      ok: false,
      statusCode: null,
      error: 'connection_refused',
      remoteAddress: '127.0.0.1',
    });
  });

  t.test('if it is not there, at none of its addresses, as at the last one', async (t) => {
    const receiver = await startReceiver(t);
    await receiver.close();
    for (const url of [named(receiver), named(receiver).replace('http:', 'https:')]) {
      const { send } = newSender(t, {
        allowedCidrs: [...LOOPBACK, BROADCAST],
        lookUp: scripted(['255.255.255.255', '127.0.0.2']).lookUp,
      });
      t.match(await send(url), { error: 'connection_refused', remoteAddress: '127.0.0.2' }, url);
    }
  });

  t.test('if there is no way to the receiver', async (t) => {
    const { send } = newSender(t, { allowedCidrs: [BROADCAST] });
    t.match(await send('http://255.255.255.255/'), {
      ok: false,
      statusCode: null,
      error: 'unreachable',
      remoteAddress: '255.255.255.255',
    });
  });

  t.test('if the connection breaks', async (t) => {
    t.equal(await errorOf(t, reset()), 'connection_reset');
    t.equal(await errorOf(t, hangUp()), 'connection_closed');
    t.equal(await errorOf(t, raw('HTTP/1.1 200')), 'connection_closed');
  });

  t.test('if what comes back is not HTTP', async (t) => {
    t.equal(await errorOf(t, raw('SSH-2.0-OpenSSH_9.2\r\n')), 'invalid_response');
    t.equal(
      await errorOf(t, raw('HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n')),
      'invalid_response',
    );
  });

  t.test('if the name does not resolve', async (t) => {
    const nowhere = newSender(t, { lookUp: () => Promise.reject(new Error('ENOTFOUND')) });
    t.match(await nowhere.send('https://receiver.example/'), {
      ok: false,
      error: 'dns',
      remoteAddress: null,
    });
    const empty = newSender(t, { lookUp: () => Promise.resolve([]) });
    t.match(await empty.send('https://receiver.example/'), { ok: false, error: 'dns', remoteAddress: null });
    const bySystem = newSender(t);
    t.match(await bySystem.send(`https://${NOWHERE}/`), {
      ok: false,
      error: 'dns',
      remoteAddress: null,
    });
  });

  t.test('if the URL is invalid or of another scheme', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t, { allowHttp: false });
    for (const url of [receiver.url, 'ftp://example.com/', 'receiver.example', '']) {
      t.match(await send(url), { ok: false, error: 'url_refused', remoteAddress: null }, url);
    }
    const other = receiver.url.replace('http:', 'ftp:');
    t.match(await newSender(t, { allowHttp: true }).send(other), { ok: false, error: 'url_refused' });
    t.equal(receiver.connections(), 0);
  });
});

t.test('the deadline', async (t) => {
  t.test('ends an attempt that gets no answer, and its connection', async (t) => {
    const receiver = await startReceiver(t, { answers: [silence(), status(200)] });
    const { send, effects } = newSender(t);
    const outcome = send(receiver.url);
    await receiver.next();
    effects.advance(TIMEOUT_MS);
    t.match(await outcome, {
      ok: false,
      statusCode: null,
      error: 'timeout',
      durationMs: TIMEOUT_MS,
      remoteAddress: '127.0.0.1',
    });
    await receiver.deserted();
    t.ok((await send(receiver.url)).ok);
    t.equal(receiver.connections(), 2);
  });

  t.test('ends an attempt that has received half a head', async (t) => {
    const receiver = await startReceiver(t, {
      answers: [(response) => response.socket?.write('HTTP/1.1 200 OK\r\nX-Slow: ')],
    });
    const { send, effects } = newSender(t);
    const outcome = send(receiver.url);
    await receiver.next();
    await quiet();
    effects.advance(TIMEOUT_MS);
    t.match(await outcome, { ok: false, statusCode: null, error: 'timeout' });
    await receiver.deserted();
  });

  t.test('includes resolving the name', async (t) => {
    const receiver = await startReceiver(t);
    const answer = Promise.withResolvers<{ address: string; family: number }[]>();
    const { send, effects } = newSender(t, { lookUp: () => answer.promise });
    const outcome = send(named(receiver));
    effects.advance(TIMEOUT_MS);
    t.match(await outcome, { error: 'timeout', remoteAddress: null, durationMs: TIMEOUT_MS });
    answer.resolve([{ address: '127.0.0.1', family: 4 }]);
    await quiet();
    t.equal(receiver.connections(), 0, 'an answer that comes later opens nothing');
  });

  t.test('includes the TLS handshake', async (t) => {
    const { port, accepted } = await startTcp(t, () => {});
    const { send, effects } = newSender(t);
    const outcome = send(`https://127.0.0.1:${port}/`);
    await accepted;
    await quiet();
    effects.advance(TIMEOUT_MS);
    t.match(await outcome, { error: 'timeout', remoteAddress: '127.0.0.1' });
  });

  t.test('does not hide an answer that davit, held up, has not read yet', async (t) => {
    const { answer, release } = held(status(204));
    const receiver = await startReceiver(t, { answers: [answer] });
    const fake = fakeEffects();
    // The event loop turns before a timer that is set by another one.
    const after: Effects['after'] = (delayMs, action) =>
      delayMs === 0 ? realEffects.after(0, action) : fake.after(delayMs, action);
    const { send } = newSender(t, {}, { ...fake, after });
    const outcome = send(receiver.url);
    await receiver.next();
    realEffects.after(0, () => {
      release();
      fake.advance(2 * TIMEOUT_MS);
    });
    t.match(await outcome, { ok: true, statusCode: 204, error: null, durationMs: 2 * TIMEOUT_MS });
  });

  t.test('is not prolonged by an attempt on a second connection', async (t) => {
    const receiver = await startReceiver(t, { answers: [status(200), reset(), silence()] });
    const { send, effects } = newSender(t);
    t.ok((await send(receiver.url)).ok);
    effects.advance(1_000);
    const outcome = send(receiver.url);
    for (const _ of [1, 2, 3]) await receiver.next();
    effects.advance(TIMEOUT_MS);
    t.match(await outcome, { error: 'timeout', durationMs: TIMEOUT_MS });
  });
});

t.test('over TLS', async (t) => {
  t.test('a certificate of a trusted authority is accepted', async (t) => {
    const receiver = await startReceiver(t, { tls: 'localhost' });
    const { send } = newSender(t, { lookUp: scripted(['127.0.0.1']).lookUp });
    t.match(await send(receiver.url), { ok: true, remoteAddress: '127.0.0.1' }, 'for an address');
    t.match(await send(named(receiver)), { ok: true, remoteAddress: '127.0.0.1' }, 'for a name');
    t.match(await send(named(receiver, 'receiver.example.')), { ok: true }, 'for a name with its final dot');
  });

  t.test('an unknown authority is refused', async (t) => {
    const receiver = await startReceiver(t, { tls: 'localhost' });
    const { send } = newSender(t, { caPem: null });
    t.match(await send(receiver.url), {
      ok: false,
      error: 'tls: certificate is from an unknown authority or its chain is incomplete',
      remoteAddress: '127.0.0.1',
    });
    t.equal(receiver.requests.length, 0);
  });

  t.test('an invalid certificate is refused with the reason', async (t) => {
    for (const [tls, error] of [
      ['wrong-host', 'tls: certificate is for another host'],
      ['expired', 'tls: certificate has expired'],
      ['self-signed', 'tls: certificate is self-signed'],
    ] as const) {
      const receiver = await startReceiver(t, { tls });
      const { send } = newSender(t);
      t.match(await send(receiver.url), { ok: false, statusCode: null, error, remoteAddress: '127.0.0.1' });
      t.equal(receiver.requests.length, 0, 'and nothing was sent');
    }
  });

  t.test('a receiver that speaks plain HTTP is told apart', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t);
    const outcome = await send(receiver.url.replace('http:', 'https:'));
    t.match(outcome, { ok: false, statusCode: null, error: 'tls: the receiver does not speak TLS' });
    t.equal(receiver.requests.length, 0);
  });

  t.test('a failed handshake is reported with its reason', async (t) => {
    const { send } = newSender(t);
    // Record type alert, TLS 1.2, 2 bytes: fatal, handshake_failure (RFC 8446, section 6).
    const alert = Buffer.from([0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 0x28]);
    const refusing = await startTcp(t, (socket) => socket.end(alert));
    const { error } = await send(`https://127.0.0.1:${refusing.port}/`);
    t.match(error, /^tls: .*handshake failure: /);
    const closing = await startTcp(t, (socket) => socket.destroy());
    t.match(await send(`https://127.0.0.1:${closing.port}/`), {
      error: 'connection_reset',
      remoteAddress: '127.0.0.1',
    });
  });

  t.test('sessions are resumed on new connections', async (t) => {
    const receiver = await startReceiver(t, { tls: 'localhost', answers: [hangUpAfter()] });
    const { send } = newSender(t);
    t.ok((await send(receiver.url)).ok);
    t.ok((await send(receiver.url)).ok);
    t.same(
      receiver.requests.map(({ connection, resumed }) => ({ connection, resumed })),
      [
        { connection: 1, resumed: false },
        { connection: 2, resumed: true },
      ],
    );
  });
});

/** An answer after which the connection may not serve again. */
function hangUpAfter() {
  return status(200, { headers: { Connection: 'close' } });
}

t.test('an address that is not allowed', async (t) => {
  const refused = { ok: false, statusCode: null, error: 'address_refused', remoteAddress: null };

  t.test('is refused as a literal, at every attempt', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t, { allowedCidrs: [] });
    for (const host of [
      '127.0.0.1',
      '[::1]',
      '[::ffff:127.0.0.1]',
      '127.1',
      '0',
      'localhost',
      'a.localhost',
    ]) {
      const url = receiver.url.replace('127.0.0.1', host);
      t.match(await send(url), refused, host);
      t.match(await send(url), refused, `${host} again`);
    }
    t.equal(receiver.connections(), 0);
  });

  t.test('is refused behind a name', async (t) => {
    const receiver = await startReceiver(t);
    const { lookUp } = scripted(['127.0.0.1']);
    const { send } = newSender(t, { allowedCidrs: [], lookUp });
    t.match(await send(named(receiver)), refused);
    t.equal(receiver.connections(), 0);
  });

  t.test('makes a name refused that also has allowed ones', async (t) => {
    const receiver = await startReceiver(t);
    for (const answers of [
      ['127.0.0.1', '10.0.0.1'],
      ['10.0.0.1', '127.0.0.1'],
      ['127.0.0.1', 'fd00::1'],
      ['127.0.0.1', '::ffff:127.0.0.1'],
      ['127.0.0.1', '169.254.169.254'],
    ]) {
      const { send } = newSender(t, { lookUp: scripted(answers).lookUp });
      t.match(await send(named(receiver)), refused, answers.join());
    }
    t.equal(receiver.connections(), 0);
  });

  t.test('is refused when a name changes to it later', async (t) => {
    const receiver = await startReceiver(t, { answers: [hangUpAfter()] });
    const { lookUp, asked } = scripted(['127.0.0.1'], ['10.0.0.1'], ['127.0.0.1']);
    const { send } = newSender(t, { lookUp });
    t.ok((await send(named(receiver))).ok);
    await receiver.deserted();
    t.match(await send(named(receiver)), refused);
    t.ok((await send(named(receiver))).ok);
    t.same(
      asked,
      ['receiver.example', 'receiver.example', 'receiver.example'],
      'asked once for each connection',
    );
    t.equal(receiver.connections(), 2);
  });

  t.test('is not reached over a kept connection of another name', async (t) => {
    const receiver = await startReceiver(t);
    const { lookUp, asked } = scripted(['127.0.0.1'], ['10.0.0.1']);
    const { send } = newSender(t, { lookUp });
    t.ok((await send(named(receiver))).ok);
    t.match(
      await send(named(receiver)),
      { ok: true, remoteAddress: '127.0.0.1' },
      'still the one that was judged',
    );
    t.match(await send(named(receiver, 'other.example')), refused, 'which serves no other name');
    t.equal(asked.length, 2);
    t.equal(receiver.connections(), 1);
  });

  t.test('is refused if it is where davit itself listens, unless it was opened', async (t) => {
    // Public ones, which a test machine has not: nothing is sent to them, as they are refused.
    const machineAddresses = () => ['93.184.216.34', '2606:4700:4700::1111'];
    const places = [
      ...['93.184.216.34', '::ffff:93.184.216.34', 'deploy.example'],
      ...['0.0.0.0', '::', '0::0', '0:0:0:0:0:0:0:0', '::ffff:0.0.0.0', '::ffff:0:0'],
    ];
    for (const listening of places) {
      for (const port of [443, 0]) {
        const { lookUp } = scripted(['93.184.216.34']);
        const refusedAddresses = [{ host: listening, port }];
        const { send } = newSender(t, { lookUp, refusedAddresses, machineAddresses });
        t.match(await send('https://receiver.example/'), refused, `${listening} ${port}, behind a name`);
        t.match(await send('https://93.184.216.34/'), refused, `${listening} ${port}, as a literal`);
      }
    }
    const own = await startReceiver(t);
    const other = await startReceiver(t);
    const { send } = newSender(t, { refusedAddresses: [{ host: '127.0.0.1', port: own.port }] });
    t.match(await send(own.url), { ok: true });
    t.match(await send(other.url), { ok: true });
  });
});

t.test('a name', async (t) => {
  t.test('may be resolved under the longest possible timeout', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t, { timeoutMs: parseDuration(LONGEST_DURATION) ?? 0 });
    t.match(await send(named(receiver, 'localhost')), { ok: true });
  });

  t.test('under localhost resolves to the allowed loopback addresses, without DNS', async (t) => {
    const receiver = await startReceiver(t);
    const { lookUp, asked } = scripted(['10.0.0.1']);
    const { send } = newSender(t, { allowedCidrs: [cidr('127.0.0.0/8')], lookUp });
    t.match(await send(named(receiver, 'localhost')), { ok: true, remoteAddress: '127.0.0.1' });
    t.match(await send(named(receiver, 'hooks.localhost')), { ok: true, remoteAddress: '127.0.0.1' });
    t.same(asked, []);
  });

  t.test('with several addresses is reached at the one that answers', async (t) => {
    const receiver = await startReceiver(t);
    for (const answers of [
      ['::1', '127.0.0.1'],
      ['127.0.0.1', '::1'],
      ['127.0.0.2', '127.0.0.1'],
    ]) {
      const { send } = newSender(t, { lookUp: scripted(answers).lookUp });
      t.match(await send(named(receiver)), { ok: true, remoteAddress: '127.0.0.1' }, answers.join());
    }
    const { send } = newSender(t, { lookUp: scripted(['127.0.0.2', '127.0.0.3']).lookUp });
    t.match(await send(named(receiver)), { ok: false, error: 'connection_refused' });
  });

  t.test('that is being resolved is not looked up again', async (t) => {
    const receiver = await startReceiver(t);
    const answer = Promise.withResolvers<{ address: string; family: number }[]>();
    let asked = 0;
    const lookUp = () => {
      asked += 1;
      return answer.promise;
    };
    const { send, effects } = newSender(t, { lookUp });
    const late = send(named(receiver));
    effects.advance(TIMEOUT_MS);
    t.match(await late, { error: 'timeout' });
    const both = [send(named(receiver)), send(named(receiver))];
    await quiet();
    t.equal(asked, 1, 'a dead name takes one thread, however often it is tried');
    answer.resolve([{ address: '127.0.0.1', family: 4 }]);
    for (const outcome of await Promise.all(both)) t.ok(outcome.ok);
  });
});

t.test('connections', async (t) => {
  t.test('are kept for the next delivery', async (t) => {
    for (const options of [{}, { tls: 'localhost' }] as const) {
      const receiver = await startReceiver(t, options);
      const { send } = newSender(t);
      for (let round = 0; round < 5; round++) t.ok((await send(receiver.url)).ok);
      t.equal(receiver.connections(), 1);
      for (let round = 0; round < 20; round++) {
        for (const { ok } of await Promise.all([1, 2, 3, 4].map(() => send(receiver.url)))) t.ok(ok);
      }
      t.equal(receiver.connections(), 4);
    }
  });

  t.test('carry one request at a time', async (t) => {
    const first = held(status(201));
    const receiver = await startReceiver(t, { answers: [first.answer, status(202)] });
    const { send } = newSender(t);
    const slow = send(receiver.url);
    await receiver.next();
    t.match(await send(receiver.url), { statusCode: 202 });
    first.release();
    t.match(await slow, { statusCode: 201 });
    t.equal(receiver.connections(), 2);
  });

  t.test('are not kept if the receiver says so', async (t) => {
    const receiver = await startReceiver(t, { answers: [hangUpAfter()] });
    const { send } = newSender(t);
    for (let round = 0; round < 3; round++) t.ok((await send(receiver.url)).ok);
    t.equal(receiver.connections(), 3);
  });

  t.test('are closed if the receiver says so and leaves them open', async (t) => {
    let connections = 0;
    const { port } = await startTcp(t, (socket) => {
      connections += 1;
      socket.write('HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n');
    });
    const { send } = newSender(t);
    for (let round = 0; round < 2; round++) t.ok((await send(`http://127.0.0.1:${port}/`)).ok);
    t.equal(connections, 2);
  });

  t.test('are replaced within the attempt if the receiver closed them meanwhile', async (t) => {
    for (const gone of [reset(), hangUp()]) {
      const receiver = await startReceiver(t, { answers: [status(200), gone, status(202)] });
      const { send } = newSender(t);
      t.ok((await send(receiver.url)).ok);
      t.match(await send(receiver.url), { ok: true, statusCode: 202, error: null });
      t.equal(receiver.connections(), 2);
      receiver.answerWith(gone);
      t.match(await send(receiver.url), { ok: false }, 'once');
      t.equal(receiver.requests.length, 5);
    }
  });

  t.test('are forgotten if the receiver closes them while they are idle', async (t) => {
    const receiver = await startReceiver(t);
    const { send } = newSender(t);
    t.ok((await send(receiver.url)).ok);
    await receiver.close();
    await quiet();
    t.match(await send(receiver.url), { ok: false, error: 'connection_refused', remoteAddress: '127.0.0.1' });
  });

  t.test('are not replaced if an answer had already begun', async (t) => {
    const receiver = await startReceiver(t, { answers: [status(200), raw('HTTP/1.1 2'), status(200)] });
    const { send } = newSender(t);
    t.ok((await send(receiver.url)).ok);
    t.match(await send(receiver.url), { ok: false });
    t.equal(receiver.requests.length, 2);
  });

  t.test(
    'are closed when nothing is sent on them for 4 s, or for as long as the receiver says, but 10 s at most',
    async (t) => {
      const cases = [
        { headers: {}, idleMs: 4_000 },
        { headers: { 'Keep-Alive': 'timeout=9' }, idleMs: 8_000 },
        { headers: { 'Keep-Alive': 'timeout=86400' }, idleMs: 10_000 },
        { headers: { 'Keep-Alive': 'timeout=1' }, idleMs: 0 },
      ];
      for (const { headers, idleMs } of cases) {
        const receiver = await startReceiver(t, { answers: [status(200, { headers })] });
        const { send, effects } = newSender(t);
        t.ok((await send(receiver.url)).ok);
        if (idleMs > 0) {
          effects.advance(idleMs - 1);
          t.ok((await send(receiver.url)).ok);
          t.equal(receiver.connections(), 1, `in time: ${idleMs}`);
        }
        effects.advance(idleMs + 1_000);
        await receiver.deserted();
      }
    },
  );

  t.test('are not reused after unsolicited bytes', async (t) => {
    const { port, sockets } = await startTalkative(t);
    const { send } = newSender(t);
    t.ok((await send(`http://127.0.0.1:${port}/`)).ok);
    sockets[0]?.write('HTTP/1.1 500 Late\r\nContent-Length: 0\r\n\r\n');
    await quiet();
    t.ok((await send(`http://127.0.0.1:${port}/`)).ok);
    t.equal(sockets.length, 2);
  });

  t.test('are not reused while a part of the request is unsent', async (t) => {
    let connections = 0;
    const { port } = await startTcp(t, (socket) => {
      connections += 1;
      socket.pause().write('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n');
    });
    const { send } = newSender(t);
    // More than the system's buffers hold.
    const body = 'x'.repeat(16e6);
    for (const _ of [1, 2]) t.ok((await send(`http://127.0.0.1:${port}/`, {}, body)).ok);
    t.equal(connections, 2);
  });

  t.test('are at most five minutes old, so that a receiver may move', async (t) => {
    const receiver = await startReceiver(t);
    const { send, effects } = newSender(t);
    for (let seconds = 0; seconds < 300; seconds += 3) {
      t.ok((await send(receiver.url)).ok);
      effects.advance(3_000);
    }
    t.equal(receiver.connections(), 1);
    effects.advance(1);
    t.ok((await send(receiver.url)).ok, 'the last one on the old connection');
    await receiver.deserted();
    t.ok((await send(receiver.url)).ok);
    t.equal(receiver.connections(), 2);
  });

  t.test('are bounded while idle over all receivers: the one idle for longest goes', async (t) => {
    const [a, b, c] = [await startReceiver(t), await startReceiver(t), await startReceiver(t)];
    const { send } = newSender(t, { idleConnectionsMax: 2 });
    for (const { url } of [a, b, a, c]) t.ok((await send(url)).ok);
    await b.deserted();
    for (const { url } of [a, c]) t.ok((await send(url)).ok);
    t.same(
      [a, b, c].map((receiver) => receiver.connections()),
      [1, 1, 1],
    );
    t.ok((await send(b.url)).ok);
    t.equal(b.connections(), 2);
  });
});

t.test('a finished attempt is garbage-collected', async (t) => {
  const receiver = await startReceiver(t);
  const { send } = newSender(t);
  const sent = async () => {
    const headers = { 'webhook-id': 'evt_1' };
    t.ok((await send(receiver.url, headers)).ok);
    return new WeakRef(headers);
  };
  const reference = await sent();
  for (let turn = 0; turn < 20 && reference.deref() !== undefined; turn++) {
    await nextTurn();
    collectGarbage();
  }
  t.equal(reference.deref(), undefined);
});

t.test('closing', async (t) => {
  t.test('ends attempts under way, and every connection', async (t) => {
    const receiver = await startReceiver(t, { answers: [status(200), silence(), silence()] });
    const { port, sockets } = await startTalkative(t);
    const { sender, send } = newSender(t);
    for (const url of [`http://127.0.0.1:${port}/`, receiver.url]) t.ok((await send(url)).ok);
    const idleClosed = sockets.map((socket) => once(socket, 'close'));
    await receiver.next();
    const outcomes = [send(receiver.url), send(receiver.url)];
    for (const _ of outcomes) await receiver.next();
    sender.close();
    for (const outcome of outcomes) t.match(await outcome, { ok: false, statusCode: null, error: 'stopped' });
    await receiver.deserted();
    t.equal((await Promise.all(idleClosed)).length, 1, 'an idle one, too');
    t.match(await send(receiver.url), { ok: false, error: 'stopped' });
    t.equal(receiver.requests.length, 3);
    sender.close();
  });
});
