import { existsSync, readdirSync, writeFileSync } from 'node:fs';
import { writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import type { Executor, ExecutorOptions } from '../../src/deploy/executor.ts';
import type { Spawner } from '../../src/deploy/spawner.ts';
import type { Workspaces } from '../../src/deploy/workspace.ts';
import type { Deployment, DeploymentId, ProjectStatus } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { isAlive } from '../../src/process-identity.ts';
import type { OperationName } from '../../src/store/operations.ts';
import type { Writer } from '../../src/store/writer.ts';
import { fixture, namedPipe, testSpawner, testWorkspaces, until } from '../helpers/commands.ts';
import { testExecutor } from '../helpers/deploying.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { newDeployment, ref, type TestStore, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('a deployment runs with its ref in the environment, and its log is kept', async (t) => {
  const { store, executor } = service(t);
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
  t.strictSame(
    store.query('SELECT type FROM events ORDER BY seq').map((row) => row['type']),
    ['deployment.created', 'deployment.started', 'deployment.succeeded'],
  );
});

t.test('values of project variables are masked in the log and the outputs', async (t) => {
  const { store, executor } = service(t);
  const script = 'echo "the token is $TOKEN"; echo "token=$TOKEN" >>"$DEPLOY_OUTPUT"';
  const id = await carriedOut(store, executor, {
    command: ['/bin/sh', '-c', script],
    variables: { TOKEN: 'top-secret-token' },
  });
  t.equal(logOf(store, id).split('\n')[0], 'the token is ***');
  t.notMatch(JSON.stringify(store.reads.deployments.get(id)), /top-secret-token/);
  t.equal(store.reads.deployments.get(id)?.status, 'succeeded');
});

t.test('the next deployment of a project starts after the one before and knows its ref', async (t) => {
  const { store, executor } = service(t, { maxConcurrent: 1 });
  const projectId = await store.project({ command: ['/bin/sh', '-c', 'echo "after $DEPLOY_PREVIOUS_REF"'] });
  const ids = [];
  for (const name of ['v1', 'v2', 'v3']) {
    const { id } = await store.writer.write(
      'deployments.create',
      newDeployment(projectId, { ref: ref(name) }),
    );
    ids.push(id);
  }
  await executor.tick();
  await executor.settled();
  t.strictSame(
    ids.map((id) => logOf(store, id)),
    ['after \n', 'after v1\n', 'after v2\n'],
  );
});

t.test('a failed claim is logged, and what already ran is recorded', async (t) => {
  const { lines, logger } = keptLog<{ level: number; msg: string }>();
  const store = testStore(t, realEffects);
  const executor = testExecutor(t, refusing(store, 'deployments.claim', 1), { logger, maxConcurrent: 1 });
  const id = await carriedOut(store, executor);
  t.match(store.reads.deployments.get(id), { status: 'succeeded' });
  t.strictSame(
    lines.filter(({ level }) => level >= 40).map(({ msg }) => msg),
    ['the next deployment could not be claimed'],
  );
});

t.test('an end that cannot be recorded is logged as such, and not as an end', async (t) => {
  const { lines, logger } = keptLog<{ level: number; msg: string }>();
  const store = testStore(t, realEffects);
  const executor = testExecutor(t, refusing(store, 'deployments.finish', 0), { logger });
  await carriedOut(store, executor);
  t.strictSame(
    lines.filter(({ level }) => level >= 40).map(({ msg }) => msg),
    ['the end of a deployment could not be recorded'],
  );
  t.notOk(lines.some(({ msg }) => msg === 'deployment ended'));
});

t.test('a failed log write does not keep a slot from other deployments', async (t) => {
  const store = testStore(t, realEffects);
  const executor = testExecutor(t, refusing(store, 'logs.append', 0), { maxConcurrent: 1 });
  const talking = await store.project({ command: ['/bin/echo', 'x'] });
  await store.writer.write('deployments.create', newDeployment(talking));
  const silent = await store.project({ name: 'silent' });
  const { id } = await store.writer.write('deployments.create', newDeployment(silent));
  for (let look = 0; look < 2; look++) {
    await executor.tick();
    await executor.settled();
  }
  t.equal(store.reads.deployments.get(id)?.status, 'succeeded');
});

t.test('the end time of a deployment is that of its process, not of a late record', async (t) => {
  const store = testStore(t, realEffects);
  const waited = Promise.withResolvers<number>();
  const write: Writer['write'] = async (name, input) => {
    if (name === 'deployments.finish') {
      const untilMs = Date.now() + 50;
      await until(() => Date.now() > untilMs);
      waited.resolve(untilMs);
    }
    return await store.writer.write(name, input);
  };
  const executor = testExecutor(t, { ...store, writer: { ...store.writer, write } });
  const id = await carriedOut(store, executor);
  const finishedAt = store.reads.deployments.get(id)?.finished_at ?? '';
  t.ok(Date.parse(finishedAt) <= (await waited.promise) - 50, finishedAt);
});

t.test('a deployment whose directory cannot be created fails with that message', async (t) => {
  const file = join(temporaryDirectory(t), 'file');
  writeFileSync(file, '');
  const { store, executor } = service(t, { workspaces: testWorkspaces(t, { parent: file }) });
  const id = await carriedOut(store, executor);
  t.match(store.reads.deployments.get(id), {
    status: 'failed',
    reason: 'spawn_failed',
    message: /^no directory for this run: /,
  });
});

t.test('while a full disk has no room for its files, a deployment waits, and no other starts', async (t) => {
  const { lines, logger } = keptLog<{ level: number; msg: string }>();
  const { store, executor, create, statuses, disk, pass } = serviceOnFullDisk(t, { logger });
  const gate = namedPipe(t);
  const first = await create('one', { command: ['/bin/cat', gate] });
  await create('two');
  await executor.tick();
  await create('other');
  for (let look = 0; look < 3; look++) {
    await executor.tick();
    await pass(1_000);
    t.strictSame(statuses(), ['running', 'running', 'queued']);
  }
  t.strictSame(
    lines.filter(({ level }) => level >= 40).map(({ msg }) => msg),
    ['no command starts until a shortage is over'],
    'said once',
  );
  disk.isFull = false;
  await pass(1_000);
  while (statuses()[2] !== 'succeeded') {
    await executor.tick();
    await nextTurn();
  }
  t.equal(statuses()[0], 'running', 'once it runs, others start');
  await writeFile(gate, '');
  await executor.settled();
  t.strictSame(statuses(), ['succeeded', 'succeeded', 'succeeded']);
  t.equal(logOf(store, first), 'davit: waiting to start: no directory for this run: ENOSPC\n');
});

t.test('only what is known to pass is waited for, and no failing disk or bug', async (t) => {
  const { store, executor, create, disk, pass } = serviceOnFullDisk(t);
  for (const error of [systemError('EIO'), systemError('ESTALE'), new TypeError('a bug')]) {
    disk.error = error;
    const id = await create(error.message);
    await executor.tick();
    await executor.settled();
    const message = `no directory for this run: ${error.message}`;
    t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'spawn_failed', message });
  }
  disk.error = systemError('EDQUOT');
  const id = await create('waiting');
  await executor.tick();
  t.match(store.reads.deployments.get(id), { status: 'running' });
  disk.isFull = false;
  await pass(1_000);
  await executor.settled();
  t.match(store.reads.deployments.get(id), { status: 'succeeded' });
});

t.test('a deployment waits for room longer than its command may take, in the only slot', async (t) => {
  const { executor, create, statuses, disk, pass } = serviceOnFullDisk(t, { maxConcurrent: 1 });
  await create('one', { timeoutMs: 5_000 });
  await executor.tick();
  for (let waited = 0; waited < 10; waited++) await pass(1_000);
  t.strictSame(statuses(), ['running']);
  disk.isFull = false;
  await pass(1_000);
  await executor.settled();
  t.strictSame(statuses(), ['succeeded']);
});

t.test('a try that hangs after a wait keeps no other deployment from starting', async (t) => {
  const spawner = testSpawner(t);
  const answer = Promise.withResolvers<void>();
  const hanging: Spawner = {
    ...spawner,
    async spawn(request, isWanted) {
      if (request.directory === '/tmp') await answer.promise;
      return await spawner.spawn(request, isWanted);
    },
  };
  const { executor, create, statuses, disk, pass } = serviceOnFullDisk(t, { spawner: hanging });
  await create('hanging', { directory: '/tmp' });
  await executor.tick();
  await create('other');
  disk.isFull = false;
  await pass(1_000);
  await executor.tick();
  t.strictSame(statuses(), ['running', 'queued'], 'not at once: as a rule a try takes a moment');
  await pass(1_000);
  await executor.tick();
  await until(() => statuses()[1] === 'succeeded');
  t.strictSame(statuses(), ['running', 'succeeded']);
  answer.resolve();
  await executor.settled();
  t.strictSame(statuses(), ['succeeded', 'succeeded']);
});

for (const takesMs of [900, 1_100]) {
  t.test(`a try that meets a shortage again after ${takesMs} ms keeps others from starting`, async (t) => {
    const spawner = testSpawner(t);
    const answer = Promise.withResolvers<void>();
    let tries = 0;
    const slow: Spawner = {
      ...spawner,
      async spawn(request, isWanted) {
        tries += 1;
        if (tries > 1) return await spawner.spawn(request, isWanted);
        await answer.promise;
        return { kind: 'shortage', cause: 'EAGAIN' };
      },
    };
    const { executor, create, statuses, disk, pass } = serviceOnFullDisk(t, { spawner: slow });
    await create('slow');
    await executor.tick();
    await create('other');
    disk.isFull = false;
    await pass(1_000);
    await pass(takesMs);
    answer.resolve();
    await pass(0);
    await pass(200);
    await executor.tick();
    t.strictSame(statuses(), ['running', 'queued']);
    await pass(1_000);
    while (statuses()[1] !== 'succeeded') {
      await executor.tick();
      await nextTurn();
    }
  });
}

t.test('a deployment that waits is not started while its project is paused, but others are', async (t) => {
  const { store, executor, create, statuses, disk, pass, setStatus } = serviceOnFullDisk(t, {
    maxConcurrent: 1,
  });
  const [own, gate] = [namedPipe(t), namedPipe(t)];
  const id = await create('one', { command: ['/bin/cat', own] });
  await executor.tick();
  await create('other', { command: ['/bin/cat', gate] });
  await setStatus(id, 'paused');
  disk.isFull = false;
  for (let look = 0; look < 2; look++) {
    await pass(1_000);
    await executor.tick();
    t.strictSame(statuses(), ['running', 'running']);
  }

  await create('third');
  await setStatus(id, 'active');
  const { tries } = disk;
  await pass(1_000);
  t.equal(disk.tries, tries, 'there is no free slot');
  await writeFile(gate, '');
  await until(() => statuses()[1] === 'succeeded');
  for (let look = 0; look < 3; look++) {
    await executor.tick();
    t.strictSame(statuses(), ['running', 'succeeded', 'queued'], 'it has the next free slot');
    await pass(1_000);
  }
  await writeFile(own, '');
  await executor.settled();
  t.strictSame(statuses(), ['succeeded', 'succeeded', 'succeeded']);
  t.match(logOf(store, id), /ENOSPC\ndavit: waiting to start: its project is paused\n$/, 'said once');
});

t.test('a deployment that ends while its project is paused leaves no slot too many', async (t) => {
  const { store, executor, create, statuses, disk, pass, setStatus } = serviceOnFullDisk(t, {
    maxConcurrent: 1,
  });
  const id = await create('one');
  await executor.tick();
  await setStatus(id, 'paused');
  await pass(1_000);
  await store.writer.write('deployments.cancel', { id });
  await executor.tick();
  await executor.settled();
  disk.isFull = false;
  const gates = [namedPipe(t), namedPipe(t)] as const;
  for (const [index, gate] of gates.entries())
    await create(`other ${index}`, { command: ['/bin/cat', gate] });
  await executor.tick();
  t.strictSame(statuses(), ['canceled', 'running', 'queued']);
  for (const gate of gates) await writeFile(gate, '');
  await executor.settled();
});

t.test('a deployment waits on while its project cannot be read', async (t) => {
  const { store, executor, create, statuses, disk, pass } = serviceOnFullDisk(t);
  await create('one');
  await executor.tick();
  disk.isFull = false;
  const restore = t.intercept(store.reads.projects, 'resolve', {
    value: () => {
      throw systemError('SQLITE_IOERR');
    },
  }).restore;
  await pass(1_000);
  t.strictSame(statuses(), ['running']);
  restore();
  await pass(1_000);
  await executor.settled();
  t.strictSame(statuses(), ['succeeded']);
});

t.test('a deployment that waits is canceled when its project is archived', async (t) => {
  const { store, executor, create, pass, setStatus } = serviceOnFullDisk(t);
  const id = await create('one');
  await executor.tick();
  await setStatus(id, 'archived');
  await pass(1_000);
  await executor.settled();
  const message = 'its project was archived';
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user', message });
});

t.test('a deployment that waits for room is canceled at once', async (t) => {
  const { store, executor, create, statuses, disk, pass } = serviceOnFullDisk(t);
  const id = await create('one');
  await executor.tick();
  await pass(0);
  t.match(await store.writer.write('deployments.cancel', { id }), { status: 'canceling' });
  await executor.tick();
  await executor.settled();
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user', message: null });
  disk.isFull = false;
  await create('other');
  await executor.tick();
  await executor.settled();
  t.strictSame(statuses(), ['canceled', 'succeeded'], 'and holds up no other any more');
});

t.test('a deployment that waits for room is not started once davit stops', async (t) => {
  const { store, executor, create, disk, pass } = serviceOnFullDisk(t);
  const id = await create('one');
  await executor.tick();
  await pass(0);
  const stopped = executor.stop(60_000);
  disk.isFull = false;
  await pass(1_000);
  await stopped;
  t.match(store.reads.deployments.get(id), {
    status: 'failed',
    reason: 'interrupted',
    message: 'davit stopped before this could start: nothing was run',
  });
});

t.test('the files of a run are removed when it is over', async (t) => {
  const parent = temporaryDirectory(t);
  const { store, executor } = service(t, { workspaces: testWorkspaces(t, { parent }) });
  const script = 'echo text >"$PWD/file"; echo name=value >>"$DEPLOY_OUTPUT"';
  const id = await carriedOut(store, executor, { command: ['/bin/sh', '-c', script] });
  t.match(store.reads.deployments.get(id), { status: 'succeeded', outputs: { name: 'value' } });
  const roots = readdirSync(parent);
  t.equal(roots.length, 1);
  await until(() => readdirSync(join(parent, roots[0] ?? '')).length === 0);
});

t.test('files are removed before the log and the end are recorded, which may need their space', async (t) => {
  const parent = temporaryDirectory(t);
  const store = testStore(t, realEffects);
  const files = () => readdirSync(parent).flatMap((root) => readdirSync(join(parent, root)));
  const write: Writer['write'] = async (name, input) => {
    if (name === 'deployments.finish' || name === 'logs.append') await until(() => files().length === 0);
    return await store.writer.write(name, input);
  };
  const timeoutMs = 1;
  const printed = join(temporaryDirectory(t), 'printed');
  const executor = testExecutor(
    t,
    { ...store, writer: { ...store.writer, write } },
    { workspaces: testWorkspaces(t, { parent }), effects: noticing(timeoutMs, () => existsSync(printed)) },
  );
  const id = await carriedOut(store, executor, { command: ['/bin/sh', '-c', 'echo text >file'] });
  t.match(store.reads.deployments.get(id), { status: 'succeeded' });

  // More than is gathered of a log that cannot be written: it blocks until its time is over.
  const script = 'echo text >file; head -c 1150000 /dev/zero; touch "$0"; exec head -c 3000000 /dev/zero';
  const command = ['/bin/sh', '-c', script, printed] as [string, ...string[]];
  const blocked = await carriedOut(store, executor, { command, timeoutMs });
  t.match(store.reads.deployments.get(blocked), { status: 'failed', reason: 'timeout' });
  t.ok((store.reads.deployments.get(blocked)?.log_bytes ?? 0) > 1024 * 1024);
});

t.test('the process of a running command is recorded, which the end of davit waits for', async (t) => {
  const store = testStore(t, realEffects);
  const room = Promise.withResolvers<void>();
  let isAsked = false;
  const write: Writer['write'] = async (name, input) => {
    const written = store.writer.write(name, input);
    if (name !== 'deployments.setProcess') return await written;
    isAsked = true;
    await room.promise;
    return await written;
  };
  const executor = testExecutor(t, { ...store, writer: { ...store.writer, write } });
  const projectId = await store.project({ command: ['/bin/sleep', '600'] });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  const recorded = () => store.reads.deployments.running()[0]?.process ?? undefined;
  await until(() => isAsked && recorded() !== undefined);
  const identity = recorded();
  t.ok(identity !== undefined && isAlive(identity));
  let isStopped = false;
  const stopped = executor.stop(0).then(() => {
    isStopped = true;
  });
  await until(() => store.reads.deployments.get(id)?.status === 'failed');
  await nextTurn();
  t.notOk(identity !== undefined && isAlive(identity));
  t.notOk(isStopped);
  room.resolve();
  await stopped;
});

t.test('the process of a command that ends at once is not recorded, as that costs a commit', async (t) => {
  const store = testStore(t, realEffects);
  const written: OperationName[] = [];
  const write: Writer['write'] = (name, input) => {
    written.push(name);
    return store.writer.write(name, input);
  };
  let isLater = false;
  const executor = testExecutor(
    t,
    { ...store, writer: { ...store.writer, write } },
    { effects: noticing(20, () => isLater) },
  );
  await carriedOut(store, executor);
  isLater = true;
  for (let turn = 0; turn < 10; turn++) await nextTurn();
  t.ok(written.includes('deployments.finish'));
  t.notOk(written.includes('deployments.setProcess'));
});

t.test('problems with outputs are noted in the log on lines of their own', async (t) => {
  const { store, executor } = service(t);
  const script = 'printf "no line end"; echo neither >>"$DEPLOY_OUTPUT"';
  const id = await carriedOut(store, executor, { command: ['/bin/sh', '-c', script] });
  t.equal(logOf(store, id), 'no line end\ndavit: DEPLOY_OUTPUT: line 1 is not name=value\n');
});

t.test('the recorded status follows from how the command ended', async (t) => {
  const { store, executor } = service(t);
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
    const id = await carriedOut(store, executor, { command: command as [string] });
    t.match(store.reads.deployments.get(id), expected, name);
  }
});

t.test('a timeout stops a running command', async (t) => {
  const { store, executor } = service(t);
  const id = await carriedOut(store, executor, { command: ['/bin/sleep', '600'], timeoutMs: 50 });
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: /^timeout$/ });
});

t.test('an idle timeout stops a silent command', async (t) => {
  const { store, executor } = service(t);
  const id = await carriedOut(store, executor, { command: ['/bin/sleep', '600'], idleTimeoutMs: 50 });
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'idle_timeout' });
});

t.test('canceling a running deployment stops its command and is recorded once that is gone', async (t) => {
  const { store, executor } = service(t);
  const projectId = await store.project({ command: ['/bin/sleep', '600'] });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  t.match(await store.writer.write('deployments.cancel', { id }), { status: 'canceling' });
  await executor.tick();
  await executor.settled();
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user' });
  await t.rejects(store.writer.write('deployments.cancel', { id }), { code: 'conflict' });
});

t.test('at most maxConcurrent deployments run, one of each project', async (t) => {
  const { store, executor } = service(t, { maxConcurrent: 2 });
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

t.test('all waiting deployments are started with few empty claims, whatever the limit', async (t) => {
  const store = testStore(t, realEffects);
  let looks = 0;
  const write: Writer['write'] = (name, input) => {
    if (name === 'deployments.claim') looks += 1;
    return store.writer.write(name, input);
  };
  const counted = { ...store, writer: { ...store.writer, write } };
  const executor = testExecutor(t, counted, { maxConcurrent: 100_000 });
  for (let made = 0; made < 70; made++) {
    const projectId = await store.project({ command: ['/bin/true'] });
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  await executor.tick();
  t.equal(store.query("SELECT 1 FROM deployments WHERE status = 'queued'").length, 0);
  await executor.settled();
  looks = 0;
  await executor.tick();
  t.ok(looks < 100, `${looks} looks`);
});

t.test('an end that a full disk kept from being recorded is recorded once there is room', async (t) => {
  const { logger, lines: warnings } = keptLog({ level: 'warn' });
  const { store, executor } = service(t, { logger });
  const projectId = await store.project({ command: ['/bin/sh', '-c', 'yes | head -c 200000'] });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  store.limitPages(true);
  await executor.tick();
  await until(() => warnings.length > 0);
  store.limitPages(false);
  await executor.settled();
  t.match(warnings[0], { deployment_id: id, reason: /disk is full/ });
  t.match(store.reads.deployments.get(id), { status: 'succeeded', log_bytes: 200_000 });
});

t.test('a command that ends within the grace of a shutdown counts as it ended', async (t) => {
  const gate = namedPipe(t);
  const { store, executor } = service(t);
  const projectId = await store.project({ command: ['/bin/cat', gate] });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  const stopped = executor.stop(60_000);
  await nextTurn();
  await writeFile(gate, 'go\n');
  await stopped;
  t.match(store.reads.deployments.get(id), { status: 'succeeded' });
  t.equal(logOf(store, id), 'go\n');
});

t.test('a shutdown ends running deployments as interrupted and starts none', async (t) => {
  const { store, executor } = service(t);
  const projectId = await store.project({ command: ['/bin/sleep', '600'] });
  const first = await store.writer.write('deployments.create', newDeployment(projectId));
  const second = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  await executor.stop(0);
  t.match(store.reads.deployments.get(first.id), {
    status: 'failed',
    reason: 'interrupted',
    message: 'davit stopped while this ran; it may have done a part of its work',
  });
  await executor.tick();
  t.match(store.reads.deployments.get(second.id), { status: 'queued' });
});

t.test('a deployment claimed after the grace of a shutdown is not started', async (t) => {
  const store = testStore(t, realEffects);
  const stalled = Promise.withResolvers<void>();
  const write: Writer['write'] = async (name, input) => {
    if (name === 'deployments.claim') await stalled.promise;
    return await store.writer.write(name, input);
  };
  const executor = testExecutor(t, { ...store, writer: { ...store.writer, write } }, { maxConcurrent: 1 });
  const proof = join(temporaryDirectory(t), 'started');
  const projectId = await store.project({ command: ['/usr/bin/touch', proof] });
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  const ticked = executor.tick();
  const stopped = executor.stop(0);
  realEffects.after(1, stalled.resolve);
  await Promise.all([ticked, stopped]);
  t.match(store.reads.deployments.get(id), {
    status: 'failed',
    reason: 'interrupted',
    message: 'davit stopped before this could start: nothing was run',
  });
  t.notOk(existsSync(proof));
});

function service(t: Test, changes: Partial<ExecutorOptions> = {}): { store: TestStore; executor: Executor } {
  const store = testStore(t, realEffects);
  return { store, executor: testExecutor(t, store, changes) };
}

/** Real effects, but that the end of so many milliseconds is noticed only once this holds. */
function noticing(ms: number, holds: () => boolean): Effects {
  return {
    ...realEffects,
    after(delayMs, action) {
      if (delayMs !== ms) return realEffects.after(delayMs, action);
      let isCanceled = false;
      void until(() => isCanceled || holds()).then(() => isCanceled || action());
      return () => {
        isCanceled = true;
      };
    },
  };
}

/** On a clock that only `pass` moves. */
function serviceOnFullDisk(t: Test, changes: Partial<ExecutorOptions> = {}) {
  const disk = { isFull: true, error: systemError('ENOSPC') as Error, tries: 0 };
  const workspaces = testWorkspaces(t);
  const make: Workspaces['make'] = (projectId, directory) => {
    disk.tries += 1;
    if (disk.isFull) throw disk.error;
    return workspaces.make(projectId, directory);
  };
  const effects = fakeEffects();
  const { store, executor } = service(t, { workspaces: { ...workspaces, make }, effects, ...changes });
  return {
    store,
    executor,
    disk,
    async create(name: string, changes: Parameters<TestStore['project']>[0] = {}): Promise<DeploymentId> {
      const deployment = newDeployment(await store.project({ name, ...changes }));
      return (await store.writer.write('deployments.create', deployment)).id;
    },
    async setStatus(id: DeploymentId, status: ProjectStatus): Promise<void> {
      const { project_id } = store.reads.deployments.existing(id);
      await store.writer.write('projects.setStatus', { id: project_id, status });
    },
    statuses: () => store.query('SELECT status FROM deployments ORDER BY seq').map(({ status }) => status),
    async pass(ms: number): Promise<void> {
      await nextTurn();
      effects.advance(ms);
      await nextTurn();
    },
  };
}

function systemError(code: string): Error {
  return Object.assign(new Error(code), { code });
}

/** The store, with a bug in one operation after so many that went well. */
function refusing(store: TestStore, operation: OperationName, afterCount: number): TestStore {
  let count = 0;
  const write: Writer['write'] = (name, input) => {
    if (name === operation && ++count > afterCount) return Promise.reject(new Error('a bug'));
    return store.writer.write(name, input);
  };
  return { ...store, writer: { ...store.writer, write } };
}

function sleeping(id: Parameters<typeof newDeployment>[0]) {
  return {
    id,
    changes: { command: ['/bin/sleep', '600'] as [string, string] },
    variables: {},
    unsetVariables: [],
  };
}

/** A deployment of a new project, once it is over. */
async function carriedOut(
  store: TestStore,
  executor: Executor,
  project: Parameters<TestStore['project']>[0] = {},
): Promise<DeploymentId> {
  const projectId = await store.project(project);
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await executor.tick();
  await executor.settled();
  return id;
}

function logOf(store: TestStore, id: DeploymentId): string {
  const { log_bytes = 0 } = store.reads.deployments.get(id) ?? {};
  return Buffer.concat([...store.reads.logs.text(id, 0, log_bytes)]).toString();
}
