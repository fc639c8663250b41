import { readdirSync } from 'node:fs';
import t from 'tap';
import type { Deployment, DeploymentId, ProjectId } from '../../src/domain.ts';
import { follow, inFile, scriptProject } from '../helpers/administration.ts';
import { place } from '../helpers/cli.ts';
import { serve } from '../helpers/served.ts';
import { endOf, KEY, newDeployment, ref, reportFor } from '../helpers/store.ts';
import { needsTerminal, onTerminal } from '../helpers/terminal.ts';

const deployment = (...words: string[]) => ['admin', 'deployment', ...words];

t.test('a running service carries out a deployment that admin created', async (t) => {
  const there = place(t);
  await scriptProject(
    there,
    'website',
    'echo "deploying $DEPLOY_REF"; echo url=https://x.test >> "$DEPLOY_OUTPUT"',
  );
  await serve(t, there.directory);
  const made = await there.davit(deployment('create', 'website', 'v1.2.3'));
  t.match(made, { stdout: /^dpl_\w{24}\n$/, exitCode: 0 });
  t.match(made.stderr, /^created a deployment of v1\.2\.3 in project website \(prj_\w+\)\n$/);

  const id = made.stdout.trim();
  t.strictSame(await there.davit(deployment('logs', id, '-f')), {
    stdout: 'deploying v1.2.3\n',
    stderr: `deployment ${id} of v1.2.3: succeeded\n`,
    exitCode: 0,
  });
  t.match(await there.json<Deployment>(deployment('show', id)), {
    id,
    ref: 'v1.2.3',
    status: 'succeeded',
    trigger: 'admin',
    created_by: null,
    outputs: { url: 'https://x.test' },
  });
});

t.test('a running service stops a deployment that admin canceled', async (t) => {
  const there = place(t);
  await scriptProject(there, 'website', 'echo started; exec sleep 30');
  await serve(t, there.directory);
  const { id } = await there.json<Deployment>(deployment('create', 'website', 'main'));
  const follower = follow(there, id);
  await follower.said('started\n');

  const canceled = await there.davit(deployment('cancel', id));
  t.match(canceled, { stdout: `deployment ${id} of main is being canceled\n`, stderr: '', exitCode: 0 });
  t.equal(await follower.exitCode, 0);
  t.equal(follower.notes(), `deployment ${id} of main: canceled\n`);
  t.match(await there.json<Deployment>(deployment('show', id)), { status: 'canceled', reason: 'user' });
});

t.test('without a service, a new deployment stays queued, and a note says so', async (t) => {
  const there = place(t);
  await scriptProject(there, 'website', 'echo "$DEPLOY_REF"');
  const made = await there.davit(deployment('create', 'website', 'main'));
  t.match(made.stderr, /\nnote: no service is running: it waits for 'davit serve'\n$/);
  const id = made.stdout.trim();
  t.match(await there.json<Deployment>(deployment('show', id)), { status: 'queued', queue_position: 1 });

  const follower = follow(there, id);
  await follower.noted('note: no service is running: it waits for');
  await serve(t, there.directory);
  t.equal(await follower.exitCode, 0);
  t.equal(follower.output(), 'main\n');
});

t.test(
  'a log that is followed until a signal leaves no -wal when the service has ended before',
  async (t) => {
    for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
      const there = place(t);
      await scriptProject(there, 'website', 'true');
      await there.davit(['admin', 'project', 'pause', 'website']);
      const service = await serve(t, there.directory);
      const { id } = await there.json<Deployment>(deployment('create', 'website', 'main'));
      const follower = follow(there, id);
      await follower.noted('note: the project is paused');
      t.equal(await service.stop(), 0);
      follower.child.kill(signal);
      t.equal(await follower.exitCode, null);
      t.equal(follower.child.signalCode, signal, 'a shell sees that a signal ended it');
      t.strictSame(readdirSync(there.directory).sort(), ['davit.db', 'davit.db-lock']);
    }
  },
);

t.test('a note says that a new deployment waits for a paused project or another system', async (t) => {
  const there = place(t);
  await scriptProject(there, 'website', 'true');
  await there.davit(['admin', 'project', 'pause', 'website']);
  await there.davit(['admin', 'project', 'create', '--name', 'elsewhere']);
  const [paused, elsewhere] = await Promise.all([
    there.davit(deployment('create', 'website', 'main')),
    there.davit(deployment('create', 'elsewhere', 'main')),
  ]);
  t.match(paused, { stderr: /note: the project is paused: it waits for/, exitCode: 0 });
  t.match(elsewhere, { stderr: /note: another system carries it out/, exitCode: 0 });
  await there.davit(['admin', 'project', 'pause', 'elsewhere']);
  t.match(await there.davit(deployment('create', 'elsewhere', 'main')), {
    stderr: /note: the project is paused: it waits for/,
  });
});

t.test('an invalid deployment command is refused and changes nothing', async (t) => {
  const there = place(t);
  t.match(await there.refused(deployment('create', 'website', 'main')), { exitCode: 1, message: /no file/ });
  await scriptProject(there, 'website', 'true');
  await scriptProject(there, 'twin', 'true');
  await scriptProject(there, 'twin', 'true');
  await scriptProject(there, 'old', 'true');
  const { id } = await there.json<Deployment>(deployment('create', 'old', 'main'));
  await there.davit(['admin', 'project', 'archive', 'old', '--yes']);
  await there.davit(deployment('create', 'website', 'one'));
  const cases: [words: string[], exitCode: number, message: RegExp, env?: Record<string, string>][] = [
    [['create', 'webiste', 'main'], 1, /there is no project 'webiste': did you mean 'website'\?/],
    [['create', 'twin', 'main'], 1, /several projects are named 'twin': use the id/],
    [['create', 'website'], 2, /missing required argument 'ref'/],
    [['create', 'website', 'secret;rm'], 2, /^error: the ref may hold only letters.* \(see 'davit admin/],
    [['create', 'website', ''], 2, /the ref must not be empty/],
    [['create', 'old', 'main'], 1, /project old \(prj_\w+\) is archived .*'davit admin project resume'/],
    [['create', 'website', 'main', '--max-queued', '1'], 1, /1 deployment waits in this project already/],
    [['create', 'website', 'main'], 1, /waits in this project already/, { DAVIT_MAX_QUEUED: '1' }],
    [['create', 'website', 'main', '--max-queued', 'some'], 2, /--max-queued <n>.*whole number/],
    [['redeploy', id], 1, /project old \(prj_\w+\) is archived/],
    [['redeploy', 'dpl_0'], 1, /there is no deployment 'dpl_0': 'davit admin deployment list' shows/],
    [['cancel', id], 1, /the deployment has ended already: it was canceled/],
    [
      ['cancel', 'website'],
      1,
      /that is a project, whose deployments 'davit .* list --project prj_\w+' shows/,
    ],
    [['show', 'dpl_0'], 1, /there is no deployment 'dpl_0'/],
    [['logs', 'dpl_0', '-f'], 1, /there is no deployment 'dpl_0'/],
    [['list', '--project', 'nothing-like-it'], 1, /there is no project/],
    [['list', '--status', 'succeded'], 2, /there is no status 'succeded': did you mean succeeded\?/],
    [['list', '--limit', '0'], 2, /--limit <n>.*whole number/],
  ];
  await Promise.all(
    cases.map(async ([words, exitCode, message, env]) => {
      const refusal = await there.refused(deployment(...words), env === undefined ? {} : { env });
      t.match(refusal, { exitCode, message }, words.join(' '));
      t.notMatch(refusal.message, /secret/);
    }),
  );
});

t.test('a name in place of a deployment means the project that is not archived', async (t) => {
  const there = place(t);
  const old = await scriptProject(there, 'website', 'true');
  await there.davit(['admin', 'project', 'archive', 'website', '--yes']);
  const advised = (id: string) => new RegExp(`that is a project, .* list --project ${id}' shows`);
  t.match((await there.refused(deployment('logs', 'website'))).message, advised(old));
  const website = await scriptProject(there, 'website', 'true');
  t.match((await there.refused(deployment('logs', 'website'))).message, advised(website));
});

t.test('--max-queued limits how many deployments may wait', async (t) => {
  const there = place(t);
  await scriptProject(there, 'website', 'true');
  const results = [];
  for (const limit of ['1', '2', '2', 'off']) {
    const { exitCode } = await there.davit(deployment('create', 'website', 'main', '--max-queued', limit));
    results.push(exitCode);
  }
  t.strictSame(results, [0, 0, 1, 0]);
});

t.test('canceling a queued deployment ends it at once', async (t) => {
  const there = place(t);
  await scriptProject(there, 'website', 'true');
  const { id } = await there.json<Deployment>(deployment('create', 'website', 'main'));
  const { stdout, stderr, exitCode } = await there.davit(deployment('cancel', id));
  t.strictSame([stdout, stderr, exitCode], [`deployment ${id} of main is canceled\n`, '', 0]);
  t.match(there.dump()['deployments'], [{ id, status: 'canceled', reason: 'user' }]);
  t.match(there.dump()['events'], [{ type: 'deployment.created' }, { type: 'deployment.canceled' }]);
});

t.test('canceling a deployment that no service looks after says who will end it', async (t) => {
  const there = place(t);
  const website = await scriptProject(there, 'website', 'true');
  const beside = await scriptProject(there, 'beside', 'true');
  const { stdout } = await there.davit(['admin', 'project', 'create', '--name', 'elsewhere']);
  const ids = await inFile(there, async ({ writer }) => {
    const interrupted = await writer.write('deployments.create', newDeployment(website));
    await writer.write('deployments.create', newDeployment(beside));
    for (const _ of [website, beside]) await writer.write('deployments.claim', undefined);
    const remote = await writer.write('deployments.create', newDeployment(stdout.trim() as ProjectId));
    const { id } = remote;
    await writer.write('deployments.report', reportFor(id));
    return [interrupted.id, id];
  });
  const [left, remote] = await Promise.all(ids.map((id) => there.davit(deployment('cancel', id))));
  t.match(left, { stdout: /is being canceled/, stderr: /'davit serve' ends it when it starts/, exitCode: 0 });
  t.match(remote, {
    stdout: /is being canceled/,
    stderr: /it ends when another system reports it as failed/,
    exitCode: 0,
  });
  t.match(await there.davit(deployment('cancel', String(ids[0]))), { stdout: /is already being canceled/ });
  t.match(await there.davit(deployment('cancel', String(ids[1]))), {
    stdout: /is already being canceled/,
    stderr: /^note: it ends when another system reports it as failed, .*set --report-timeout'\n$/,
  });
});

t.test('a redeployment is a new deployment of the same ref', async (t) => {
  const there = place(t);
  await scriptProject(there, 'website', 'true');
  const first = await there.json<Deployment>(deployment('create', 'website', 'v1'));
  const { stdout, stderr } = await there.davit(deployment('redeploy', first.id));
  t.match(stderr, /^created a deployment of v1 in project website/);
  t.match(await there.json<Deployment>(deployment('show', stdout.trim())), {
    ref: 'v1',
    trigger: 'redeploy',
    redeploy_of: first.id,
    created_by: null,
    queue_position: 2,
  });
});

t.test('the list is newest first and can be filtered by project and status', async (t) => {
  const there = place(t);
  t.match(await there.refused(deployment('list')), { exitCode: 1 });
  const [website, api] = [
    await scriptProject(there, 'website', 'true'),
    await scriptProject(there, 'api', 'true'),
  ];
  t.match(await there.davit(deployment('list')), { stdout: '', stderr: /no such deployments/, exitCode: 0 });
  const ids = await inFile(there, async ({ writer }) => {
    const make = async (projectId: ProjectId, name: string) =>
      (await writer.write('deployments.create', newDeployment(projectId, { ref: ref(name) }))).id;
    const made = [
      await make(website, 'a'),
      await make(api, 'b'),
      await make(website, 'c'),
      await make(api, 'd'),
    ];
    await writer.write('deployments.claim', undefined);
    const end = endOf(made[0] as DeploymentId, { status: 'failed', reason: 'exit_code', exitCode: 3 });
    await writer.write('deployments.finish', end);
    await writer.write('deployments.cancel', { id: made[1] as DeploymentId });
    return made;
  });
  const listed = async (...words: string[]) =>
    (await there.json<Deployment[]>(deployment('list', ...words))).map((one) => one.ref).join('');
  t.equal(await listed(), 'dcba');
  t.equal(await listed('--project', 'api'), 'db');
  t.equal(await listed('--status', 'failed,canceled'), 'ba');
  t.equal(await listed('--status', 'failed', 'canceled', '--project', 'website'), 'a');
  t.equal(await listed('--status', 'queued'), 'dc');
  t.equal(await listed('--limit', '3'), 'dcb');

  const { stdout, stderr } = await there.davit(deployment('list', '--limit', '3'));
  t.equal(stderr, 'only the latest 3 are shown: --limit shows more\n');
  t.match(stdout, new RegExp(`^ID +PROJECT +REF +STATUS +CREATED\n${ids[3]} +api +d +queued, number 1 +20`));
  t.equal((await there.davit(deployment('list', '--limit', '4'))).stderr, '');
  const failed = await there.davit(deployment('list', '--status', 'failed'));
  t.match(failed.stdout, / failed: exit code 3 +20\S+Z +\d+m?s\n$/);
});

t.test('a list in JSON that was cut says so where no limit was chosen', async (t) => {
  const there = place(t);
  const website = await scriptProject(there, 'website', 'true');
  await inFile(there, async ({ writer }) => {
    for (let made = 0; made < 21; made += 1) {
      await writer.write('deployments.create', newDeployment(website, { ref: ref(`v${made}`) }));
    }
  });
  const { stdout, stderr } = await there.davit(deployment('list', '--json'));
  t.equal(JSON.parse(stdout).length, 20);
  t.equal(stderr, 'only the latest 20 are shown: --limit shows more\n');
  t.equal((await there.davit(deployment('list', '--json', '--limit', '20'))).stderr, '');
  t.equal((await there.davit(deployment('list', '--json', '--limit', '21'))).stderr, '');
});

t.test('show prints all that is known of a deployment', async (t) => {
  const there = place(t);
  const website = await scriptProject(there, 'website', 'true');
  const id = await inFile(there, async ({ writer }) => {
    const { key } = await writer.write('keys.create', KEY);
    const made = await writer.write('deployments.create', newDeployment(website, { keyId: key.id }));
    await writer.write('deployments.claim', undefined);
    await writer.write('deployments.finish', {
      id: made.id,
      status: 'failed',
      reason: 'signal',
      message: 'it fell',
      exitCode: null,
      signal: 'SIGSEGV',
      outputs: { url: 'https://x.test', note: 'a\u001b[2Jb' },
    });
    return made.id;
  });
  const { stdout } = await there.davit(deployment('show', id));
  for (const line of [
    /^project +website \(prj_\w+\)$/m,
    /^status +failed: SIGSEGV$/m,
    /^message +it fell$/m,
    /^created by +key ci \(key_\w+\)$/m,
    /^took +\d+m?s$/m,
    /^output +url=https:\/\/x\.test$/m,
    /^output +note=a\\x1b\[2Jb$/m,
    /^log +0 bytes$/m,
  ]) {
    t.match(stdout, line);
  }
});

t.test('on a terminal, a status is coloured and times are relative', needsTerminal, async (t) => {
  const there = place(t);
  await scriptProject(there, 'website', 'true');
  const { id } = await there.json<Deployment>(deployment('create', 'website', 'main'));
  await there.davit(deployment('cancel', id));
  t.match(onTerminal(there, deployment('list')).shown, /\p{Cc}\[90mcanceled\p{Cc}\[39m +(?:now|\d+s ago)$/mu);
  t.notMatch(onTerminal(there, deployment('list'), { env: { NO_COLOR: '1' } }).shown, /\[39m/);
});
