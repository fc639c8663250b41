import { execFileSync } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Webhook as StandardWebhook } from 'standardwebhooks';
import Stripe from 'stripe';
import t from 'tap';
import { ifHas } from '../helpers/programs.ts';
import { type Receiver, startReceiver } from '../helpers/receiver.ts';
import { type Place, place, type RunningService } from '../helpers/service.ts';

/* What davit is for, from outside: the packaged executable, a real git repository, a real receiver. */

const RECEIVERS_ON_LOOPBACK = ['--webhook-allow-http', '--webhook-allow-cidr', '127.0.0.0/8'];
const refs = JSON.parse(readFileSync(join(import.meta.dirname, '../vectors/refs.json'), 'utf8')) as {
  valid: string[];
  invalid: { ref: string; why: string }[];
  not_strings: unknown[];
};

t.test(
  'a tag and a commit of a git repository are deployed, and a signed event reports each',
  ifHas('git'),
  async (t) => {
    const davit = place(t);
    const repository = gitRepository(davit);
    const project = await davit.davit(
      'admin',
      'project',
      'create',
      '--name',
      'site',
      '--dir',
      davit.directory,
      '--',
      repository.script,
    );
    const key = await keyOf(davit, String(project['id']));
    const service = await davit.serve(...RECEIVERS_ON_LOOPBACK);
    const receiver = await startReceiver(t);
    const webhook = await service.request('POST', '/v2/webhooks', {
      key,
      body: { url: receiver.url, events: ['deployment.succeeded', 'deployment.failed'] },
    });
    t.equal(webhook.status, 201);

    for (const [ref, expected] of [
      ['v1.0.0', 'one\n'],
      [repository.commit, 'two\n'],
    ] as const) {
      const created = await deploy(service, String(project['id']), key, ref);
      t.equal(created.status, 201);
      t.match(created.json(), { status: 'queued', ref, queue_position: 1, trigger: 'api' });
      t.equal(created.headers.get('location'), `/v2/deployments/${created.json()['id']}`);

      const { headers, body } = await receiver.next();
      const text = body.toString();
      const secret = String(webhook.json()['signing_secret']);
      t.match(JSON.parse(text), {
        type: 'deployment.succeeded',
        data: { deployment_id: created.json()['id'], project_id: project['id'], ref },
      });
      t.ok(
        new Stripe('sk_test_nothing').webhooks.constructEvent(
          text,
          String(headers['service-signature']),
          secret,
        ),
      );
      t.ok(new StandardWebhook(secret).verify(text, headers as Record<string, string>));
      t.equal(readFileSync(join(davit.directory, 'released/message'), 'utf8'), expected);
    }
    t.equal(await service.stop(), 0);
  },
);

t.test('fifty concurrent requests with one key make one deployment and fifty identical bodies', async (t) => {
  const { davit, service, projectId, key } = await running(t, '/bin/true');
  const headers = { 'Idempotency-Key': 'once' };
  const responses = await Promise.all(
    Array.from({ length: 50 }, () => deploy(service, projectId, key, 'main', headers)),
  );
  t.strictSame(new Set(responses.map(({ status }) => status)), new Set([201]));
  t.equal(new Set(responses.map(({ text }) => text)).size, 1);
  t.equal(new Set(responses.map(({ headers }) => headers.get('location'))).size, 1);
  t.equal(responses.filter(({ headers }) => headers.get('idempotent-replayed') === 'true').length, 49);

  const reused = await deploy(service, projectId, key, 'other', headers);
  t.equal(reused.status, 422);
  t.match(reused.json(), { error: { code: 'idempotency_key_reused' } });
  t.ok(davit);
});

t.test('a deployment answered with 201 survives a kill and runs to its event', async (t) => {
  const { davit, service, projectId, key } = await running(t, '/bin/true');
  const receiver = await startReceiver(t);
  await subscribe(service, key, receiver);
  const created = await deploy(service, projectId, key, 'v1');
  t.equal(created.status, 201);
  await service.kill();

  await davit.serve(...RECEIVERS_ON_LOOPBACK);
  // Killed before it began it runs now; killed while it ran it was interrupted. It is told either way.
  const event = JSON.parse((await receiver.next()).body.toString());
  t.match(event, { data: { deployment_id: created.json()['id'], ref: 'v1' } });
});

t.test('a deployment running at a kill ends as interrupted, and the next one runs', async (t) => {
  const { davit, service, projectId, key } = await running(
    t,
    '/bin/sh',
    '-c',
    'test "$DEPLOY_REF" != slow || exec sleep 600',
  );
  const receiver = await startReceiver(t);
  await subscribe(service, key, receiver, [
    'deployment.started',
    'deployment.succeeded',
    'deployment.failed',
  ]);
  const slow = await deploy(service, projectId, key, 'slow');
  t.match(JSON.parse((await receiver.next()).body.toString()), { type: 'deployment.started' });
  const quick = await deploy(service, projectId, key, 'quick');
  await service.kill();

  const again = await davit.serve(...RECEIVERS_ON_LOOPBACK);
  const ends = new Map<string, string>();
  while (ends.size < 2) {
    const { type, data } = JSON.parse((await receiver.next()).body.toString());
    if (type !== 'deployment.started') ends.set(data.deployment_id, type);
  }
  t.strictSame(
    ends,
    new Map([
      [slow.json()['id'], 'deployment.failed'],
      [quick.json()['id'], 'deployment.succeeded'],
    ]),
  );
  const interrupted = await again.request('GET', `/v2/deployments/${slow.json()['id']}`, { key });
  t.match(interrupted.json(), { status: 'failed', reason: 'interrupted' });
});

t.test('every valid ref is deployed, and any other gets 400 and changes nothing', async (t) => {
  const { service, projectId, key } = await running(
    t,
    '/bin/sh',
    '-c',
    'printf %s "$DEPLOY_REF" >"$TMPDIR/x"; echo "got=$DEPLOY_REF" >>"$DEPLOY_OUTPUT"',
  );
  const receiver = await startReceiver(t);
  await subscribe(service, key, receiver);
  for (const ref of refs.valid) {
    const created = await deploy(service, projectId, key, ref);
    t.equal(created.status, 201, ref);
    await receiver.next();
    const ended = await service.request('GET', `/v2/deployments/${created.json()['id']}`, { key });
    t.match(ended.json(), { status: 'succeeded', ref, outputs: { got: ref } });
  }
  for (const ref of [...refs.invalid.map((one) => one.ref), ...refs.not_strings, undefined]) {
    const refused = await deploy(service, projectId, key, ref);
    t.equal(refused.status, 400, JSON.stringify(ref));
    t.match(refused.json(), { error: { code: 'invalid_request', details: [{ in: 'body', field: 'ref' }] } });
  }
  t.equal(receiver.requests.length, refs.valid.length, 'nothing else was deployed');
});

t.test('each key may do only what its scopes and projects allow', async (t) => {
  const { davit, service, projectId, key } = await running(t, '/bin/true');
  const other = await davit.davit('admin', 'project', 'create', '--name', 'other', '--', '/bin/true');
  const reader = await davit.davit(
    'admin',
    'key',
    'create',
    '--name',
    'r',
    '--scope',
    'projects:read',
    '--project',
    projectId,
  );

  for (const wrong of [
    undefined,
    'davit_wrong',
    `${key.slice(0, -1)}${key.endsWith('a') ? 'b' : 'a'}`,
    'Ünïcode',
  ]) {
    const headers = wrong === undefined ? {} : { Authorization: `Bearer ${encodeURI(wrong)}` };
    const response = await service.request('GET', '/v2/projects', { headers });
    t.equal(response.status, 401, String(wrong));
    t.equal(response.headers.get('www-authenticate'), 'Bearer');
  }
  const lacking = await deploy(service, projectId, String(reader['secret']), 'main');
  t.equal(lacking.status, 403);
  t.match(lacking.json(), { error: { code: 'forbidden', message: /deployments:write/ } });

  const foreign = await deploy(service, String(other['id']), key, 'main');
  const absent = await deploy(service, 'prj_0000000000000000000000', key, 'main');
  t.equal(foreign.status, 404);
  const withoutId = (text: string) => text.replace(/req_\w+/, '');
  t.equal(withoutId(foreign.text), withoutId(absent.text));

  await davit.davit('admin', 'key', 'revoke', String(reader['id']), '--yes');
  const revoked = await service.request('GET', '/v2/projects', { key: String(reader['secret']) });
  t.equal(revoked.status, 401, 'from the very next request on');
});

async function running(t: Parameters<typeof place>[0], ...command: string[]) {
  const davit = place(t);
  const project = await davit.davit('admin', 'project', 'create', '--name', 'site', '--', ...command);
  const projectId = String(project['id']);
  const key = await keyOf(davit, projectId);
  const service = await davit.serve(...RECEIVERS_ON_LOOPBACK);
  return { davit, service, projectId, key };
}

/** The secret of a new key that may do everything with this project. */
async function keyOf(davit: Place, projectId: string): Promise<string> {
  const scopes = ['--name', 'ci', '--all-scopes', '--project', projectId];
  const key = await davit.davit('admin', 'key', 'create', ...scopes);
  return String(key['secret']);
}

function deploy(service: RunningService, projectId: string, key: string, ref: unknown, headers = {}) {
  return service.request('POST', `/v2/projects/${projectId}/deployments`, { key, body: { ref }, headers });
}

async function subscribe(
  service: RunningService,
  key: string,
  receiver: Receiver,
  events = ['deployment.succeeded', 'deployment.failed'],
): Promise<void> {
  const { status } = await service.request('POST', '/v2/webhooks', {
    key,
    body: { url: receiver.url, events },
  });
  if (status !== 201) throw new Error(`the webhook was answered with ${status}`);
}

/** Two commits, the first with a tag, and the script that releases one of them. */
function gitRepository({ directory }: Place): { script: string; commit: string } {
  const work = join(directory, 'repository');
  mkdirSync(work);
  const git = (...words: string[]) =>
    execFileSync('git', ['-c', 'user.name=t', '-c', 'user.email=t@example.com', ...words], {
      cwd: work,
      // No GIT_DIR, as a hook has it: the commits would go there. No configuration, which may ask for signatures.
      env: { PATH: process.env['PATH'] },
      encoding: 'utf8',
    });
  git('init', '--quiet');
  for (const message of ['one', 'two']) {
    writeFileSync(join(work, 'message'), `${message}\n`);
    git('add', '.');
    git('commit', '--quiet', '--message', message);
    if (message === 'one') git('tag', 'v1.0.0');
  }
  const script = join(directory, 'release');
  const lines = [
    '#!/bin/sh',
    'set -eu',
    'rm -rf released',
    'git clone --quiet --no-checkout repository released',
    'git -C released checkout --quiet --detach "$DEPLOY_REF"',
  ];
  writeFileSync(script, `${lines.join('\n')}\n`, { mode: 0o755 });
  return { script, commit: git('rev-parse', 'HEAD').trim() };
}
