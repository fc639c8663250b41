import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import t, { type Test } from 'tap';
import type { Key } from '../../src/domain.ts';
import { place, run, runHere } from '../helpers/cli.ts';
import { type DeployOptions, servedDeployments, untilFile } from '../helpers/deploy-client.ts';
import { fakeEffects, hurried } from '../helpers/effects.ts';
import { NOWHERE } from '../helpers/nowhere.ts';
import { startProxy } from '../helpers/proxy.ts';
import { type Answer, raw, startReceiver, status } from '../helpers/receiver.ts';
import { serve } from '../helpers/served.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');

const JSON_TYPE = { 'Content-Type': 'application/json' };

const shared = await servedDeployments(t);
const TLS = ['--tls-cert', join(FIXTURES, 'localhost.pem'), '--tls-key', join(FIXTURES, 'localhost.key')];
const sharedByTls = await servedDeployments(t, ...TLS);

t.test('without --wait, deploy prints the id and exits', async (t) => {
  const { deploy, deployments } = await shared.another(t);
  const { stdout, stderr, exitCode } = await deploy(['good']);
  t.equal(exitCode, 0);
  const [deployment, ...more] = await deployments();
  t.strictSame(more, []);
  t.equal(stdout, `${deployment?.id}\n`);
  t.equal(stderr, `deployment ${deployment?.id} of good: queued, number 1\n`);
  t.match(deployment, { ref: 'good', trigger: 'api', created_by: { name: 'ci' } });
});

t.test('--wait prints the log as it is and exits with 0 only on success', async (t) => {
  const { deploy } = await shared.another(t);
  const [good, bad, long] = await Promise.all(['good', 'bad', 'long'].map((ref) => deploy([ref, '--wait'])));
  t.match(good, {
    stdout: 'one\ntwo\nthree',
    exitCode: 0,
    stderr: /^deployment dpl_\w+ of good: queued, number \d\ndeployment dpl_\w+ of good: succeeded in \w+\n$/,
  });
  t.match(bad, { stdout: 'alas\n', exitCode: 1, stderr: /: failed: exit code 3 in \w+\n$/ });
  t.equal(long?.stdout, Array.from({ length: 2000 }, (_, index) => `line ${index}\n`).join(''));
});

t.test('--json prints the deployment, with --wait as it ended, and no log', async (t) => {
  const { deploy } = await shared.another(t);
  const [queued, ended] = await Promise.all([
    deploy(['good', '--json']),
    deploy(['bad', '--json', '--wait']),
  ]);
  t.match(JSON.parse(queued.stdout), { status: 'queued', ref: 'good' });
  t.strictSame([queued.stderr, queued.exitCode], ['', 0]);
  t.match(JSON.parse(ended.stdout), { status: 'failed', reason: 'exit_code', exit_code: 3, ref: 'bad' });
  t.strictSame([ended.stderr, ended.exitCode], ['', 1]);
});

t.test('despite dropped connections, one deployment is created and the log is complete', async (t) => {
  const { deployHastily, deployments } = await shared.another(t);
  const proxy = await startProxy(t, shared.url);
  proxy.fates(
    'refuse',
    'lose-answer',
    'lose-answer',
    { breakAfterBytes: 3_000 },
    { breakAfterBytes: 9_000 },
    'lose-answer',
  );
  const { stdout, stderr, exitCode } = await deployHastily(['long', '--wait'], proxy.url);
  t.equal(exitCode, 0);
  t.equal(stdout, Array.from({ length: 2000 }, (_, index) => `line ${index}\n`).join(''));
  t.match(stderr, /127\.0\.0\.1:\d+ closed the connection: trying again in \d+ms\n/);
  t.equal((await deployments()).length, 1);
  t.ok(proxy.connections() >= 6);
});

t.test('deploy waits for a service that starts late or restarts', async (t) => {
  const served = await servedDeployments(t);
  const { deployHastily, directory, deployments } = await served.another(t);
  const proxy = await startProxy(t, 'http://127.0.0.1:1');
  const started = untilFile(directory, 'started');
  const deploying = deployHastily(['slow', '--wait'], proxy.url);
  await proxy.connected(2);
  proxy.leadTo(served.url);
  await started;
  await served.service.kill();
  proxy.leadTo((await serve(t, served.directory)).url);
  const { stdout, stderr, exitCode } = await deploying;
  t.equal(exitCode, 1);
  t.match(stdout, /^(?:begun\n)?$/, 'what was printed just before the kill may be lost');
  t.match(stderr, /: failed: interrupted/);
  t.equal((await deployments()).length, 1);
});

t.test('Retry-After is obeyed as long as --retry-for allows', async (t) => {
  const { deployHastily } = await shared.another(t);
  const busy = await scripted(t, [
    [429, { 'Retry-After': '1' }],
    [503, { 'Retry-After': '1' }],
  ]);
  busy.thenLeadTo(shared.url);
  const { stderr, exitCode } = await deployHastily(['good'], busy.url);
  t.equal(exitCode, 0);
  t.match(
    stderr,
    /^127\.0\.0\.1:\d+ answers 429: trying again in 1s\n127\.0\.0\.1:\d+ answers 503: trying again in 1s\n/,
  );

  const busier = await scripted(t, [[503, { 'Retry-After': '600' }]]);
  const refused = await deployHastily(['good', '--retry-for', '10s'], busier.url);
  t.strictSame(
    { ...refused, stderr: refused.stderr.replace(/:\d+/, '').replace(/;.*/, '') },
    {
      stdout: '',
      stderr: 'error: 127.0.0.1 answers 503 and asks to wait 10m, longer than --retry-for leaves: gave up\n',
      exitCode: 1,
    },
  );
  t.equal(busier.count(), 1);

  const endless = await scripted(t, [[503, { 'Retry-After': '9'.repeat(400) }]]);
  t.match(await deployHastily(['good'], endless.url), { exitCode: 1, stderr: /asks to wait 36500d, longer/ });
});

t.test('deploy waits until Cloudflare reaches the service again', async (t) => {
  const { deployHastily } = await shared.another(t);
  const later = [520, 521, 522, 523, 524, 525, 526, 527, 530].map(async (status) => {
    const cloudflare = await scripted(t, [[status, {}]]);
    cloudflare.thenLeadTo(shared.url);
    const { stderr, exitCode } = await deployHastily(['good'], cloudflare.url);
    t.equal(exitCode, 0);
    t.match(stderr, `answers ${status}: trying again in `);
  });
  await Promise.all(later);
});

t.test('giving up quotes why the service asked to wait', async (t) => {
  const { deploy } = await (await servedDeployments(t, '--max-queued', '1')).another(t);
  for (const ref of ['slow', 'good']) t.match(await deploy([ref]), { exitCode: 0 });
  t.match(await deploy(['good', '--retry-for', '3s']), {
    exitCode: 1,
    stderr:
      /^error: 127\.0\.0\.1:\d+ answers 429 \(1 deployment waits .*\) and asks to wait 30s, longer than/,
  });
});

t.test('giving up says what is left, and how to find it', async (t) => {
  const { deploy, deployHastily, deployments } = await shared.another(t);
  const proxy = await startProxy(t, shared.url);
  proxy.fates('lose-answer');
  const lost = await deployHastily(['good', '--retry-for', '0'], proxy.url);
  const [, key = ''] =
    /^error: .*: gave up; the deployment may have been created: repeat with --idempotency-key (\S+) to get its id\n$/.exec(
      lost.stderr,
    ) ?? [];
  t.match(await deploy(['good', '--idempotency-key', key]), { exitCode: 0 });
  t.equal((await deployments()).length, 1);
});

t.test('deploy that is refused does not say that nothing was deployed if something may be', async (t) => {
  const { deployHastily } = await shared.another(t);
  const error = { code: 'forbidden', message: 'it may not', request_id: 'req_1' };
  const cases: [Answer, ...Answer[]][] = [
    [status(500)],
    [status(502), status(404)],
    [status(502), status(403, { body: JSON.stringify({ error }) })],
  ];
  for (const answers of cases) {
    const { port } = await startReceiver(t, { answers });
    const refused = await deployHastily(['main', '--idempotency-key', 'job'], `http://127.0.0.1:${port}`);
    t.match(refused, {
      stdout: '',
      stderr:
        /^error: [^;]*; the deployment may have been created: repeat with --idempotency-key job to get its id\n$/m,
      exitCode: 1,
    });
    t.notMatch(refused.stderr, /not deployed/);
  }
});

t.test('the last attempt is made when --retry-for is over', async (t) => {
  for (const [retryFor, ms] of [
    ['0', 0],
    ['3s', 3_000],
    ['10s', 10_000],
    ['2m', 120_000],
  ] as const) {
    const effects = fakeEffects();
    const { stderr, exitCode } = await runHere(
      ['deploy', 'prj_1', 'main', '--url', 'http://127.0.0.1:1', '--retry-for', retryFor],
      {
        environment: { DAVIT_KEY: 'davit_key' },
        effects: hurried(effects),
      },
    );
    t.equal(exitCode, 1);
    t.match(stderr, /cannot be reached \(ECONNREFUSED\), and --retry-for is over: gave up\n$/);
    t.equal(effects.monotonicMs(), ms, stderr);
  }
});

t.test('a refusal is one line with the code and the request id of the service', async (t) => {
  const { davit, dump } = shared;
  const { deploy, project } = await shared.another(t);
  await deploy(['good', '--idempotency-key', 'once']);
  await davit(['admin', 'project', 'create', '--name', 'old']);
  const archived = (await davit(['admin', 'project', 'show', 'old', '--json'])).stdout;
  const oldId = (JSON.parse(archived) as { id: string }).id;
  await davit(['admin', 'project', 'archive', 'old']);
  const before = dump()['deployments']?.length;
  const cases: [words: string[], options: DeployOptions, message: RegExp][] = [
    [['good'], { key: 'davit_wrong' }, /^error: not deployed: .* \(401 unauthorized, req_\w+\)$/],
    [
      ['good'],
      { project: 'prj_0000000000000000000000' },
      /^error: not deployed: prj_0{22} at http:\S+: there is no such .* \(404 not_found, req_\w+\)$/,
    ],
    [['good'], { project: oldId }, /^error: not deployed: .* \(409 conflict, req_\w+\)$/],
    [['other', '--idempotency-key', 'once'], {}, /\(422 idempotency_key_reused, req_\w+\)$/],
  ];
  for (const [words, options, message] of cases) {
    const { stdout, stderr, exitCode } = await deploy(words, options);
    t.strictSame([stdout, exitCode], ['', 1]);
    t.match(stderr.trimEnd(), message);
  }
  t.equal(dump()['deployments']?.length, before);
  t.ok(project);
});

t.test('a repeated idempotency key leads to the same deployment', async (t) => {
  const { deploy, deployments } = await shared.another(t);
  const one = await deploy(['good', '--wait', '--idempotency-key', 'job-7']);
  const two = await deploy(['good', '--wait'], { env: { DAVIT_IDEMPOTENCY_KEY: 'job-7' } });
  const [made, ...more] = await deployments();
  t.strictSame(more, []);
  t.match([one, two], [{ exitCode: 0 }, { exitCode: 0, stdout: one.stdout }]);
  const said = `this idempotency key was used before: deployment ${made?.id} of ${made?.created_at}; nothing new was deployed\n`;
  t.match(two.stderr.replace(said, ''), /^deployment dpl_\w+ of good: succeeded in \w+\n$/);
  t.strictSame(await deploy(['good', '--idempotency-key', 'job-7']), {
    stdout: `${made?.id}\n`,
    stderr: said,
    exitCode: 0,
  });
  const json = await deploy(['good', '--idempotency-key', 'job-7', '--json']);
  t.match([JSON.parse(json.stdout), json.stderr], [{ id: made?.id, status: 'queued' }, said]);
});

t.test('a retry that is answered as its own first try was made a new deployment', async (t) => {
  const { deployHastily, deployments } = await shared.another(t);
  const proxy = await startProxy(t, shared.url);
  proxy.fates('lose-answer');
  const { stderr, exitCode } = await deployHastily(['good'], proxy.url);
  t.equal(exitCode, 0);
  t.match(stderr, /trying again in \w+\ndeployment dpl_\w+ of good: queued, number 1\n$/);
  t.equal((await deployments()).length, 1);
});

t.test('without logs:read, deploy waits without the log; without any read scope, it fails', async (t) => {
  const { json } = shared;
  const { deploy } = await shared.another(t);
  const keyWith = async (...scopes: string[]) => {
    const words = [
      'admin',
      'key',
      'create',
      '--name',
      scopes.join(' '),
      '--all-projects',
      '--scope',
      ...scopes,
    ];
    return (await json<Key & { secret: string }>(words)).secret;
  };
  const [noLogs, nothing, onlyLogs] = [
    await keyWith('deployments:write', 'deployments:read'),
    await keyWith('deployments:write'),
    await keyWith('deployments:write', 'logs:read'),
  ];
  t.match(await deploy(['bad', '--wait'], { key: noLogs }), {
    stdout: '',
    stderr: /may not read logs \(logs:read\)[\s\S]*: failed: exit code 3/,
    exitCode: 1,
  });
  t.match(await deploy(['good', '--wait'], { key: nothing }), {
    stdout: '',
    stderr: /error: dpl_\w+ cannot be followed: .*deployments:read.*; deployment dpl_\w+ goes on\n$/,
    exitCode: 1,
  });
  t.match(await deploy(['good', '--wait'], { key: onlyLogs }), { stdout: 'one\ntwo\nthree', exitCode: 0 });
});

t.test('wrong usage is refused before any request', async (t) => {
  const { refused } = place(t);
  const url = ['--url', 'http://127.0.0.1:1'];
  const good = ['prj_1', 'main', ...url];
  const cases: [words: string[], message: RegExp, environment?: Record<string, string>][] = [
    [url, /missing required argument 'project_id'/],
    [['prj_1', ...url], /missing required argument 'ref'/],
    [['website', 'main', ...url], /the project id must be one such as prj_/],
    [['prj_1', 'HEAD', ...url], /the ref must name a branch, a tag or a commit, not HEAD/],
    [['prj_1', 'a b', ...url], /the ref may hold only letters/],
    [['prj_1', 'main'], /required option '--url <url>' not specified/],
    [good, /there is no key: set DAVIT_KEY or say --key-file/, {}],
    [good, /there is no key/, { DAVIT_KEY: '' }],
    [good, /the key must be the single line/, { DAVIT_KEY: 'two\nlines' }],
    [good, /the single line that davit printed, without quotes/, { DAVIT_KEY: '"davit_key"' }],
    [['prj_1', 'main', '--url', 'deploy.example.com'], /--url <url>.*It must be a URL/],
    [['prj_1', 'main', '--url', 'ftp://example.com'], /It must be a URL/],
    [['prj_1', 'main', '--url', 'https://example.com/?key=1'], /It must be a URL/],
    [['prj_1', 'main', '--url', 'https://example.com/#top'], /It must be a URL/],
    [['prj_1', 'main', '--url', 'https://example.com/?'], /It must be a URL/],
    [['prj_1', 'main', '--url', 'https://example.com/#'], /It must be a URL/],
    [['prj_1', 'main', '--url', 'https://u@example.com'], /must not hold a user or a password/],
    [['prj_1', 'main', '--url', 'https://:p@example.com'], /must not hold a user or a password/],
    [['prj_1', 'main', '--url', 'https://example.com/davit/v2/'], /must not end with \/v2, which is added/],
    [[...good, '--idempotency-key', 'a b'], /1 to 255 visible ASCII/],
    [[...good, '--idempotency-key', 'k'.repeat(256)], /1 to 255 visible ASCII/],
    [[...good, '--retry-for', 'long'], /It must be a duration/],
    [[...good, '--key', 'davit_key'], /unknown option '--key'/],
  ];
  for (const [words, message, environment = { DAVIT_KEY: 'davit_key' }] of cases) {
    t.match(await refused(['deploy', ...words], { environment }), { exitCode: 2, message });
  }
  t.match(await refused(['deploy', ...good, '--key-file', 'missing']), {
    exitCode: 1,
    message: /--key-file: missing cannot be read \(ENOENT\): check that it is there/,
  });
});

t.test('an error that a retry cannot mend fails at once', async (t) => {
  const elsewhere = await scripted(t, [[301, { Location: 'https://deploy.example.com/' }]]);
  const other = await scripted(t, [[200, {}]]);
  const likeDavit = await startReceiver(t, {
    answers: [(response) => response.writeHead(201, JSON_TYPE).end('{"id":"7"}')],
  });
  const notHttp = await startReceiver(t, { answers: [raw('220 mail.example.com ESMTP\r\n')] });
  const cases: [url: string, message: RegExp][] = [
    [`http://${NOWHERE}`, /\.invalid has no address: is the name right\?/],
    [elsewhere.url, /the service has moved \(301\): https:\/\/deploy\.example\.com\//],
    [`http://127.0.0.1:${notHttp.port}`, /does not answer in HTTP: is the URL right\?/],
    [`${other.url}/somewhere`, /was answered with 200, and not by davit: is the URL right\?/],
    [
      `http://127.0.0.1:${likeDavit.port}`,
      /error: \S+ was answered with 201, and not by davit: is the URL right\?; the deployment may have been created: /,
    ],
  ];
  for (const [url, message] of cases) {
    const { stderr, exitCode } = await runHere(['deploy', 'prj_1', 'main', '--url', url], {
      environment: { DAVIT_KEY: 'davit_key' },
    });
    t.equal(exitCode, 1);
    t.match(stderr, message);
    t.match(stderr.trimEnd().split('\n').at(-1), /^error: /);
  }
});

t.test('the key can come from a file, and sending it in clear text causes a warning', async (t) => {
  const { deploy, directory, key } = await shared.another(t);
  const keyFile = join(directory, 'key');
  writeFileSync(keyFile, `${key}\n`);
  t.match(await deploy(['good', '--key-file', keyFile], { key: '' }), { exitCode: 0, stderr: /^deployment/ });
  t.match(await deploy(['good'], { env: { DAVIT_KEY_FILE: '', DAVIT_CA_FILE: '' } }), { exitCode: 0 });
  for (const host of [NOWHERE, `127.0.0.1.${NOWHERE}`]) {
    const { stderr } = await runHere(['deploy', 'prj_1', 'main', '--url', `http://${host}`], {
      environment: { DAVIT_KEY: 'davit_key' },
    });
    t.match(stderr, `warning: the key goes to ${host} in clear text`);
  }
});

t.test('a key sent to this machine or over TLS causes no warning', async (t) => {
  for (const url of ['http://localhost:1', 'http://127.9.9.9:1', 'http://[::1]:1', `https://${NOWHERE}`]) {
    const { stderr } = await runHere(['deploy', 'prj_1', 'main', '--url', url, '--retry-for', '0'], {
      environment: { DAVIT_KEY: 'davit_key' },
    });
    t.match(stderr, /^error: /, url);
  }
});

t.test('waiting for a queued deployment ends when its project is archived, with that reason', async (t) => {
  const { davit } = shared;
  const { startDeploy, project } = await shared.another(t);
  await davit(['admin', 'project', 'pause', project]);
  const client = startDeploy(['good', '--wait']);
  let stderr = '';
  client.stderr?.setEncoding('utf8').on('data', (piece: string) => {
    // It is there.
    if (stderr === '') void davit(['admin', 'project', 'archive', project, '--yes']);
    stderr += piece;
  });
  t.strictSame(await once(client, 'close'), [1, null]);
  t.match(stderr, /of good: canceled\nits project was archived\n$/);
});

t.test('a process that waits only for its next retry stays alive', async (t) => {
  const { stderr, exitCode } = await run(['deploy', 'prj_1', 'main', '--retry-for', '1s'], {
    env: { DAVIT_KEY: 'davit_key', DAVIT_URL: 'http://127.0.0.1:1' },
  });
  t.equal(exitCode, 1);
  t.match(stderr, /trying again[\s\S]*gave up\n$/);
});

t.test('a private certificate authority is trusted with --ca-file or NODE_EXTRA_CA_CERTS', async (t) => {
  const { deploy } = await sharedByTls.another(t);
  const https = sharedByTls.url.replace('127.0.0.1', 'localhost');
  const ca = join(FIXTURES, 'ca.pem');
  t.match(await deploy(['good'], { url: https }), {
    exitCode: 1,
    stderr:
      /^error: localhost:\d+ cannot be trusted \(\w+\): --ca-file makes davit trust an authority of your own\n$/,
  });
  t.match(await deploy(['good', '--wait', '--ca-file', ca], { url: https }), {
    exitCode: 0,
    stdout: 'one\ntwo\nthree',
  });
  t.match(await deploy(['good', '--wait'], { url: https, env: { NODE_EXTRA_CA_CERTS: ca } }), {
    exitCode: 0,
  });
});

t.test('NODE_TLS_REJECT_UNAUTHORIZED=0 does not give the key to whoever answers', async (t) => {
  const { deploy } = await sharedByTls.another(t);
  const url = sharedByTls.url.replace('127.0.0.1', 'localhost');
  t.match(await deploy(['good'], { url, env: { NODE_TLS_REJECT_UNAUTHORIZED: '0' } }), {
    stdout: '',
    stderr: /^error: localhost:\d+ cannot be trusted [^\n]*\n$/, // and no warning that says otherwise
    exitCode: 1,
  });
});

t.test('a service without TLS and an unusable --ca-file are named as the cause', async (t) => {
  const { deploy } = await shared.another(t);
  t.match(await deploy(['good'], { url: shared.url.replace('http:', 'https:') }), {
    exitCode: 1,
    stderr: /^error: 127\.0\.0\.1:\d+ does not speak TLS: is it http:\/\/ in place of https:\/\/\?\n$/,
  });
  for (const [file, message] of [
    [join(FIXTURES, 'localhost.key'), /^error: --ca-file: \/.* holds no certificate in PEM\n$/],
    ['missing.pem', /^error: --ca-file: missing\.pem cannot be read \(ENOENT\)/],
  ] as const) {
    t.match(await deploy(['good', '--ca-file', file]), { exitCode: 1, stderr: message });
  }
});

t.test('an expired certificate and one for another name are named as the cause', async (t) => {
  const { deploy } = await shared.another(t);
  for (const [tls, message] of [
    ['expired', /\(CERT_HAS_EXPIRED\): its certificate has expired, and has to be renewed there\n$/],
    [
      'wrong-host',
      /\(ERR_TLS_CERT_ALTNAME_INVALID\): its certificate is for another name: is the URL right\?\n$/,
    ],
  ] as const) {
    const { port } = await startReceiver(t, { tls });
    const options = ['good', '--ca-file', join(FIXTURES, 'ca.pem')];
    t.match(await deploy(options, { url: `https://127.0.0.1:${port}` }), { exitCode: 1, stderr: message });
  }
});

t.test('deploy goes through https_proxy, except to hosts in no_proxy', async (t) => {
  const { deploy } = await sharedByTls.another(t);
  const https = sharedByTls.url.replace('127.0.0.1', 'localhost');
  const asked: string[] = [];
  const tunnel = createServer().on('connect', (request, client) => {
    asked.push(request.url ?? '');
    const [host = '', port] = (request.url ?? '').split(':');
    const service = connect(Number(port), host, () => {
      client.write('HTTP/1.1 200 OK\r\n\r\n');
      service.pipe(client).pipe(service);
    });
    for (const end of [service, client]) end.on('error', () => undefined);
  });
  const environment = { https_proxy: await listen(t, tunnel) };
  const words = ['good', '--wait', '--ca-file', join(FIXTURES, 'ca.pem')];
  t.match(await deploy(words, { url: https, environment }), { exitCode: 0, stdout: 'one\ntwo\nthree' });
  t.equal(new Set(asked).size, 1);
  t.equal(asked[0], new URL(https).host);
  const count = asked.length;
  const around = { ...environment, no_proxy: 'localhost' };
  t.match(await deploy(words, { url: https, environment: around }), { exitCode: 0 });
  t.equal(asked.length, count);
});

/** Gives these answers in turn, then forwards every request. */
async function scripted(t: Test, answers: [status: number, headers: Record<string, string>][]) {
  let target = '';
  let count = 0;
  const server = createServer(async (request, response) => {
    count += 1;
    const body = await text(request);
    const answer = answers.shift();
    if (answer !== undefined) {
      response.writeHead(...answer).end('<p>not davit</p>');
      return;
    }
    const { host: _, connection: __, ...headers } = request.headers;
    const passed = await fetch(`${target}${request.url}`, {
      method: request.method ?? 'GET',
      headers: headers as Record<string, string>,
      body: body === '' ? null : body,
    });
    response.writeHead(passed.status).end(await passed.text());
  });
  return {
    url: await listen(t, server),
    count: () => count,
    thenLeadTo(url: string) {
      target = url;
    },
  };
}

async function listen(t: Test, server: Server): Promise<string> {
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.teardown(() => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}
