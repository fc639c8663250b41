import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { hash } from 'node:crypto';
import { once } from 'node:events';
import { mkdirSync, readdirSync, readFileSync, readlinkSync, symlinkSync, writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { promisify } from 'node:util';
import t, { type Test } from 'tap';
import { serviceSignature } from '../../src/deliver/sign.ts';
import { realEffects } from '../../src/effects.ts';
import { newSigningSecret } from '../../src/secrets.ts';
import { QUEUED } from '../helpers/deploy-client.ts';
import { executablePath } from '../helpers/executable.ts';
import { ifHas } from '../helpers/programs.ts';
import { readmeBlock } from '../helpers/readme.ts';
import {
  type Answer,
  hangUp,
  held,
  type Receiver,
  redirect,
  silence,
  startReceiver,
  status,
} from '../helpers/receiver.ts';
import { place, type RunningService } from '../helpers/service.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/* The README's first deployment and recipes, taken out of it and run as they stand there. */

const execute = promisify(execFile);

t.test('the first deployment works from an empty directory', ifHas('git', 'curl'), async (t) => {
  const there = reader(t);
  await there.shell(readmeBlock('first-deployment.sh'));
  const service = await there.serve();
  const variables = await there.variables('site');

  const { stdout } = await there.shell(
    `${variables}\n${readmeBlock('first-deployment-goes-on.sh')}`,
    service,
  );
  t.match(stdout, /^hello\n/m);
  t.match(stdout, /"status":"queued"/);

  const deploy = async (ref: string) => {
    const job = `davit deploy "$PROJECT" ${ref} --wait 2>&1 || echo "exit $?"`;
    return (await there.shell(`${variables}\n${job}`, service)).stdout;
  };
  const index = () => readFileSync(join(there.directory, 'current/index.html'), 'utf8');
  await there.shell(`cd site && git tag v1 && echo goodbye >index.html &&
    git -c user.name=me -c user.email=me@example.com commit --quiet --all --message goodbye`);
  t.match(await deploy('main'), /succeeded/);
  t.equal(index(), 'goodbye\n', 'a branch is what the repository has now');
  t.match(await deploy('v1'), /succeeded/);
  t.equal(index(), 'hello\n', 'a rollback is a deployment of the earlier ref');
  t.match(await deploy('v2'), /there is no v2\n.*failed.*\nexit 1\n$/s);
  t.equal(index(), 'hello\n', 'a failed deployment changes nothing');
  symlinkSync(readlinkSync(join(there.directory, 'current')), join(there.directory, 'next'));
  await deploy('main');
  t.equal(index(), 'goodbye\n', 'the remains of a deployment stopped before its last step do no harm');
  for (const ref of ['v1', 'main']) await deploy(ref);
  t.equal(readdirSync(join(there.directory, 'releases')).length, 5, 'of six');
  t.equal(index(), 'goodbye\n');
});

t.test('the worker takes queued deployments and reports them', ifHas('curl', 'jq'), async (t) => {
  const there = reader(t);
  const worker = readmeBlock('worker.sh');
  writeFileSync(join(there.directory, 'worker.sh'), worker, { mode: 0o755 });
  writeFileSync(join(there.directory, 'small-pages.sh'), worker.replace('limit=200', 'limit=2'), {
    mode: 0o755,
  });
  writeFileSync(
    join(there.directory, 'roll-out'),
    '#!/bin/sh\necho "$1" >>rolled-out\n[ "$1" != broken ]\n',
    { mode: 0o755 },
  );
  await there.shell(`
    davit admin project create --name fleet --report-timeout 2h
    for ref in v1 broken v2; do davit admin deployment create fleet $ref; done`);
  const service = await there.serve();
  const variables = await there.variables('fleet', '--scope deployments:read --scope deployments:report');
  await there.shell(`${variables}\n./worker.sh`, service);
  t.strictSame(await there.endings(), [
    ['v1', 'succeeded', null],
    ['broken', 'failed', 'the rollout did not become healthy'],
    ['v2', 'succeeded', null],
  ]);
  const rolledOut = () => readFileSync(join(there.directory, 'rolled-out'), 'utf8');
  t.equal(rolledOut(), 'v1\nbroken\nv2\n', 'the oldest first');
  await there.shell('for ref in v3 v4 v5; do davit admin deployment create fleet $ref; done');
  await there.shell(`${variables}\n./small-pages.sh`, service);
  t.equal(rolledOut(), 'v1\nbroken\nv2\nv3\nv4\nv5\n', 'from all pages');

  await there.shell('davit admin project pause fleet; davit admin deployment create fleet paused');
  const paused = await there.shell(`${variables}\n./worker.sh`, service);
  t.match(paused.stderr, /dpl_\w+\/report: 409 .*the project is paused/);
  t.notMatch(rolledOut(), /paused/, 'nothing starts in a paused project');
  await there.shell('davit admin project resume fleet');
  await there.shell(`${variables}\n./worker.sh`, service);
  t.match(rolledOut(), /^paused$/m, 'and it starts when that is resumed');

  // Somebody else reports the end of the first one while the worker is busy with it.
  writeFileSync(
    join(there.directory, 'roll-out'),
    `#!/bin/sh
echo "$1" >>rolled-out
[ "$1" = v6 ] || exit 0
id=$(davit admin deployment list --status running --json | jq -r '.[0].id')
curl -s -H "Authorization: Bearer $DAVIT_KEY" -H 'Content-Type: application/json' \\
  -d '{"status":"failed","message":"given up"}' "$DAVIT_URL/v2/deployments/$id/report" >/dev/null
`,
  );
  await there.shell('for ref in v6 v7; do davit admin deployment create fleet $ref; done');
  const { stderr } = await there.shell(`${variables}\n./worker.sh`, service);
  t.match(stderr, /dpl_\w+\/report: 409 .*"code":"conflict"/, 'the worker says why, and goes on');
  t.strictSame((await there.endings()).slice(-2), [
    ['v6', 'failed', 'given up'],
    ['v7', 'succeeded', null],
  ]);
});

t.test('a worker that is refused for now or cut off loses no report', ifHas('curl', 'jq'), async (t) => {
  const there = reader(t);
  writeFileSync(join(there.directory, 'roll-out'), '#!/bin/sh\necho "$1" >>rolled-out\n', { mode: 0o755 });
  const service = await startReceiver(t, {
    answers: [
      status(503, { body: '<h1>Service Unavailable</h1>' }),
      status(200, { body: JSON.stringify({ data: [QUEUED], next_cursor: null }) }),
      hangUp(),
      status(200, { body: JSON.stringify({ ...QUEUED, status: 'running' }) }),
      status(429, { body: JSON.stringify(LIMITED) }),
      status(200, { body: JSON.stringify({ ...QUEUED, status: 'succeeded' }) }),
    ],
  });
  const variables = 'export DAVIT_KEY=davit_key PROJECT=prj_1';
  await there.shell(`${variables}\n${readmeBlock('worker.sh')}`, { url: `http://127.0.0.1:${service.port}` });
  t.equal(readFileSync(join(there.directory, 'rolled-out'), 'utf8'), 'main\n');
  const reported = service.requests.filter(({ method }) => method === 'POST');
  t.strictSame(
    reported.map(({ body }) => JSON.parse(`${body}`).status),
    ['running', 'running', 'succeeded', 'succeeded'],
  );
});

const OWN_STEP = 'test "$(find .git -maxdepth 0)" = .git';

t.test(
  'a release from a checkout takes a branch from origin, also by its whole name',
  ifHas('git'),
  async (t) => {
    const there = reader(t);
    const commit = 'git -c user.name=me -c user.email=me@example.com commit --quiet --allow-empty --message';
    // So that the ids of the commits are always the same.
    const dates =
      "export GIT_AUTHOR_DATE='2026-01-01 00:00 +0000' GIT_COMMITTER_DATE='2026-01-01 00:00 +0000'";
    await there.shell(`${dates}\ngit init --quiet --initial-branch=old site && cd site && ${commit} one && git branch main
    git clone --quiet . ../website && git checkout --quiet main && git branch --quiet -D old
    ${commit} two && git tag v2 && ${commit} three
    mkdir ../bin && ln -s /bin/true ../bin/systemctl && ln -s /bin/true ../bin/curl`);
    const release = async (ref: string) => {
      const job = `cd website && export PATH="$PWD/../bin:$PATH" DEPLOY_REF=${ref} DEPLOY_OUTPUT=../outputs`;
      // What a reader puts there may well remove old files.
      const script = readmeBlock('release-website.sh').replace('# npm ci, migrations, …', OWN_STEP);
      await there.shell(`${job}\n${script}`);
      return (await there.shell('git -C website log -1 --format=%s')).stdout.trim();
    };
    for (const ref of ['main', 'refs/heads/main']) t.equal(await release(ref), 'three', ref);
    const two = (await there.shell('git -C site rev-parse v2')).stdout.trim();
    let text = 0;
    while (!hash('sha1', `blob ${`${text}`.length}\0${text}`).startsWith(two.slice(0, 4))) text += 1;
    await there.shell(`printf ${text} | git -C website hash-object -w --stdin`);
    for (const ref of ['v2', 'refs/tags/v2', two, two.slice(0, 10)]) t.equal(await release(ref), 'two', ref);
    t.equal(await release(two.slice(0, 4)), 'two', 'what a file also begins with is a commit');
    for (const ref of ['no-such', 'old', 'origin/main']) {
      const stderr = new RegExp(`^origin has no branch, tag or commit ${ref}$`, 'm');
      await t.rejects(release(ref), { code: 1, stderr });
    }
  },
);

t.test('a release of compose that fails goes back to the tag that succeeded last', async (t) => {
  const there = reader(t);
  const bin = join(there.directory, 'bin');
  mkdirSync(bin);
  writeFileSync(join(bin, 'docker'), DOCKER, { mode: 0o755 });
  writeFileSync(join(there.directory, 'release-shop'), readmeBlock('release-shop.sh'), { mode: 0o755 });
  await there.shell(
    'davit admin project create --name shop --dir . --env "PATH=$PWD/bin:$PATH" -- ./release-shop',
  );
  const service = await there.serve();
  const variables = await there.variables('shop');
  for (const ref of ['sick', 'v1', 'sick', 'unknown', 'v2']) {
    await there.shell(`${variables}\ndavit deploy "$PROJECT" ${ref} --wait || true`, service);
  }
  t.strictSame(await there.endings(), [
    ['sick', 'failed', null],
    ['v1', 'succeeded', null],
    ['sick', 'failed', null],
    ['unknown', 'failed', null],
    ['v2', 'succeeded', null],
  ]);
  const lines = readFileSync(join(there.directory, 'up'), 'utf8').trimEnd().split('\n');
  t.strictSame(lines, ['sick', 'v1', 'sick', 'v1', 'v2'], 'a tag that is unknown replaces nothing');
  t.equal(readFileSync(join(there.directory, '.env'), 'utf8'), 'TAG=v2\n');
});

/** Stands for docker compose, which takes the tag from the environment, and otherwise from .env. */
const DOCKER = `#!/bin/sh
[ "\${TAG:-}" ] || . ./.env
case "$2" in
  pull) [ "$TAG" != unknown ] ;;
  up) echo "$TAG" >>up; [ "$TAG" != sick ] ;;
esac
`;

t.test("a container's health check is whether davit is ready", ifHas('bash'), async (t) => {
  const there = reader(t);
  const [, command = ''] = /test: \[CMD, bash, -c, '([^']*)'\]/.exec(readmeBlock('compose.yaml')) ?? [];
  const service = await there.serve();
  const check = () => execute('bash', ['-c', command.replace('/8080', `/${new URL(service.url).port}`)]);
  await check();
  await service.stop();
  await t.rejects(check(), { code: 1 });
});

t.test('the CI job of the README exits as the deployment ended', ifHas('curl', 'jq'), async (t) => {
  const there = reader(t);
  await there.shell(
    `davit admin project create --name site -- /bin/sh -c 'echo "of $DEPLOY_REF"; [ $DEPLOY_REF = good ]'`,
  );
  const service = await there.serve();
  const variables = await there.variables('site');
  const job = (ref: string, jobId = `job-${ref}`) =>
    there.shell(`${variables}\nexport REF=${ref} JOB_ID=${jobId}\n${readmeBlock('ci.sh')}`, service);
  t.match(await job('good'), { stdout: 'of good\n' });
  await t.rejects(job('bad'), { code: 1, stdout: 'of bad\n' });
  await t.rejects(job('good', 'job-bad'), { code: 1, stdout: '', stderr: /idempotency_key_reused/ });
  await t.rejects(
    job('good', ''),
    { name: 'Error', stdout: '', stderr: /JOB_ID/ },
    'curl would leave out an empty header',
  );
});

t.test('a job of GitHub that is canceled cancels its deployment', ifHas('bash'), async (t) => {
  const there = reader(t);
  await there.shell("davit admin project create --name site -- /bin/sh -c 'echo started; exec sleep 600'");
  const { url } = await there.serve();
  const [, step = ''] = /- run: (.*davit deploy prj_….*)/.exec(readmeBlock('github.yaml')) ?? [];
  const file = join(there.directory, 'step.sh');
  const words = step.replace('prj_…', '"$PROJECT"');
  symlinkSync(executablePath(), join(there.directory, 'davit'));
  writeFileSync(file, `${await there.variables('site')}\nGITHUB_SHA=main\n${words}\n`);
  // As its runner starts it and ends it: the signal is for this process alone.
  const job = spawn('bash', ['-e', file], {
    cwd: there.directory,
    env: { PATH: process.env['PATH'], DAVIT_URL: url },
    stdio: ['ignore', 'pipe', 'ignore'],
  });
  const ended = once(job, 'exit');
  for await (const line of createInterface({ input: job.stdout })) if (line === 'started') job.kill('SIGINT');
  t.strictSame(await ended, [1, null]);
  t.strictSame(await there.endings(), [['main', 'canceled', null]]);
});

t.test('the CI job goes on after what was refused for now or cut off', ifHas('curl', 'jq'), async (t) => {
  const there = reader(t);
  const service = await startReceiver(t, {
    answers: [
      status(429, { body: JSON.stringify(LIMITED) }),
      status(201, { body: JSON.stringify(QUEUED) }),
      hangUp(),
      status(200, { body: JSON.stringify({ ...QUEUED, status: 'succeeded' }) }),
      status(503, { body: '<h1>Service Unavailable</h1>' }),
      status(200, { body: 'of main\n' }),
    ],
  });
  const variables = 'export DAVIT_KEY=davit_key PROJECT=prj_1 REF=main JOB_ID=job';
  t.match(
    await there.shell(`${variables}\n${readmeBlock('ci.sh')}`, { url: `http://127.0.0.1:${service.port}` }),
    { stdout: 'of main\n' },
  );
  t.strictSame(
    service.requests.map(({ path }) => path.replace(/\?.*/, '')),
    ['/v2/projects/prj_1/deployments', '/v2/deployments/dpl_1', '/v2/deployments/dpl_1/logs'].flatMap(
      (path) => [path, path],
    ),
  );
});

for (const shell of ['dash', 'bash']) {
  t.test(
    `in ${shell}, the CI job and the worker say what refused them`,
    ifHas(shell, 'curl', 'jq'),
    async (t) => {
      const directory = temporaryDirectory(t);
      const created = status(201, { body: JSON.stringify(QUEUED) });
      const cases: [script: string, answers: [Answer, ...Answer[]], said: RegExp][] = [
        [
          'ci.sh',
          [created, status(404, { body: '404 page not found' })],
          /\?wait=20: 404 404 page not found\n$/,
        ],
        ['ci.sh', [created, status(403)], /\?wait=20: 403 \n$/],
        ['ci.sh', [redirect('/login')], /\/deployments: 302 \n$/],
        ['worker.sh', [status(401, { body: '{"error":"wrong"}' })], /limit=200: 401 {"error":"wrong"}\n$/],
      ];
      for (const [script, answers, said] of cases) {
        const service = await startReceiver(t, { answers });
        const env = jobEnvironment(directory, service);
        await t.rejects(execute(shell, ['-c', readmeBlock(script)], { env }), {
          code: 1,
          stdout: '',
          stderr: said,
        });
      }
      t.strictSame(readdirSync(directory), []);
    },
  );

  t.test(
    `in ${shell}, the CI job and a worker that looks for work end at once when they are told to, and leave nothing`,
    ifHas(shell, 'curl', 'jq'),
    async (t) => {
      const directory = temporaryDirectory(t);
      const cases: [script: string, answers: [Answer, ...Answer[]]][] = [
        ['ci.sh', [silence()]],
        ['ci.sh', [status(201, { body: JSON.stringify(QUEUED) }), silence()]],
        ['worker.sh', [silence()]],
      ];
      for (const signal of ['SIGTERM', 'SIGINT'] as const) {
        for (const [script, answers] of cases) {
          const service = await startReceiver(t, { answers });
          const job = startScript(t, shell, script, directory, service);
          for (const _ of answers) await service.next();
          job.kill(signal);
          t.strictSame(await once(job, 'exit'), CAUGHT, `${script} at ${signal}`);
          t.throws(() => killGroup(job), { code: 'ESRCH' }, 'curl has ended too');
          t.strictSame(readdirSync(directory), []);
        }
      }
    },
  );

  t.test(
    `in ${shell}, a worker that is told to end reports the rollout under way, and begins no other`,
    ifHas(shell, 'curl', 'jq'),
    async (t) => {
      const directory = temporaryDirectory(t);
      const there = temporaryDirectory(t);
      writeFileSync(join(there, 'roll-out'), '#!/bin/sh\nkill -TERM $PPID\n', { mode: 0o755 });
      const running = held(status(200));
      const service = await startReceiver(t, {
        answers: [
          status(200, { body: JSON.stringify({ data: [QUEUED, QUEUED], next_cursor: null }) }),
          running.answer,
          status(200),
        ],
      });
      const worker = startScript(t, shell, 'worker.sh', directory, service, there);
      const ended = once(worker, 'exit');
      for (const _ of ['queued', 'running']) await service.next();
      worker.kill('SIGTERM');
      running.release();
      t.strictSame(await ended, [0, null]);
      t.strictSame(
        service.requests.slice(1).map(({ body }) => JSON.parse(`${body}`).status),
        ['running', 'succeeded'],
      );
      t.throws(() => killGroup(worker), { code: 'ESRCH' }, 'nothing goes on without it');
      t.strictSame(readdirSync(directory), []);
    },
  );
}

/** How a script ends that catches the signal: the first process of a container is spared any that it does not. */
const CAUGHT = [1, null];

/** A script of the README in a process group of its own. */
function startScript(
  t: Test,
  shell: string,
  script: string,
  directory: string,
  service: Receiver,
  cwd = directory,
): ChildProcess {
  const started = spawn(shell, ['-c', readmeBlock(script)], {
    cwd,
    env: jobEnvironment(directory, service),
    stdio: 'ignore',
    detached: true,
  });
  t.teardown(() => {
    try {
      killGroup(started);
    } catch {
      // Nothing is left of it.
    }
  });
  return started;
}

/** Throws if there is nothing left of it. */
function killGroup({ pid }: ChildProcess): void {
  if (pid === undefined) throw new Error('it was not started');
  process.kill(-pid, 'SIGKILL');
}

/** Of a job against this service, with its temporary files in this directory. */
function jobEnvironment(directory: string, { port }: Receiver): NodeJS.ProcessEnv {
  const { PATH } = process.env;
  const DAVIT_URL = `http://127.0.0.1:${port}`;
  return {
    PATH,
    TMPDIR: directory,
    DAVIT_URL,
    DAVIT_KEY: 'davit_key',
    PROJECT: 'prj_1',
    REF: 'main',
    JOB_ID: 'job',
  };
}

/** The answer to a request too many. */
const LIMITED = { error: { code: 'rate_limited', message: 'too many requests', request_id: 'req_1' } };

t.test('the receiver accepts a delivery, recognizes a repeat, and rejects a forgery', async (t) => {
  const directory = temporaryDirectory(t);
  for (const name of ['verify.mjs', 'receiver.mjs']) writeFileSync(join(directory, name), readmeBlock(name));
  const secret = newSigningSecret(realEffects.randomBytes);
  const receiver = spawn(process.execPath, ['receiver.mjs'], {
    cwd: directory,
    env: { PORT: '0', DAVIT_SIGNING_SECRET: secret },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  t.teardown(() => receiver.kill('SIGKILL'));
  const lines = createInterface({ input: receiver.stdout })[Symbol.asyncIterator]();
  const port = /^listening on (\d+)$/.exec((await lines.next()).value ?? '')?.[1];
  const send = async (id: string, key: string) => {
    const body = JSON.stringify({ id, type: 'deployment.succeeded', data: { ref: `of ${id}` } });
    const header = serviceSignature([key], Math.floor(realEffects.now() / 1000), body);
    const response = await fetch(`http://127.0.0.1:${port}/`, {
      method: 'POST',
      headers: { 'Service-Signature': header },
      body,
    });
    return response.status;
  };
  const half = connect(Number(port), '127.0.0.1');
  half.resume().end('POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{');
  await once(half, 'close');
  t.equal(
    await send('evt_0', newSigningSecret(realEffects.randomBytes)),
    400,
    'a client that hung up did no harm',
  );
  t.equal(await send('evt_1', secret), 204);
  t.equal(await send('evt_1', secret), 204);
  t.equal(await send('evt_2', secret), 204);
  t.equal((await lines.next()).value, "deployment.succeeded { ref: 'of evt_1' }");
  t.equal(
    (await lines.next()).value,
    "deployment.succeeded { ref: 'of evt_2' }",
    'a repeated delivery is handled once',
  );
});

/** Somebody with an empty directory, `davit` in the PATH, and a shell in which an error is one. */
function reader(t: Test) {
  const there = place(t);
  const { directory } = there;
  const programs = join(temporaryDirectory(t), 'bin');
  mkdirSync(programs);
  symlinkSync(executablePath(), join(programs, 'davit'));

  return {
    directory,
    serve: () => there.serve(),
    /** Rejects if it exits with another code than 0. A service's own address stands for the README's. */
    shell(script: string, service?: Pick<RunningService, 'url'>) {
      const text = script.replaceAll('http://127.0.0.1:8080', service?.url ?? 'no service yet');
      return execute('sh', ['-e', '-c', text], {
        cwd: directory,
        env: { PATH: `${programs}:${process.env['PATH']}`, HOME: directory, DAVIT_URL: service?.url ?? '' },
      });
    },
    /** What the README's reader has in the environment, as lines of a script. */
    async variables(name: string, scopes = '--all-scopes') {
      const words = ['admin', 'key', 'create', '--name', 'me', '--project', name, ...scopes.split(' ')];
      const { secret } = await there.davit<{ secret: string }>(...words);
      const { id } = await there.davit<{ id: string }>('admin', 'project', 'show', name);
      return `export DAVIT_KEY=${secret} PROJECT=${id}`;
    },
    /** Of all deployments, the oldest first. */
    async endings() {
      const deployments = await there.davit<{ ref: string; status: string; message: string | null }[]>(
        'admin',
        'deployment',
        'list',
      );
      return deployments.map(({ ref, status, message }) => [ref, status, message]).reverse();
    },
  };
}
