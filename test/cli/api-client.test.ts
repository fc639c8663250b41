import { once } from 'node:events';
import { createServer as createHttpServer } from 'node:http';
import { createSecureServer } from 'node:http2';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { PassThrough, type Writable } from 'node:stream';
import t, { type Test } from 'tap';
import { type ApiClient, type ApiOptions, createApiClient, TIMEOUTS } from '../../src/cli/api-client.ts';
import type { CommandContext } from '../../src/cli/command.ts';
import { isDropped, isSilence } from '../../src/cli/connections.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import type { DeploymentId, ProjectId } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { QUEUED } from '../helpers/deploy-client.ts';
import { fakeEffects, hurried } from '../helpers/effects.ts';
import {
  type Answer,
  CA_PEM,
  held,
  type Receiver,
  silence,
  startReceiver,
  status,
  tlsFixture,
} from '../helpers/receiver.ts';

t.test('a call still under way when the client is closed fails as unavailable', async (t) => {
  const service = await startReceiver(t, { answers: [silence()] });
  const client = clientOf(service);
  const called = client.call({ method: 'GET', path: '/v2/deployments' });
  const refused = t.rejects(called, { code: 'unavailable', message: /is closed/ });
  const glance = client.project('prj_1' as ProjectId);
  for (const _ of ['called', 'looked']) await service.next();
  await client.close();
  await refused;
  t.equal(await glance, undefined, 'what only adds to a message fails without a word');
});

t.test('what only adds to a message is not asked for again once its time is over', async (t) => {
  const effects = fakeEffects();
  const service = await startReceiver(t, {
    answers: [
      (response) => {
        effects.advance(2_000);
        response.socket?.destroy();
      },
      status(200, { body: JSON.stringify(QUEUED) }),
    ],
  });
  const client = clientOf(service, hurried(effects));
  t.equal(await client.deployment('dpl_1' as DeploymentId, 'repeatedly'), undefined);
  t.equal(service.requests.length, 1);
  service.answerWith(status(200, { body: '{}' }));
  t.equal(await client.deployment('dpl_1' as DeploymentId), undefined, 'nor is another answer told');
  await client.close();
});

t.test(
  'no try begins after --retry-for, however long the last one took, and its silence is told of',
  async (t) => {
    const service = await startReceiver(t, { answers: [silence()] });
    const stderr = new PassThrough();
    const timeouts = { ...TIMEOUTS, answerMs: 600, answerNoteMs: 30 };
    const client = clientOf(service, realEffects, { retryForMs: 500, timeouts }, stderr);
    for (const call of [client.call, client.stream]) {
      const tries: boolean[] = [];
      const onTry = (mayBeDone: boolean) => tries.push(mayBeDone);
      const called: Promise<unknown> = call({ method: 'GET', path: '/', onTry });
      await t.rejects(called, {
        code: 'unavailable',
        message: /^127\.0\.0\.1:\d+ does not answer, and --retry-for is over: gave up$/,
      });
      t.strictSame(tries, [true, true], 'one, which may have been carried out');
      t.match(String(stderr.read()), /^no answer yet from 127\.0\.0\.1:\d+\n$/);
    }
    await client.close();
  },
);

t.test(
  'an answer is awaited as long as it may be delayed, and the time for retries begins then',
  async (t) => {
    const late = held(status(200, { body: JSON.stringify(QUEUED) }));
    const service = await startReceiver(t, { answers: [late.answer] });
    const stderr = new PassThrough();
    const timeouts = { ...TIMEOUTS, answerMs: 1, answerNoteMs: 0 };
    const { after } = realEffects;
    const timers = new Set<() => void>();
    const { restore } = t.intercept(realEffects, 'after', {
      value(delayMs: number, action: () => void) {
        const cancel = after(delayMs, action);
        timers.add(cancel);
        return () => {
          timers.delete(cancel);
          cancel();
        };
      },
    });
    const client = clientOf({ url: `${service.url}//` }, realEffects, { retryForMs: 0, timeouts }, stderr);
    const called = client.call({ method: 'GET', path: '/v2', delayMs: 60_000 });
    await service.next();
    late.release();
    t.match(await called, { ok: true });
    t.equal(stderr.read(), null);
    t.equal(timers.size, 0, 'nothing is told or ended any more');
    restore();
    const { path, headers } = service.requests[0] ?? {};
    const { authorization, 'user-agent': agent, 'content-type': type } = headers ?? {};
    t.strictSame([path, authorization, agent, type], ['/hook/v2', 'Bearer key', 'davit/0.0.0', undefined]);

    let nowMs = 0;
    const effects = { ...realEffects, monotonicMs: () => nowMs };
    const broken = await startReceiver(t, {
      answers: [
        (response) => {
          nowMs += 20_000;
          response.socket?.destroy();
        },
        status(200, { body: JSON.stringify(QUEUED) }),
      ],
    });
    const waiting = clientOf(broken, effects, { retryForMs: 1_000 }, stderr);
    t.match(await waiting.call({ method: 'GET', path: '/', delayMs: 20_000 }), { ok: true });
    t.match(String(stderr.read()), /^127\.0\.0\.1:\d+ closed the connection: trying again in \d+ms\n$/);
    for (const one of [client, waiting]) await one.close();
  },
);

t.test('a refusal is retried from its answer on, however long that took', async (t) => {
  const effects = fakeEffects();
  const monotonicMs = () => {
    effects.block(0.001); // a clock that goes on meanwhile
    return effects.monotonicMs();
  };
  const refuse = status(503, { headers: { 'Retry-After': '5' } });
  const service = await startReceiver(t, {
    answers: [
      (response, received) => {
        effects.advance(20_000);
        return refuse(response, received);
      },
      status(200, { body: JSON.stringify(QUEUED) }),
    ],
  });
  const stderr = new PassThrough();
  const client = clientOf(service, { ...hurried(effects), monotonicMs }, { retryForMs: 5_000 }, stderr);
  t.match(await client.call({ method: 'GET', path: '/' }), { ok: true });
  t.match(String(stderr.read()), /^127\.0\.0\.1:\d+ answers 503: trying again in 5s\n$/);
  await client.close();
});

t.test(
  'an answer tells whether the request, or an earlier try of it, may have been carried out',
  async (t) => {
    const proxys = (code: number) => status(code, { body: '<html>' });
    const refusal = { error: { code: 'conflict', message: 'it is archived', request_id: 'req_1' } };
    const refused = status(409, { body: JSON.stringify(refusal) });
    const headers = { 'Idempotent-Replayed': 'true' };
    const again = status(200, { headers, body: JSON.stringify(QUEUED) });
    const service = await startReceiver(t);
    const client = clientOf(service, hurried(fakeEffects()));
    const rows: [name: string, answers: [Answer, ...Answer[]], expected: object][] = [
      ['never reached, it may be no davit', [proxys(502), proxys(404)], { status: 404, isDavits: false }],
      ['refused', [refused], { status: 409, mayBeDone: false }],
      ['not passed on', [proxys(429), refused], { status: 409, mayBeDone: false }],
      ['passed on, perhaps', [proxys(502), refused], { status: 409, mayBeDone: true }],
      ['reached before', [proxys(502), proxys(404), refused], { status: 409, mayBeDone: true }],
      ['carried out before', [proxys(429), again], { ok: true, replayed: true }],
      ['carried out by an earlier try', [proxys(502), again], { ok: true, replayed: false }],
    ];
    for (const [name, answers, expected] of rows) {
      const before = service.requests.length;
      service.answerWith(...answers);
      t.match(await client.call({ method: 'POST', path: '/v2/deployments' }), expected, name);
      t.equal(service.requests.length - before, answers.length, name);
    }
    await client.close();
  },
);

t.test('a proxy that makes no connection is given up like a service that does not answer', async (t) => {
  const sockets = new Set<Socket>();
  const proxy = createServer((socket) => sockets.add(socket)).listen(0, '127.0.0.1');
  await once(proxy, 'listening');
  t.teardown(() => {
    for (const socket of sockets) socket.destroy();
    proxy.close();
  });
  const { port } = proxy.address() as AddressInfo;
  const timeouts = { ...TIMEOUTS, answerMs: 200 };
  const environment = { HTTPS_PROXY: `http://127.0.0.1:${port}` };
  const service = { url: 'https://davit.invalid' };
  const client = clientOf(service, realEffects, { retryForMs: 0, timeouts }, undefined, environment);
  await t.rejects(client.call({ method: 'GET', path: '/' }), { message: /does not answer, and --retry-for/ });
  await client.close();
});

t.test('what a proxy makes no connection for is asked for again over another one', async (t) => {
  const { url, environment } = await behindProxy(t, (asked, makeConnection) => {
    if (asked > 1) makeConnection();
  });
  const timeouts = { ...TIMEOUTS, answerMs: 200, tunnelMs: 200 };
  const options = { caPem: CA_PEM, retryForMs: 600_000, timeouts };
  const client = clientOf({ url }, hurried(fakeEffects()), options, undefined, environment);
  t.match(await client.call({ method: 'GET', path: '/' }), { ok: true });
  await client.close();
});

t.test('a connection that a proxy makes slowly serves a later try', async (t) => {
  const stderr = new PassThrough();
  let connections = 0;
  const { url, environment } = await behindProxy(t, (asked, makeConnection) => {
    connections = asked;
    let givenUp = 0;
    stderr.on('data', () => {
      givenUp += 1;
      if (givenUp === 8) makeConnection(); // with the limit of a try it would have been given up by then
    });
  });
  const timeouts = { ...TIMEOUTS, answerMs: 200 };
  const options = { caPem: CA_PEM, retryForMs: 600_000, timeouts };
  const client = clientOf({ url }, hurried(fakeEffects()), options, stderr, environment);
  t.match(await client.call({ method: 'GET', path: '/' }), { ok: true });
  t.equal(connections, 1);
  await client.close();
});

/** A service behind a proxy that is asked for connections to it. */
async function behindProxy(t: Test, onAsked: (asked: number, makeConnection: () => void) => void) {
  const service = await startReceiver(t, {
    tls: 'localhost',
    answers: [status(200, { body: JSON.stringify(QUEUED) })],
  });
  let asked = 0;
  const proxy = createHttpServer().on('connect', (_request, client) => {
    asked += 1;
    t.teardown(() => client.destroy());
    client.on('error', () => undefined);
    onAsked(asked, () => {
      const tunnel = connect(service.port, '127.0.0.1', () => {
        client.write('HTTP/1.1 200 OK\r\n\r\n');
        tunnel.pipe(client).pipe(tunnel);
      });
      tunnel.on('error', () => undefined);
    });
  });
  proxy.listen(0, '127.0.0.1');
  await once(proxy, 'listening');
  t.teardown(() => proxy.close());
  const { port } = proxy.address() as AddressInfo;
  return {
    url: service.url.replace('127.0.0.1', 'localhost'),
    environment: { HTTPS_PROXY: `http://127.0.0.1:${port}` },
  };
}

t.test('a stream from which nothing comes is given up, also through a proxy', async (t) => {
  const service = await startReceiver(t, {
    answers: [
      (response) => response.writeHead(200, { 'Content-Type': 'text/event-stream' }).write(': hello\n\n'),
    ],
  });
  const timeouts = { ...TIMEOUTS, silenceMs: 900 };
  for (const environment of [{}, { HTTP_PROXY: new URL(service.url).origin }]) {
    const client = clientOf(service, realEffects, { timeouts }, undefined, environment);
    const answer = await client.stream({ method: 'GET', path: '/' });
    if (!answer.ok) throw new Error(answer.message);
    let came = '';
    const read = async () => {
      for await (const piece of answer.body) came += Buffer.from(piece).toString();
    };
    const error = await read().catch((reason: unknown) => reason);
    t.strictSame([came, isDropped(error), isSilence(error)], [': hello\n\n', true, true]);
    await client.close();
  }
});

t.test('what gets no answer is sent again over another connection, though HTTP/2 is offered', async (t) => {
  const pem = { key: tlsFixture('localhost.key'), cert: tlsFixture('localhost.pem') };
  const server = createSecureServer({ ...pem, allowHTTP1: true }).listen(0, '127.0.0.1');
  t.teardown(() => server.close());
  let connections = 0;
  server.on('secureConnection', () => {
    connections += 1;
  });
  server.on('request', (_request, response) => {
    if (connections > 1) response.end(JSON.stringify(QUEUED));
  });
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  const timeouts = { ...TIMEOUTS, answerMs: 200 };
  const options = { caPem: CA_PEM, retryForMs: 600_000, timeouts };
  const client = clientOf({ url: `https://localhost:${port}` }, hurried(fakeEffects()), options);
  t.match(await client.call({ method: 'GET', path: '/' }), { ok: true });
  await client.close();
});

t.test('requests one right after the other share a connection', async (t) => {
  const service = await startReceiver(t, { answers: [status(200, { body: JSON.stringify(QUEUED) })] });
  const client = clientOf(service);
  for (const _ of [1, 2, 3]) t.match(await client.call({ method: 'GET', path: '/' }), { ok: true });
  t.equal(service.connections(), 1);
  await client.close();
});

t.test('an idle connection is closed early, for however long the service would keep it', async (t) => {
  const { promise: closedBy, resolve } = Promise.withResolvers<string>();
  const answer = status(200, { headers: { 'Keep-Alive': 'timeout=65' }, body: JSON.stringify(QUEUED) });
  const service = await startReceiver(t, {
    answers: [
      (response, received) => {
        response.socket?.once('end', () => resolve('the client')).once('close', () => resolve('the service'));
        return answer(response, received);
      },
    ],
  });
  const client = clientOf(service, realEffects, { timeouts: { ...TIMEOUTS, idleMs: 1 } });
  t.match(await client.call({ method: 'GET', path: '/' }), { ok: true });
  t.equal(await closedBy, 'the client');
  await client.close();
});

t.test('a page in place of a stream is not read to its end, which may never come', async (t) => {
  const closed = Promise.withResolvers<void>();
  const service = await startReceiver(t, {
    answers: [
      (response) => {
        response.on('close', closed.resolve);
        response.writeHead(200, { 'Content-Type': 'text/html' }).write('<html>');
      },
    ],
  });
  const client = clientOf(service);
  t.match(await client.stream({ method: 'GET', path: '/' }), { ok: false, isDavits: false });
  await closed.promise;
  await client.close();
});

function clientOf(
  service: Pick<Receiver, 'url'>,
  effects: Effects = realEffects,
  options: Partial<ApiOptions> = {},
  stderr: Writable = new PassThrough(),
  environment: CommandContext['environment'] = {},
): ApiClient {
  return createApiClient(
    {
      baseUrl: new URL(service.url),
      key: 'key',
      caPem: null,
      retryForMs: 60_000,
      version: '0.0.0',
      timeouts: TIMEOUTS,
      ...options,
    },
    {
      terminal: createTerminal({ stdin: process.stdin, stdout: new PassThrough(), stderr }, () => undefined),
      commandLine: [],
      environment,
      startEnvironment: {},
      effects,
      onSignal: () => () => undefined,
      exit: () => undefined,
      exitWithThreads: () => undefined,
      leaveDirectory: () => undefined,
    },
  );
}
