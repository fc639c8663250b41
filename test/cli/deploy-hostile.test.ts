import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { type AddressInfo, createServer, type Server } from 'node:net';
import { join } from 'node:path';
import { createServer as createTlsServer } from 'node:tls';
import t, { type Test } from 'tap';
import { OUTPUT_NAME_MAX_LENGTH, OUTPUT_VALUE_MAX_BYTES, OUTPUTS_MAX } from '../../src/domain.ts';
import { runHere } from '../helpers/cli.ts';
import { QUEUED } from '../helpers/deploy-client.ts';
import { fakeEffects, hurried } from '../helpers/effects.ts';
import { ifHas } from '../helpers/programs.ts';
import { startProxy } from '../helpers/proxy.ts';
import { type Answer, endless, hangUp, raw, redirect, startReceiver, status } from '../helpers/receiver.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/** Control characters in every form that JSON allows: ESC, BEL, CR, LF, a C1 control, a bidirectional override. */
const OBEYED = '\u001b]0;owned\u0007\r\n\u009b2J\u202e';
const SHOWN = '\\x1b]0;owned\\x07\\x0d\\x0a\\x9b2J\\u202e';

const TLS_FIXTURES = join(import.meta.dirname, '../fixtures/tls');

const FAILED = { ...QUEUED, status: 'failed', reason: 'exit_code', exit_code: 3, queue_position: null };
const EVENT_STREAM = { 'Content-Type': 'text/event-stream' };
const REFUSED = { error: { code: 'forbidden', message: 'it may not', request_id: 'req_1' } };

t.test('control characters in what a service answers are escaped', async (t) => {
  const made = { ...QUEUED, ref: OBEYED, status: OBEYED };
  t.strictSame(await answered(t, [], json(201, made)), {
    stdout: 'dpl_1\n',
    stderr: `deployment dpl_1 of ${SHOWN}: ${SHOWN}, number 1\n`,
    exitCode: 0,
    waitedMs: 0,
  });
  for (const [end, how] of [
    [{ reason: OBEYED }, SHOWN],
    [{ reason: 'signal', signal: OBEYED }, SHOWN],
    [{ message: OBEYED }, `exit code 3\n${SHOWN}`],
  ] as const) {
    const { stderr } = await answered(
      t,
      ['--wait'],
      json(201, QUEUED),
      json(403, REFUSED),
      json(200, { ...FAILED, ...end }),
    );
    t.equal(
      stderr.split('(logs:read): waiting for the end without them\n')[1],
      `deployment dpl_1 of main: failed: ${how}\n`,
    );
  }
});

t.test('--json prints the same value in printable ASCII', async (t) => {
  const made = { ...QUEUED, ref: OBEYED, [OBEYED]: [OBEYED] };
  const { stdout, stderr } = await answered(t, ['--json'], json(201, made));
  t.strictSame(JSON.parse(stdout), made);
  t.match(stdout, /^[\n\x20-\x7e]+$/);
  t.equal(stderr, '');
});

t.test('an error message that is not a string is ignored', async (t) => {
  for (const message of [7, null, { toString: 1 }, ['no']]) {
    const error = { ...REFUSED.error, message };
    t.match(await answered(t, ['--retry-for', '0'], json(503, { error })), {
      stderr:
        /^error: 127\.0\.0\.1:\d+ answers 503, and --retry-for is over: gave up; the deployment may .*\n$/,
      exitCode: 1,
    });
    t.match(await answered(t, [], json(400, { error })), {
      stderr: /^error: not deployed: \S+ was answered with 400, and not by davit: is the URL right\?\n$/,
      exitCode: 1,
    });
  }
});

t.test('an endless answer is read only up to a limit and fails the command', async (t) => {
  for (const code of [201, 400, 503]) {
    t.match(await answered(t, ['--retry-for', '0'], endless(code)), {
      stdout: '',
      stderr: new RegExp(`^error: .* (?:answered with|answers) ${code}, and [^\\n]+\\n$`),
      exitCode: 1,
    });
  }
  for (const answers of [[endless(400)], [json(403, REFUSED), endless(200)]]) {
    t.match(await answered(t, ['--wait'], json(201, QUEUED), ...answers), {
      stderr:
        /error: \S+ answers \d+ \(not from davit\), and --retry-for is over: gave up; deployment dpl_1 goes/,
      exitCode: 1,
    });
  }
});

t.test('an answer with oversized headers is taken as not from davit', async (t) => {
  const tooLong = { 'X-Long': 'x'.repeat(40_000) };
  t.match(await answered(t, [], status(201, { headers: tooLong })), {
    stderr:
      /^error: 127\.0\.0\.1:\d+ does not answer as davit does: is the URL right\?; the deployment may have been created: /,
    exitCode: 1,
  });
});

t.test('a deployment with as many and as long outputs as allowed is read whole', async (t) => {
  const value = '\u0001'.repeat(OUTPUT_VALUE_MAX_BYTES);
  const names = Array.from({ length: OUTPUTS_MAX }, (_, index) =>
    `${index}`.padStart(OUTPUT_NAME_MAX_LENGTH, '_'),
  );
  const made = { ...QUEUED, outputs: Object.fromEntries(names.map((name) => [name, value])) };
  const { stdout } = await answered(t, ['--json'], json(201, made));
  t.strictSame(JSON.parse(stdout), made);
});

t.test('a service that ignores ?wait= is polled once a second', async (t) => {
  const early = json(200, { ...QUEUED, status: 'pondering' });
  const { stdout, waitedMs } = await answered(
    t,
    ['--wait', '--json'],
    json(201, QUEUED),
    ...Array(4).fill(early),
    json(200, FAILED),
  );
  t.match(JSON.parse(stdout), { status: 'failed' });
  t.equal(waitedMs, 4_000);
});

t.test('a deployment that stays queued is explained, as far as the key may know', async (t) => {
  const reported = { ...QUEUED, queue_position: null };
  for (const [queued, project, said] of [
    [
      QUEUED,
      json(200, { status: 'paused' }),
      "the project is paused: it waits for 'davit admin project resume'\n",
    ],
    [reported, json(200, { status: 'active' }), 'another system carries it out, and reports how it went\n'],
    [reported, json(403, REFUSED), 'another system carries it out, and reports how it went\n'],
    [QUEUED, json(200, { status: 'active' }), ''],
    [QUEUED, json(403, REFUSED), ''],
  ] as const) {
    const answers = [
      json(201, queued),
      json(200, queued),
      project,
      json(200, queued),
      json(200, FAILED),
    ] as const;
    t.match(await answered(t, ['--wait', '--json'], ...answers), { stderr: said, exitCode: 1 });
  }
});

t.test('a deployment that another one superseded names that', async (t) => {
  const canceled = { ...QUEUED, status: 'canceled', reason: 'superseded', queue_position: null };
  const { stderr } = await answered(
    t,
    ['--wait'],
    json(201, QUEUED),
    events('event: end\ndata: {"status":"canceled"}\n\n'),
    json(200, { ...canceled, superseded_by: 'dpl_2' }),
  );
  t.match(stderr, /^deployment dpl_1 of main: canceled: superseded by dpl_2$/m);
});

t.test('a bug after a try that may have created the deployment does not hide how to find it', async (t) => {
  const { port } = await startReceiver(t, { answers: [hangUp()] });
  const randomBytes = () => {
    throw new Error('no randomness');
  };
  const words = ['deploy', 'prj_1', 'main', '--url', `http://127.0.0.1:${port}`, '--idempotency-key', 'job'];
  t.match(
    await runHere(words, { environment: { DAVIT_KEY: 'k' }, effects: { ...fakeEffects(), randomBytes } }),
    {
      stderr:
        /^the deployment may have been created: repeat with --idempotency-key job to get its id\nerror: davit failed, which is a bug: /,
      exitCode: 1,
    },
  );
});

t.test('once the end is known, why it ended is asked for three times', async (t) => {
  const unavailable = { error: { ...REFUSED.error, code: 'unavailable' } };
  for (const answer of [
    status(403, { body: '<p>blocked</p>' }),
    json(503, unavailable),
    raw('x'),
    hangUp(),
  ]) {
    t.strictSame(
      await answered(
        t,
        ['--wait'],
        json(201, QUEUED),
        events('event: end\ndata: {"status":"succeeded"}\n\n'),
        answer,
      ),
      {
        stdout: '',
        stderr: 'deployment dpl_1 of main: queued, number 1\ndeployment dpl_1 of main: succeeded\n',
        exitCode: 0,
        waitedMs: 2_000,
      },
    );
  }
  const ended = events('event: end\ndata: {"status":"failed"}\n\n');
  const { stderr } = await answered(t, ['--wait'], json(201, QUEUED), ended, status(429), json(200, FAILED));
  t.match(stderr, /\ndeployment dpl_1 of main: failed: exit code 3/);
});

t.test('why it ended is asked for again when davit says, or not at all if that is too late', async (t) => {
  const ended = events('event: end\ndata: {"status":"failed"}\n\n');
  for (const [seconds, said, waitedMs] of [
    ['2', /\ndeployment dpl_1 of main: failed: exit code 3\n/, 2_000],
    ['3', /\ndeployment dpl_1 of main: failed\n/, 0],
  ] as const) {
    const limited = status(429, { headers: { 'Retry-After': seconds } });
    t.match(await answered(t, ['--wait'], json(201, QUEUED), ended, limited, json(200, FAILED)), {
      stderr: said,
      waitedMs,
    });
  }
});

t.test('why a deployment stays queued is asked for once', async (t) => {
  for (const answer of [
    status(429, { headers: { 'Retry-After': '600' } }),
    status(404, { body: '404 page not found' }),
    hangUp(),
  ]) {
    const answers = [json(201, QUEUED), json(200, QUEUED), answer, json(200, FAILED)] as const;
    t.match(await answered(t, ['--wait', '--json'], ...answers), { stderr: '', exitCode: 1 });
  }
});

t.test('giving up on a deployment that was created names it, also with --json', async (t) => {
  const words = ['--wait', '--json', '--retry-for', '0'];
  t.match(await answered(t, words, json(201, QUEUED), hangUp()), {
    stdout: '',
    stderr: /^error: [^\n]*: gave up; deployment dpl_1 goes on\n$/,
    exitCode: 1,
  });
});

t.test('once davit has answered, what a proxy answers while davit restarts passes', async (t) => {
  const stopping = {
    error: { code: 'unavailable', message: 'the service is stopping', request_id: 'req_1' },
  };
  const proxies = [
    status(404, { body: '404 page not found\n' }),
    redirect('https://status.example.com/'),
    status(200, { body: '<h1>Back soon</h1>' }),
  ];
  const { stdout, stderr, exitCode } = await answered(
    t,
    ['--wait', '--json'],
    json(503, stopping),
    ...proxies,
    json(201, QUEUED),
    ...proxies,
    json(200, FAILED),
  );
  t.match([JSON.parse(stdout), exitCode], [{ status: 'failed' }, 1]);
  t.strictSame(
    [...stderr.matchAll(/answers (\d+) \(not from davit\): trying again/g)].map(([, code]) => code),
    ['404', '302', '200', '404', '302', '200'],
  );
});

t.test('once davit has answered, another certificate or none passes; before, it fails at once', async (t) => {
  const service = await startReceiver(t, { tls: 'localhost' });
  const proxy = await startProxy(t, service.url);
  const url = proxy.url.replace('http://127.0.0.1', 'https://localhost');
  const words = ['--wait', '--json', '--ca-file', join(TLS_FIXTURES, 'ca.pem')];
  const [key, cert] = ['key', 'pem'].map((ext) => readFileSync(join(TLS_FIXTURES, `self-signed.${ext}`)));
  const alert = Buffer.from([0x15, 3, 3, 0, 2, 2, 80]); // internal_error
  const cases: [server: Server, error: RegExp][] = [
    [createTlsServer({ key, cert }), /cannot be trusted \(DEPTH_ZERO_SELF_SIGNED_CERT\): --ca-file makes/],
    [
      createServer((socket) => socket.end(alert)),
      /refuses to speak TLS with davit \(\w+_ALERT_INTERNAL_ERROR\)\n$/,
    ],
    [createServer((socket) => socket.end('HTTP/1.1 503 Busy\r\n\r\n')), /does not speak TLS: /],
  ];
  for (const [server, error] of cases) {
    const other = await listening(t, server);
    proxy.leadTo(other);
    t.match(await deployed(url, words), { stderr: error, exitCode: 1, waitedMs: 0 });

    server.once('connection', () => proxy.leadTo(service.url));
    service.answerWith((response) => {
      proxy.leadTo(other);
      service.answerWith(json(200, FAILED));
      response.writeHead(201, { Connection: 'close' }).end(JSON.stringify(QUEUED));
    });
    proxy.leadTo(service.url);
    const { stdout, stderr } = await deployed(url, words);
    t.match(JSON.parse(stdout), { status: 'failed' });
    t.match(stderr, /^localhost:\d+ cannot be reached \(\w*(?:CERT|SSL)\w*\): trying again in \w+$/m);
  }
});

t.test('a certificate that breaks a rarer rule is refused with that rule', ifHas('openssl'), async (t) => {
  const directory = temporaryDirectory(t);
  for (const [extension, rule] of [
    ['extendedKeyUsage=clientAuth', 'unsuitable certificate purpose'],
    ['1.2.3.4=critical,DER:0500', 'unhandled critical extension'],
  ] as const) {
    const ca = join(directory, 'made.pem');
    const curve = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1'];
    const words = ['req', '-x509', ...curve, '-nodes', '-subj', '/CN=localhost', '-addext', extension];
    execFileSync('openssl', [...words, '-keyout', ca, '-out', `${ca}.cert`], { stdio: 'ignore' });
    const [key, cert] = [readFileSync(ca), readFileSync(`${ca}.cert`)];
    const url = (await listening(t, createTlsServer({ key, cert }))).replace('http:', 'https:');
    const { stdout, stderr, exitCode } = await deployed(url, ['--ca-file', `${ca}.cert`]);
    t.strictSame([stdout, exitCode], ['', 1]);
    t.equal(
      stderr.replace(/:\d+/, ''),
      `error: 127.0.0.1 cannot be trusted (${rule}): its certificate has to be replaced there\n`,
    );
  }
});

t.test('a deployment that was removed meanwhile is not said to go on', async (t) => {
  const error = { code: 'not_found', message: 'there is no such resource', request_id: 'req_1' };
  t.match(await answered(t, ['--wait', '--json'], json(201, QUEUED), json(404, { error })), {
    stdout: '',
    stderr: 'error: dpl_1 cannot be followed: there is no such resource (404 not_found, req_1)\n',
    exitCode: 1,
  });
});

t.test('an end event without a final status counts as a dropped connection', async (t) => {
  const { stderr, exitCode } = await answered(
    t,
    ['--wait'],
    json(201, QUEUED),
    events(`event: end\ndata: ${OBEYED.replace(/[\r\n]/g, '')}\n\n`),
    events('event: end\ndata: {"status":"running"}\n\n'),
    events('event: end\ndata: {"status":"failed"}\n\n'),
    json(200, FAILED),
  );
  t.match(
    stderr,
    /(?:the connection ended before the deployment did: trying again in \d+ms\n){2}.*: failed: exit code 3\n$/,
  );
  t.equal(exitCode, 1);
});

t.test('an answer that is garbled half-way counts as a dropped connection', async (t) => {
  const page = '<html>502 Bad Gateway</html>\r\n';
  const begun =
    'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n' +
    '17\r\nid: 4\ndata: one\ndata:\n\n\r\n';
  const { stdout, stderr } = await answered(
    t,
    ['--wait'],
    json(201, QUEUED),
    raw(page),
    raw(begun + page),
    events('data: two\ndata:\n\nevent: end\ndata: {"status":"failed"}\n\n'),
    json(200, FAILED),
  );
  t.equal(stdout, 'one\ntwo\n');
  t.match(
    stderr,
    / does not answer in HTTP: trying again in \d+ms\nthe connection ended before .*: trying again in \d+ms\n.*: failed: exit code 3\n$/,
  );
});

t.test('an event id that is not an offset does not keep the log from being resumed', async (t) => {
  const { stdout, stderr } = await answered(
    t,
    ['--wait'],
    json(201, QUEUED),
    events('id: \u0001\ndata: one\ndata:\n\n'),
    events('data: two\ndata:\n\nevent: end\ndata: {"status":"failed"}\n\n'),
    json(200, FAILED),
  );
  t.equal(stdout, 'one\ntwo\n');
  t.match(stderr, /: failed: exit code 3\n$/);
});

t.test('an endless line or event in a log stream is refused as not from davit', async (t) => {
  for (const line of ['x', 'data: x\n']) {
    t.match(await answered(t, ['--wait'], json(201, QUEUED), endless(200, line, EVENT_STREAM)), {
      stdout: '',
      stderr: /\nerror: what comes in place of the log is not from davit: is the URL right\?\n$/,
      exitCode: 1,
    });
  }
});

t.test('a page that comes in place of the log is not taken for it', async (t) => {
  const page = endless(200, '<h1>Log in</h1>', { 'Content-Type': 'text/html' });
  t.match(await answered(t, ['--wait'], json(201, QUEUED), page), {
    stdout: '',
    stderr:
      /\nerror: \S+ answers 200 \(not from davit\), and --retry-for is over: gave up; deployment dpl_1 goes/,
    exitCode: 1,
    waitedMs: 120_000,
  });
});

t.test('a deployment with an invalid field is refused as not from davit', async (t) => {
  const changes = [
    { id: '7' },
    { ref: undefined },
    { status: { toString: 1 } },
    { created_at: null },
    { project_id: '../deployments' },
    { superseded_by: 7 },
    { reason: 7 },
    { signal: ['SIGKILL'] },
    { message: 7 },
    { queue_position: OBEYED },
    { duration_ms: OBEYED },
    { exit_code: OBEYED },
  ];
  for (const change of changes) {
    t.match(await answered(t, [], json(201, { ...QUEUED, ...change })), {
      stdout: '',
      stderr:
        /^error: \S+ was answered with 201, and not by davit: is the URL right\?; the deployment may have been /,
      exitCode: 1,
    });
    const ended = json(200, { ...FAILED, ...change });
    t.match(await answered(t, ['--wait', '--json'], json(201, QUEUED), ended), {
      stdout: '',
      stderr:
        /\nerror: \S+ answers 200 \(not from davit\), and --retry-for is over: gave up; deployment dpl_1 goes/,
      exitCode: 1,
    });
  }
});

/** `davit deploy` against a service that gives these answers in turn; on a fake clock. */
async function answered(t: Test, words: string[], ...answers: [Answer, ...Answer[]]) {
  const { port } = await startReceiver(t, { answers });
  return await deployed(`http://127.0.0.1:${port}`, words);
}

async function deployed(url: string, words: string[]) {
  const effects = fakeEffects();
  const result = await runHere(['deploy', 'prj_1', 'main', '--url', url, ...words], {
    environment: { DAVIT_KEY: 'davit_key' },
    effects: hurried(effects),
  });
  return { ...result, waitedMs: effects.monotonicMs() };
}

/** The address of this server, which is closed with the test. */
async function listening(t: Test, server: Server): Promise<string> {
  server.on('connection', (socket) => socket.on('error', () => undefined)).listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.teardown(() => server.close());
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

function json(code: number, body: unknown): Answer {
  return status(code, { body: JSON.stringify(body) });
}

function events(body: string): Answer {
  return status(200, { headers: EVENT_STREAM, body });
}
