import { existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import type { Deployment, DeploymentEvent, Key, Page, Webhook } from '../../src/domain.ts';
import { place } from '../helpers/cli.ts';
import { until } from '../helpers/commands.ts';
import type { Served } from '../helpers/listening.ts';
import { startReceiver, status } from '../helpers/receiver.ts';
import { serve } from '../helpers/served.ts';

const RECEIVERS_ON_LOOPBACK = [
  '--webhook-allow-http',
  '--webhook-allow-cidr',
  '127.0.0.0/8',
  '--webhook-retry-delays',
  '2s,2s,2s,2s',
];

t.test(
  'a restored service goes on with its keys, cursors, idempotency keys, queue and deliveries',
  async (t) => {
    const { davit, json, directory } = place(t);
    const receiver = await startReceiver(t, { answers: [status(500)] });
    const command = ['sh', '-c', 'test "$DEPLOY_REF" != slow || { touch started; sleep 600; }'];
    const made = await davit(['admin', 'project', 'create', '--name', 'web', '--dir', '.', '--', ...command]);
    const project = made.stdout.trim();
    const { secret } = await json<Key & { secret: string }>([
      ...['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects'],
    ]);
    const service = await serve(t, directory, ...RECEIVERS_ON_LOOPBACK);
    const api = client(secret);
    await api<Webhook>(service, 'POST', '/v2/webhooks', {
      url: receiver.url,
      events: ['deployment.succeeded', 'deployment.failed'],
    });
    const deploy = (ref: string) =>
      api<Deployment>(service, 'POST', `/v2/projects/${project}/deployments`, { ref });
    const quick = await deploy('v1');
    const { id } = JSON.parse((await receiver.next()).body.toString()) as DeploymentEvent;
    const slow = await deploy('slow');
    await until(() => existsSync(join(directory, 'started')));
    const waiting = await deploy('v2');
    const page = await api<Page<Deployment>>(service, 'GET', '/v2/deployments?limit=1');
    const answer = await api(service, 'POST', `/v2/projects/${project}/deployments`, { ref: 'v3' }, 'once');

    const copied = await json<Record<string, number>>(['backup', 'copy.db']);
    t.match(copied, {
      deployments: 4,
      running_deployments: 1,
      waiting_deployments: 2,
      pending_deliveries: 1,
    });
    await deploy('after-the-copy');
    await service.kill();
    mkdirSync(join(directory, 'new'));
    const restored = await davit(['restore', 'copy.db', '--db', 'new/davit.db']);
    t.equal(
      restored.stderr,
      'davit serve now starts 2 deployments that waited, ends where it still runs, and records as interrupted, 1 deployment that was running, ' +
        'sends 1 delivery\n',
    );

    receiver.answerWith(status(200));
    const again = await serve(t, join(directory, 'new'), ...RECEIVERS_ON_LOOPBACK);
    t.match(await api(again, 'GET', `/v2/deployments/${slow.id}`), {
      status: 'failed',
      reason: 'interrupted',
    });
    t.match(await api(again, 'GET', `/v2/deployments?limit=10&cursor=${page.next_cursor}`), {
      data: [{ id: slow.id }, { id: quick.id }],
      next_cursor: null,
    });
    t.strictSame(
      await api(again, 'POST', `/v2/projects/${project}/deployments`, { ref: 'v3' }, 'once'),
      answer,
      'an idempotent request is replayed',
    );
    t.match(await api(again, 'GET', `/v2/deployments/${waiting.id}?wait=20`), { status: 'succeeded' });
    const refs = new Map<string, string>();
    while (refs.size < 4) {
      const event = JSON.parse((await receiver.next()).body.toString()) as DeploymentEvent;
      refs.set(event.id, event.data.ref);
    }
    t.ok(refs.has(id), 'the undelivered event is sent again');
    t.strictSame([...refs.values()].sort(), ['slow', 'v1', 'v2', 'v3']);
    t.equal(await again.stop(), 0);
  },
);

function client(secret: string) {
  return async <Body = unknown>(
    { url }: Served,
    method: string,
    path: string,
    body?: unknown,
    idempotencyKey?: string,
  ): Promise<Body> => {
    const response = await fetch(`${url}${path}`, {
      method,
      headers: {
        Authorization: `Bearer ${secret}`,
        ...(body === undefined ? {} : { 'Content-Type': 'application/json' }),
        ...(idempotencyKey === undefined ? {} : { 'Idempotency-Key': idempotencyKey }),
      },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    const text = await response.text();
    if (!response.ok) throw new Error(`${method} ${path} was answered with ${response.status} ${text}`);
    return JSON.parse(text) as Body;
  };
}
