import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readdirSync, renameSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { RECOVERY_WAIT_MS, REQUESTS_IN_FLIGHT_MS, startService } from '../src/app.ts';
import type { DeploymentId } from '../src/domain.ts';
import { realEffects } from '../src/effects.ts';
import { POLL_OTHER_PROCESSES_EVERY_MS } from '../src/loop.ts';
import { LAST_RECOVERY_MS } from '../src/stop-time.ts';
import { openForWriting } from '../src/store/database.ts';
import { storeOn } from '../src/store/store.ts';
import { RETRY_AFTER_MS } from '../src/store/writer.ts';
import { PATH, until } from './helpers/commands.ts';
import { connectRaw, parseResponses } from './helpers/http.ts';
import { limitOpenFiles } from './helpers/limits.ts';
import { ifMayServeDns, runWithAddress } from './helpers/namespaces.ts';
import { ifHas } from './helpers/programs.ts';
import { startReceiver } from './helpers/receiver.ts';
import { makers, newDeployment, PROJECT, temporaryDirectory } from './helpers/store.ts';
import { CONFIG, startWholeService } from './helpers/whole-service.ts';

t.test(
  'while the end of an interrupted deployment cannot be recorded, others wait, but the API is served',
  async (t) => {
    const dbPath = join(temporaryDirectory(t), 'davit.db');
    const store = storeOn(openForWriting(dbPath, realEffects), realEffects);
    const project = await store.writer.write('projects.create', { ...PROJECT, command: ['/bin/true'] });
    const left = await store.writer.write('deployments.create', newDeployment(project.id));
    await store.writer.write('deployments.claim', undefined);
    const next = await store.writer.write('deployments.create', newDeployment(project.id));
    const statusOf = (id: typeof left.id) => store.reads.deployments.get(id)?.status;
    const busy = openForWriting(dbPath, realEffects);
    t.teardown(async () => {
      busy.close();
      await store.close();
    });

    busy.exec('BEGIN IMMEDIATE');
    const service = await startService({ ...CONFIG, dbPath }, impatientEffects(), (error) =>
      t.fail('the service died', { error }),
    );
    t.teardown(service.stop);
    t.equal((await fetch(`${service.url}/healthz`)).status, 200);
    t.strictSame(
      [left, next].map(({ id }) => statusOf(id)),
      ['running', 'queued'],
    );

    busy.exec('ROLLBACK');
    await until(() => statusOf(next.id) === 'succeeded');
    t.match(store.reads.deployments.get(left.id), { status: 'failed', reason: 'interrupted' });
  },
);

t.test('while a command of an earlier run lives, no deployment starts, of whatever project', async (t) => {
  const { dbPath, store } = await fileWith(t, ['/bin/true']);
  const interrupted = await store.writer.write('deployments.create', newDeployment(store.projectId));
  await store.writer.write('deployments.claim', undefined);
  const other = await store.writer.write('projects.create', { ...PROJECT, name: 'other', command: ['true'] });
  const next = await store.writer.write('deployments.create', newDeployment(other.id));
  const left = await startStubborn(t, interrupted.id);
  const service = await startService({ ...CONFIG, dbPath }, impatientEffects(), (error) =>
    t.fail('the service died', { error }),
  );
  t.teardown(service.stop);

  // It tries a write, which comes behind any that starts a deployment.
  const { status } = await fetch(`${service.url}/readyz`);
  t.equal(status, 503);
  t.match(store.reads.deployments.get(next.id), { status: 'queued' });
  left.kill('SIGKILL');
  await until(() => store.reads.deployments.get(next.id)?.status === 'succeeded');
});

t.test('a deployment starts at once, not only when davit looks for writes of other processes', async (t) => {
  const { dbPath, store } = await fileWith(t, ['/bin/true']);
  const { secret } = await makers(store).key();
  const temporary = temporaryDirectory(t);
  useTemporaryDirectory(t, temporary);
  const neverLooks: typeof realEffects = {
    ...realEffects,
    after: (delayMs, action) =>
      delayMs === POLL_OTHER_PROCESSES_EVERY_MS ? () => undefined : realEffects.after(delayMs, action),
  };
  const service = await startService({ ...CONFIG, dbPath }, neverLooks, (error) =>
    t.fail('the service died', { error }),
  );
  t.teardown(service.stop);
  const answer = await fetch(`${service.url}/v2/projects/${store.projectId}/deployments`, {
    method: 'POST',
    headers: { Authorization: `Bearer ${secret}`, 'Content-Type': 'application/json' },
    body: '{"ref":"v1"}',
  });
  t.equal(answer.status, 201);
  const { id } = (await answer.json()) as { id: DeploymentId };
  await until(() => store.reads.deployments.get(id)?.status === 'succeeded');
  await service.stop();
  t.strictSame(readdirSync(temporary), [], 'and a stop leaves no files of it');
});

t.test('davit that is refused its place has ended no deployment of an earlier run', async (t) => {
  const dbPath = join(temporaryDirectory(t), 'davit.db');
  const store = storeOn(openForWriting(dbPath, realEffects), realEffects);
  t.teardown(store.close);
  const project = await store.writer.write('projects.create', { ...PROJECT, command: ['/bin/true'] });
  const { id } = await store.writer.write('deployments.create', newDeployment(project.id));
  await store.writer.write('deployments.claim', undefined);
  const { port } = new URL((await startReceiver(t)).url);

  const listen = { host: '127.0.0.1', port: Number(port) };
  const start = startService({ ...CONFIG, dbPath, listen }, realEffects, () => undefined);
  await t.rejects(start, { code: 'EADDRINUSE', syscall: 'listen' });
  t.match(store.reads.deployments.get(id), { status: 'running' });
});

t.test('without a usable TMPDIR davit does not start if a project has a command', async (t) => {
  const dbPath = join(temporaryDirectory(t), 'davit.db');
  useTemporaryDirectory(t, join(temporaryDirectory(t), 'missing'));
  const store = storeOn(openForWriting(dbPath, realEffects), realEffects);
  await store.writer.write('projects.create', { ...PROJECT, command: null });
  const start = () => startService({ ...CONFIG, dbPath }, realEffects, () => undefined);
  await (await start()).stop();

  await store.writer.write('projects.create', { ...PROJECT, name: 'site', command: ['/bin/true'] });
  await store.close();
  await t.rejects(start(), {
    code: 'conflict',
    message:
      /^no files for commands can be made in \/.*\/missing \(ENOENT\): set TMPDIR to a directory where this user can write$/,
  });
});

function useTemporaryDirectory(t: Test, path: string): void {
  const { TMPDIR } = process.env;
  t.teardown(() => {
    if (TMPDIR === undefined) delete process.env['TMPDIR'];
    else process.env['TMPDIR'] = TMPDIR;
  });
  process.env['TMPDIR'] = path;
}

t.test('a deployment that is canceled while davit stops ends as canceled, not interrupted', async (t) => {
  const { dbPath, store } = await fileWith(t, ['/bin/sleep', '600']);
  const { id } = await store.writer.write('deployments.create', newDeployment(store.projectId));
  const service = await startService({ ...CONFIG, dbPath, shutdownGraceMs: 60_000 }, realEffects, (error) =>
    t.fail('the service died', { error }),
  );
  await until(() => store.reads.deployments.get(id)?.status === 'running');
  const stopped = service.stop();
  await store.writer.write('deployments.cancel', { id });
  await stopped;
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user' });
});

t.test('a request that arrives while davit stops is answered, or not carried out', async (t) => {
  const { url, stop, key, project, query } = await startWholeService(t);
  const [projectId, { secret }] = [await project({ command: null }), await key()];
  const body = '{"ref":"v1"}';
  const request = [
    `POST /v2/projects/${projectId}/deployments HTTP/1.1`,
    'Host: d',
    `Authorization: Bearer ${secret}`,
    'Content-Type: application/json',
    `Content-Length: ${body.length}`,
    '',
    body,
  ].join('\r\n');
  const connections = await Promise.all(
    Array.from({ length: 20 }, () => connectRaw(Number(new URL(url).port))),
  );
  const stopped = stop();
  for (const connection of connections) connection.send(request);
  const received = await Promise.all(connections.map(({ closed }) => closed.catch(() => '')));
  await stopped;
  const answers = received.flatMap(parseResponses);
  const created = query('SELECT 1 FROM deployments').length;
  t.equal(answers.filter(({ status }) => status === 201).length, created);
  t.ok(created > 0, 'those under way are answered');
  for (const { headers } of answers) t.match(headers, { connection: /^close$/ });
});

t.test(
  'a stop answers a request that was just sent, and waits for little else once commands had all of their time',
  async (t) => {
    const { dbPath } = await fileWith(t, ['/bin/true']);
    const request = 'GET /healthz HTTP/1.1\r\nHost: d\r\n\r\n';
    let isStopping = false;
    const waits: number[] = [];
    const effects: typeof realEffects = {
      ...realEffects,
      monotonicMs: () => realEffects.monotonicMs() + (isStopping ? 27_000 : 0),
      after(delayMs, action) {
        if (isStopping) waits.push(delayMs);
        if (delayMs !== REQUESTS_IN_FLIGHT_MS) return realEffects.after(delayMs, action);
        connection.send(request);
        void connection.closed.finally(action);
        return () => undefined;
      },
    };
    const service = await startService({ ...CONFIG, dbPath }, effects, () => t.fail('died'));
    const connection = await connectRaw(Number(new URL(service.url).port));
    connection.send(request);
    await connection.received('\r\n\r\n{');
    const stopped = service.stop();
    isStopping = true;
    await stopped;
    const answers = parseResponses(await connection.closed);
    t.strictSame(
      answers.map(({ status }) => status),
      [200, 200],
    );
    t.ok(waits.length > 2);
    t.strictSame(
      waits.filter((delayMs) => delayMs > 500),
      [],
    );
  },
);

/** A file with a project of this command, on a connection as `davit admin` has. */
async function fileWith(t: Test, command: [string, ...string[]]) {
  const dbPath = join(temporaryDirectory(t), 'davit.db');
  const store = storeOn(openForWriting(dbPath, realEffects), realEffects);
  t.teardown(store.close);
  const { id } = await store.writer.write('projects.create', { ...PROJECT, command });
  return { dbPath, store: { ...store, projectId: id } };
}

t.test(
  'davit that is told to stop while it cleans up after a crash does that, and does not begin to serve',
  async (t) => {
    const { dbPath, store } = await fileWith(t, ['/bin/true']);
    const { id } = await store.writer.write('deployments.create', newDeployment(store.projectId));
    await store.writer.write('deployments.claim', undefined);
    const left = spawn('sleep', ['600'], { env: { PATH, DEPLOY_ID: id }, stdio: 'ignore' });
    t.teardown(() => left.kill('SIGKILL'));
    await once(left, 'spawn');

    const start = new AbortController();
    const config = {
      ...CONFIG,
      dbPath,
      // Read when the dispatcher begins.
      get webhookTimeoutMs() {
        t.fail('it began to serve');
        return CONFIG.webhookTimeoutMs;
      },
    };
    const serving = startService(config, realEffects, () => undefined, start.signal);
    setImmediate(() => start.abort(new Error('told to stop')));
    await t.rejects(serving, { message: 'told to stop' });
    t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
    t.throws(() => process.kill(left.pid ?? 0, 0), { code: 'ESRCH' }, 'and nothing of it is alive');
  },
);

t.test(
  'davit that is told to stop waits a moment for a recovery, and leaves the rest to the next start',
  async (t) => {
    const check = async (isStarting: boolean, endsInTime: boolean) => {
      const { dbPath, store } = await fileWith(t, ['/bin/true']);
      const { id } = await store.writer.write('deployments.create', newDeployment(store.projectId));
      await store.writer.write('deployments.claim', undefined);
      const left = await startStubborn(t, id);

      const effects: typeof realEffects = {
        ...realEffects,
        after(delayMs, action) {
          const isLast = delayMs === LAST_RECOVERY_MS;
          if (isLast && endsInTime) left.kill('SIGKILL');
          const isAtOnce = delayMs === RECOVERY_WAIT_MS || (isLast && !endsInTime);
          return realEffects.after(isAtOnce ? 0 : isLast ? 60_000 : delayMs, action);
        },
      };
      const start = new AbortController();
      const serving = startService({ ...CONFIG, dbPath }, effects, () => t.fail('died'), start.signal);
      if (isStarting) start.abort(new Error('told to stop'));
      await (isStarting
        ? t.rejects(serving, { message: 'told to stop' })
        : serving.then(({ stop }) => stop()));
      t.match(
        store.reads.deployments.get(id),
        endsInTime ? { status: 'failed', reason: 'interrupted' } : { status: 'running' },
      );
      await store.close();
      t.notOk(existsSync(`${dbPath}-wal`));
    };
    await Promise.all([check(true, false), check(false, false)]);
    await check(false, true);
  },
);

t.test('davit that is told to stop late in its start begins no deployment', async (t) => {
  const { dbPath, store } = await fileWith(t, ['/bin/true']);
  const { id } = await store.writer.write('deployments.create', newDeployment(store.projectId));
  const start = new AbortController();
  const config = {
    ...CONFIG,
    dbPath,
    // Read when the recovery is over, and the dispatcher begins.
    get webhookTimeoutMs() {
      start.abort(new Error('told to stop'));
      return CONFIG.webhookTimeoutMs;
    },
  };
  const serving = startService(config, realEffects, () => undefined, start.signal);
  await t.rejects(serving, { message: 'told to stop' });
  t.match(store.reads.deployments.get(id), { status: 'queued' });
});

t.test(
  'with few open files allowed, connections to receivers are not kept open',
  ifHas('prlimit'),
  async (t) => {
    t.teardown(limitOpenFiles(950));
    const receiver = await startReceiver(t);
    const { admin, key, project, query } = await startWholeService(t, { maxConcurrent: 2 });
    const { keyId } = await key();
    const webhook = { keyId, url: receiver.url, events: ['deployment.created' as const], description: null };
    await admin.writer.write('webhooks.create', webhook);
    const projectId = await project({ command: null });
    for (const count of [1, 2]) {
      await admin.writer.write('deployments.create', newDeployment(projectId));
      await until(() => query(`SELECT 1 FROM deliveries WHERE status = 'delivered'`).length === count);
    }
    t.equal(receiver.connections(), 2);
  },
);

t.test('a service whose database file was moved away is not ready', async (t) => {
  const { dbPath } = await fileWith(t, ['/bin/true']);
  const service = await startService({ ...CONFIG, dbPath }, realEffects, () => undefined);
  t.teardown(service.stop);
  const readyz = () => fetch(`${service.url}/readyz`);
  t.equal((await readyz()).status, 200);
  renameSync(dbPath, `${dbPath}.elsewhere`);
  let answer = await readyz();
  while (answer.status === 200) answer = await readyz();
  t.match(await answer.json(), { error: { message: /was moved, removed or replaced/ } });
  renameSync(`${dbPath}.elsewhere`, dbPath);
});

t.test('webhooks reach neither the service at a public address nor its metrics', ifMayServeDns, (t) => {
  const address = '93.184.216.34'; // on a network of its own, so that nothing is sent to it
  const fixture = join(import.meta.dirname, 'fixtures/own-addresses.ts');
  const { stdout } = runWithAddress(address, process.execPath, fixture, temporaryDirectory(t), address);
  t.strictSame(JSON.parse(stdout), ['address_refused', 'address_refused', null]);
  t.end();
});

/** A process of this deployment that SIGTERM does not end. */
async function startStubborn(t: Test, deploymentId: string): Promise<ChildProcess> {
  const started = spawn('sh', ['-c', "trap '' TERM; echo ready; exec sleep 600"], {
    env: { PATH, DEPLOY_ID: deploymentId },
    stdio: ['ignore', 'pipe', 'ignore'],
  });
  t.teardown(() => started.kill('SIGKILL'));
  await once(started.stdout, 'data');
  return started;
}

/** As if the recovery had been waited for long enough at once; its writes are tried again at once. */
function impatientEffects(): typeof realEffects {
  return {
    ...realEffects,
    after: (delayMs, action) =>
      realEffects.after([RECOVERY_WAIT_MS, RETRY_AFTER_MS].includes(delayMs) ? 0 : delayMs, action),
  };
}
