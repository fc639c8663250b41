import { spawn } from 'node:child_process';
import { readdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pino } from 'pino';
import t, { type Test } from 'tap';
import { createExecutor, type Executor, type ExecutorOptions } from '../../src/deploy/executor.ts';
import { holdersOf, isAlive, type ProcessIdentity, processIdentity } from '../../src/deploy/processes.ts';
import { recover } from '../../src/deploy/recover.ts';
import { createWorkspaces } from '../../src/deploy/workspace.ts';
import type { Deployment, DeploymentId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { fixture, testSpawner, testWorkspaces, until } from '../helpers/commands.ts';
import { stayAlive } from '../helpers/effects.ts';
import { newDeployment, ref, type TestStore, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('a deployment is carried out with the ref in its environment, and its log is kept', async (t) => {
  const { store, executor } = await service(t);
  const projectId = await store.project({
    command: [
      '/bin/sh',
      '-c',
      'echo "ref=$DEPLOY_REF project=$DEPLOY_PROJECT_NAME"; echo oops >&2; echo url=https://x >>"$DEPLOY_OUTPUT"',
    ],
  });
  const { id } = await store.writer.write(
    'deployments.create',
    newDeployment(projectId, { ref: ref('v1.2.3') }),
  );
  await executor.tick();
  await executor.settled();

  t.match(store.reads.deployments.get(id), {
    status: 'succeeded',
    reason: null,
    exit_code: 0,
    outputs: { url: 'https://x' },
    log_truncated: false,
  });
  t.equal(logOf(store, id), 'ref=v1.2.3 project=website\noops\n');
  t.match(
    store.query('SELECT type FROM events ORDER BY seq').map((row) => row['type']),
    ['deployment.created', 'deployment.started', 'deployment.succeeded'],
  );
});

t.test('what is wrong with outputs is said in the log, on lines of their own', async (t) => {
  const { store, executor } = await service(t);
  const script = 'printf "no line end"; echo neither >>"$DEPLOY_OUTPUT"';
  const projectId = await store.project({ command: ['/bin/sh', '-c', script] });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  await executor.settled();
  t.equal(logOf(store, id), 'no line end\ndavit: DEPLOY_OUTPUT: line 1 is not name=value\n');
});

t.test('how a command ends is what is recorded', async (t) => {
  const { store, executor } = await service(t);
  const cases: [string, string[], Partial<Deployment>][] = [
    ['an exit code', ['/bin/sh', '-c', 'exit 3'], { status: 'failed', reason: 'exit_code', exit_code: 3 }],
    ['a signal', ['/bin/sh', '-c', 'kill -9 $$'], { status: 'failed', reason: 'signal', signal: 'SIGKILL' }],
    [
      'nothing to start',
      ['/no/such/command'],
      { status: 'failed', reason: 'spawn_failed', message: /does not exist/ as never },
    ],
    ['nothing executable', [fixture('not-executable')], { status: 'failed', reason: 'spawn_failed' }],
  ];
  for (const [name, command, expected] of cases) {
    const projectId = await store.project({ command: command as [string] });
    const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
    await executor.tick();
    await executor.settled();
    t.match(store.reads.deployments.get(id), expected, name);
  }
});

t.test('a timeout ends a command that goes on', async (t) => {
  const { store, executor } = await service(t);
  const projectId = await store.project({ command: ['/bin/sleep', '600'], timeoutMs: 50 });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  await executor.settled();
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'timeout' });
});

t.test('a canceled deployment is stopped, and canceled once it is gone', async (t) => {
  const { store, executor } = await service(t);
  const projectId = await store.project({ command: ['/bin/sleep', '600'] });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  t.match(await store.writer.write('deployments.cancel', { id }), { status: 'canceling' });
  await executor.tick();
  await executor.settled();
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user' });
  await t.rejects(store.writer.write('deployments.cancel', { id }), { code: 'conflict' });
});

t.test('no more than the limit run at a time, one of each project', async (t) => {
  const { store, executor } = await service(t, { maxConcurrent: 2 });
  const projects = [await store.project(), await store.project(), await store.project()];
  for (const id of projects) await store.writer.write('projects.set', sleeping(id));
  for (const projectId of [projects[0], projects[0], projects[1], projects[2]]) {
    if (projectId !== undefined) await store.writer.write('deployments.create', newDeployment(projectId));
  }
  await executor.tick();
  const running = store.query<{ project_id: string }>(
    "SELECT project_id FROM deployments WHERE status = 'running'",
  );
  t.strictSame(running.map((row) => row.project_id).sort(), [projects[0], projects[1]].sort());
  await executor.stop(0);
});

t.test(
  'what a full disk keeps from being recorded is told once, and recorded when there is room',
  async (t) => {
    const warnings: Record<string, unknown>[] = [];
    const logger = pino({ level: 'warn' }, { write: (line) => void warnings.push(JSON.parse(line)) });
    const { store, executor } = await service(t, { logger });
    const projectId = await store.project({ command: ['/bin/sh', '-c', 'yes | head -c 200000'] });
    const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
    store.limitPages(true);
    await executor.tick();
    await until(() => warnings.length > 0);
    store.limitPages(false);
    await executor.settled();
    t.match(warnings, [{ deployment_id: id, reason: /disk is full/ }]);
    t.equal(warnings.length, 1);
    t.match(store.reads.deployments.get(id), { status: 'succeeded', log_bytes: 200_000 });
  },
);

t.test('a stop ends what runs as interrupted, and starts nothing', async (t) => {
  const { store, executor } = await service(t);
  const projectId = await store.project({ command: ['/bin/sleep', '600'] });
  const first = await store.writer.write('deployments.create', newDeployment(projectId));
  const second = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  await executor.stop(0);
  t.match(store.reads.deployments.get(first.id), { status: 'failed', reason: 'interrupted' });
  await executor.tick();
  t.match(store.reads.deployments.get(second.id), { status: 'queued' });
});

t.test('what a crash left running is ended and recorded, and what waited goes on', async (t) => {
  stayAlive(t);
  const store = testStore(t, realEffects);
  const projectId = await store.project();
  const first = await store.writer.write('deployments.create', newDeployment(projectId));
  const second = await store.writer.write('deployments.create', newDeployment(projectId));
  // As it is after a kill: the row says running, the process lives, and nobody waits for it.
  await store.writer.write('deployments.claim', undefined);
  const identity = leftOver(first.id);
  await store.writer.write('deployments.setProcess', { id: first.id, ...identity });

  const parent = temporaryDirectory(t);
  createWorkspaces(parent, lockFile(parent)).make(null);
  await recoverIn(parent, store);
  t.strictSame(readdirSync(parent), ['lock'], 'nor are its files left');
  t.notOk(isAlive(identity));
  t.match(store.reads.deployments.get(first.id), { status: 'failed', reason: 'interrupted' });
  t.match(store.query("SELECT count(*) AS ends FROM events WHERE type = 'deployment.failed'"), [{ ends: 1 }]);
  t.match(await store.writer.write('deployments.claim', undefined), { id: second.id });
});

t.test('a deployment whose process was never recorded is found by its marker', async (t) => {
  stayAlive(t);
  const store = testStore(t, realEffects);
  const { id } = await store.writer.write('deployments.create', newDeployment(await store.project()));
  await store.writer.write('deployments.claim', undefined);
  const identity = leftOver(id);
  await recoverIn(temporaryDirectory(t), store);
  t.notOk(isAlive(identity));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('what a killed service was just starting is waited for, and then found', async (t) => {
  stayAlive(t);
  const store = testStore(t, realEffects);
  const { id } = await store.writer.write('deployments.create', newDeployment(await store.project()));
  await store.writer.write('deployments.claim', undefined);
  const directory = temporaryDirectory(t);
  const lock = join(directory, 'lock');
  writeFileSync(lock, '');
  // As before execve(2): the service's files, and not yet the command's environment.
  const script = 'exec 3<"$1"; read go; DEPLOY_ID="$2" exec sleep 600 3<&-';
  const starting = spawn('/bin/sh', ['-c', script, 'sh', lock, id], { stdio: ['pipe', 'ignore', 'ignore'] });
  const identity = processIdentity(starting.pid ?? 0);
  await until(() => holdersOf(lock).length > 0);

  const recovered = recoverIn(directory, store);
  starting.stdin.write('go\n');
  await recovered;
  t.ok(identity !== undefined && !isAlive(identity));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

function lockFile(directory: string): string {
  const path = join(directory, 'lock');
  writeFileSync(path, '', { flag: 'a' });
  return path;
}

function recoverIn(temporaryDirectory: string, store: TestStore): Promise<void> {
  const logger = pino({ level: 'silent' });
  return recover(store, {
    killGraceMs: 5_000,
    workspaces: createWorkspaces(temporaryDirectory, lockFile(temporaryDirectory)),
    lockPath: lockFile(temporaryDirectory),
    effects: realEffects,
    logger,
  });
}

/** A command that outlived its service. */
function leftOver(id: DeploymentId): ProcessIdentity {
  const left = spawn('/bin/sleep', ['600'], { detached: true, stdio: 'ignore', env: { DEPLOY_ID: id } });
  const identity = processIdentity(left.pid ?? 0);
  if (identity === undefined) throw new Error('the process is not there');
  return identity;
}

async function service(
  t: Test,
  changes: Partial<ExecutorOptions> = {},
): Promise<{ store: TestStore; executor: Executor }> {
  const store = testStore(t, realEffects);
  return { store, executor: await executorOn(t, store, changes) };
}

async function executorOn(
  t: Test,
  store: TestStore,
  changes: Partial<ExecutorOptions> = {},
): Promise<Executor> {
  return createExecutor({
    store,
    spawner: await testSpawner(t),
    effects: realEffects,
    logger: pino({ level: 'silent' }),
    maxConcurrent: 2,
    killGraceMs: 5_000,
    workspaces: testWorkspaces(t),
    ...changes,
  });
}

function sleeping(id: Parameters<typeof newDeployment>[0]) {
  return {
    id,
    changes: { command: ['/bin/sleep', '600'] as [string, string] },
    variables: {},
    unsetVariables: [],
  };
}

function logOf(store: TestStore, id: DeploymentId): string {
  const { log_bytes = 0 } = store.reads.deployments.get(id) ?? {};
  return Buffer.concat([...store.reads.logs.text(id, 0, log_bytes)]).toString();
}
