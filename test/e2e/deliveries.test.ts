import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { type Answer, type Receiver, startReceiver, status } from '../helpers/receiver.ts';
import { place, type RunningService } from '../helpers/service.ts';

/*
 * Deliveries from outside: the packaged executable, real receivers, and kill -9. More kills by hand:
 * DAVIT_TEST_KILLS=50 tap run --timeout=600 test/e2e/deliveries.test.ts
 */

const KILLS = Number(process.env['DAVIT_TEST_KILLS'] ?? 4);
const CLIENTS = 8;
const TIMEOUT_MS = 300_000 + KILLS * 5_000;
const OPTIONS = [
  '--webhook-allow-http',
  '--webhook-allow-cidr',
  '127.0.0.0/8',
  '--webhook-retry-delays',
  '1s,1s,1s,1s,1s,1s,1s,1s',
  '--rate-limit',
  'off',
  '--max-queued',
  'off',
];

t.test(
  `every event that was acknowledged arrives, over ${KILLS} kills`,
  { timeout: TIMEOUT_MS },
  async (t) => {
    const davit = place(t);
    const project = await davit.davit('admin', 'project', 'create', '--name', 'site');
    const projectId = String(project['id']);
    const created = await davit.davit(
      'admin',
      'key',
      'create',
      '--name',
      'ci',
      '--all-scopes',
      '--all-projects',
    );
    const key = String(created['secret']);
    const steady = await startReceiver(t);
    const flaky = await startReceiver(t, { answers: [failsFirst()] });

    let service = await davit.serve(...OPTIONS);
    for (const receiver of [steady, flaky]) {
      const body = { url: receiver.url, events: ['deployment.created'] };
      t.equal((await service.request('POST', '/v2/webhooks', { key, body })).status, 201);
    }

    const acknowledged: string[] = [];
    for (let kill = 0; kill < KILLS; kill++) {
      // Each time at another moment of what goes on: while requests, commits, attempts and settlements are under way.
      const target = acknowledged.length + 1 + ((kill * 37) % 97);
      await Promise.all(
        Array.from({ length: CLIENTS }, () => deployUntil(service, projectId, key, acknowledged, target)),
      );
      service = await davit.serve(...OPTIONS);
    }

    await until(steady, acknowledged, 1);
    await until(flaky, acknowledged, 2);
    t.comment(
      `${acknowledged.length} acknowledged; requests: ${steady.requests.length}, ${flaky.requests.length}`,
    );
    await drained(service, key);
    t.equal(await service.stop(), 0);
    checkFile(t, davit.databasePath);
  },
);

/** Until the event of each of these deployments came so many times. */
async function until(receiver: Receiver, deploymentIds: readonly string[], times: number): Promise<void> {
  const missing = new Map(deploymentIds.map((id) => [id, times]));
  while (missing.size > 0) {
    const { body } = await receiver.next();
    const id = String(JSON.parse(body.toString()).data.deployment_id);
    const left = (missing.get(id) ?? 0) - 1;
    if (left > 0) missing.set(id, left);
    else missing.delete(id);
  }
}

/** Until nothing is pending. */
async function drained(service: RunningService, key: string): Promise<void> {
  const webhooks = await service.request('GET', '/v2/webhooks', { key });
  const { data } = JSON.parse(webhooks.text) as { data: { id: string }[] };
  for (const { id } of data) {
    for (;;) {
      const pending = await service.request('GET', `/v2/webhooks/${id}/deliveries?status=pending&limit=1`, {
        key,
      });
      if ((JSON.parse(pending.text) as { data: unknown[] }).data.length === 0) break;
    }
  }
}

/** Deploys until `target` deployments are acknowledged; whichever client gets there first kills the service. */
async function deployUntil(
  service: RunningService,
  projectId: string,
  key: string,
  acknowledged: string[],
  target: number,
): Promise<void> {
  while (acknowledged.length < target) {
    try {
      const path = `/v2/projects/${projectId}/deployments`;
      const response = await service.request('POST', path, { key, body: { ref: 'main' } });
      if (response.status === 201) acknowledged.push(String(response.json()['id']));
    } catch {
      return; // killed
    }
  }
  await service.kill();
}

/** Answers 503 to the first request of each event. */
function failsFirst(): Answer {
  const seen = new Set<unknown>();
  return (response, received) => {
    const id = received.headers['webhook-id'];
    const isFirst = !seen.has(id);
    seen.add(id);
    status(isFirst ? 503 : 200)(response, received);
  };
}

function checkFile(t: Test, path: string): void {
  const database = new Sqlite(path, { readonly: true });
  t.teardown(() => database.close());
  t.equal(database.pragma('integrity_check', { simple: true }), 'ok');
  const count = (sql: string) => database.prepare(sql).pluck().get();
  t.equal(count("SELECT count(*) FROM deliveries WHERE status <> 'delivered'"), 0);
  t.equal(
    count(`SELECT count(*) FROM deliveries d
            WHERE attempt_count <> (SELECT count(*) FROM attempts WHERE delivery_id = d.id)`),
    0,
  );
  t.equal(
    count("SELECT count(*) FROM events WHERE type = 'deployment.created'"),
    count('SELECT count(*) FROM deployments'),
  );
}
