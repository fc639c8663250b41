import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import t, { type Test } from 'tap';
import {
  endOrphanedSpawners,
  isAlive,
  type ProcessIdentity,
  processIdentity,
} from '../../src/deploy/processes.ts';
import type { StartedProcess } from '../../src/deploy/spawner.ts';
import { realEffects } from '../../src/effects.ts';
import { fixture, marked, PATH, stateOf, testSpawner, until } from '../helpers/commands.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a hundred commands at once start and end', async (t) => {
  const spawner = await testSpawner(t);
  const ends = await Promise.all(
    Array.from({ length: 100 }, async (_, number) => {
      const started = await spawner.spawn({
        ...REQUEST,
        command: ['sh', '-c', `echo ${number}; exit ${number}`],
      });
      if (started.kind !== 'started') return started;
      return { output: await outputOf(started), end: await started.ended };
    }),
  );
  t.strictSame(
    ends,
    Array.from({ length: 100 }, (_, number) => ({
      output: `${number}\n`,
      end: { kind: 'exited', exitCode: number },
    })),
  );
  t.strictSame(spawner.problems, []);
});

t.test('it tells exactly which process it started', async (t) => {
  const spawner = await testSpawner(t);
  const started = await startedOf(spawner.spawn({ ...REQUEST, command: ['sleep', '1000'] }));
  t.strictSame(started.identity, processIdentity(started.identity.processId));
  t.equal(started.identity.bootId, readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim());
  process.kill(started.identity.processId, 'SIGKILL');
  t.strictSame(await started.ended, { kind: 'signalled', signal: 'SIGKILL' });
});

t.test('when memory runs out, commands are taken before the service and its spawner', async (t) => {
  const spawner = await testSpawner(t);
  const own = Number(readFileSync('/proc/self/oom_score_adj', 'utf8'));
  const started = await startedOf(
    spawner.spawn({ ...REQUEST, command: ['cat', '/proc/self/oom_score_adj'] }),
  );
  t.equal(await outputOf(started), `${Math.max(own, 500)}\n`);
  t.equal(Number(readFileSync(`/proc/${spawner.processId()}/oom_score_adj`, 'utf8')), own);
});

t.test('what a command must not know is neither in its environment nor in any command line', async (t) => {
  const spawner = await testSpawner(t);
  const started = await startedOf(
    spawner.spawn({
      ...REQUEST,
      command: ['cat', '/proc/self/environ'],
      environment: { SECRET: 'hidden-value' },
    }),
  );
  t.equal(await outputOf(started), 'SECRET=hidden-value\0');
  t.notMatch(readFileSync(`/proc/${spawner.processId()}/cmdline`, 'utf8'), 'hidden-value');
});

t.test('the spawner does not take signals meant for the service', async (t) => {
  const spawner = await testSpawner(t);
  const processId = spawner.processId() ?? 0;
  for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.kill(processId, signal);
  const started = await startedOf(spawner.spawn({ ...REQUEST, command: ['true'] }));
  t.strictSame(await started.ended, { kind: 'exited', exitCode: 0 });
  t.equal(spawner.processId(), processId);
});

t.test('closing ends the spawner and leaves no file', async (t) => {
  const spawner = await testSpawner(t);
  const identity = processIdentity(spawner.processId() ?? 0);
  const running = await startedOf(spawner.spawn({ ...REQUEST, command: ['sleep', '1000'] }));
  t.equal(readdirSync(spawner.directory).length, 1);
  await spawner.close();
  t.ok(identity && !isAlive(identity));
  t.strictSame(readdirSync(spawner.directory), []);
  t.strictSame(await running.ended, { kind: 'lost' });
  t.strictSame(await spawner.spawn({ ...REQUEST, command: ['true'] }), {
    kind: 'notStarted',
    cause: 'davit is shutting down',
  });
  t.strictSame(spawner.problems, []);
  process.kill(running.identity.processId, 'SIGKILL');
});

t.test('pipes are private, and those of dead services are removed', async (t) => {
  const directory = temporaryDirectory(t);
  const self = processIdentity(process.pid);
  const dead = join(directory, 'davit-pipes-4000000-17-abc');
  const reused = join(directory, `davit-pipes-${process.pid}-17-abc`);
  const living = join(directory, `davit-pipes-${process.pid}-${self?.processStartedAt}-abc`);
  const other = join(directory, 'davit-pipes-notes');
  for (const path of [dead, reused, living, other]) mkdirSync(path);
  const spawner = await testSpawner(t, { directory });
  t.notOk(existsSync(dead));
  t.notOk(existsSync(reused));
  t.ok(existsSync(living));
  t.ok(existsSync(other));
  const [own = ''] = readdirSync(directory).filter(
    (name) => !['davit-pipes-notes'].includes(name) && !living.endsWith(name),
  );
  t.equal(statSync(join(directory, own)).mode & 0o777, 0o700);
  await spawner.close();
});

t.test('somebody who tidies up temporary files does no harm', async (t) => {
  const spawner = await testSpawner(t);
  for (const name of readdirSync(spawner.directory))
    rmSync(join(spawner.directory, name), { recursive: true });
  const started = await startedOf(spawner.spawn({ ...REQUEST, command: ['echo', 'one'] }));
  t.equal(await outputOf(started), 'one\n');
});

t.test('without mkfifo no command starts, and it is told why', async (t) => {
  const spawner = await testSpawner(t, { environment: { PATH: '/no/such/directory' } });
  t.strictSame(await spawner.spawn({ ...REQUEST, command: ['true'] }), {
    kind: 'notStarted',
    cause: "no pipe for the command's output: mkfifo: spawn mkfifo ENOENT",
  });
  t.strictSame(spawner.problems, ["no pipe for the command's output: mkfifo: spawn mkfifo ENOENT"]);
  t.strictSame(readdirSync(spawner.directory), []);
});

t.test('without a directory for pipes no command starts, and it is told why', async (t) => {
  const spawner = await testSpawner(t, { directory: '/no/such/directory' });
  const cause = "ENOENT: no such file or directory, mkdtemp '/no/such/directory/davit-pipes-";
  t.match(await spawner.spawn({ ...REQUEST, command: ['true'] }), { kind: 'notStarted', cause });
  t.match(spawner.problems, [cause]);
});

t.test('a spawner that cannot be started is an error, and leaves no file', async (t) => {
  const directory = temporaryDirectory(t);
  await t.rejects(testSpawner(t, { directory, command: { file: '/no/such/davit', arguments: [] } }), {
    code: 'unavailable',
    message: 'the process that starts commands is gone: spawn /no/such/davit ENOENT',
  });
  await t.rejects(testSpawner(t, { directory, command: { file: 'false', arguments: [] } }), {
    code: 'unavailable',
    message: 'the process that starts commands is gone: it ended with 1',
  });
  t.strictSame(readdirSync(directory), []);
});

t.test('a spawner that dies is replaced', async (t) => {
  const spawner = await testSpawner(t);
  const processId = spawner.processId() ?? 0;
  process.kill(processId, 'SIGKILL');
  await until(() => spawner.processId() !== processId);
  const started = await startedOf(spawner.spawn({ ...REQUEST, command: ['true'] }));
  t.strictSame(await started.ended, { kind: 'exited', exitCode: 0 });
  t.strictSame(spawner.problems, ['the process that starts commands is gone: it ended with SIGKILL']);
});

t.test('when the service is killed, its spawner ends by itself', async (t) => {
  const { service, spawner } = await startService(t, 'token-of-its-own');
  service.kill('SIGKILL');
  await until(() => !isAlive(spawner));
  t.pass('it is gone');
});

t.test('what a killed service had asked for is not started any more', async (t) => {
  const { service, spawner, answered } = await startService(t, 'token-of-its-own');
  const file = join(temporaryDirectory(t), 'started');
  const deploymentId = `dpl_late${process.pid}`;
  process.kill(spawner.processId, 'SIGSTOP');
  await until(() => stateOf(spawner.processId) === 'T');
  const request = { ...REQUEST, command: ['touch', file], environment: { PATH, DEPLOY_ID: deploymentId } };
  service.stdin?.write(`${JSON.stringify(request)}\n`);
  await answered('asked');
  service.kill('SIGKILL');
  await once(service, 'exit');
  process.kill(spawner.processId, 'SIGCONT');
  await until(() => !isAlive(spawner));
  t.strictSame(await marked(deploymentId), []);
  t.notOk(existsSync(file));
});

t.test('a spawner that a killed service left is ended, the living service keeps its own', async (t) => {
  const token = `token-of-both-${process.pid}`;
  const own = await testSpawner(t, { token });
  const other = await startService(t, 'another-token');
  const { service, spawner } = await startService(t, token);
  process.kill(spawner.processId, 'SIGSTOP');
  service.kill('SIGKILL');
  await once(service, 'exit');
  await endOrphanedSpawners(token, realEffects);
  t.notOk(isAlive(spawner));
  t.ok(isAlive(other.spawner));
  const started = await startedOf(own.spawn({ ...REQUEST, command: ['true'] }));
  t.strictSame(await started.ended, { kind: 'exited', exitCode: 0 });
  t.strictSame(own.problems, []);
});

t.test('what a dead spawner forked is ended with it, what a living one forked is not', async (t) => {
  const token = `token-of-forks-${process.pid}`;
  const own = await testSpawner(t, { token });
  // Until it becomes the command, what was forked has the spawner's environment.
  const forked = {
    ...REQUEST,
    command: ['sleep', '1000'] as const,
    environment: { PATH, DAVIT_SPAWNER: token },
  };
  const { identity } = await startedOf(own.spawn(forked));
  await endOrphanedSpawners(token, realEffects);
  t.ok(isAlive(identity));
  process.kill(own.processId() ?? 0, 'SIGKILL');
  await until(() => own.problems.length > 0);
  await endOrphanedSpawners(token, realEffects);
  t.notOk(isAlive(identity));
});

const REQUEST = { directory: '/', environment: { PATH } };

async function startedOf(spawned: Promise<{ kind: string }>): Promise<StartedProcess> {
  const result = await spawned;
  if (result.kind !== 'started') throw new Error(`it was not started: ${JSON.stringify(result)}`);
  return result as StartedProcess;
}

async function outputOf(started: StartedProcess): Promise<string> {
  const pieces: Uint8Array[] = [];
  await started.readOutput(async (bytes) => {
    pieces.push(bytes);
  }).ended;
  return Buffer.concat(pieces).toString();
}

interface TestService {
  service: ChildProcess;
  spawner: ProcessIdentity;
  answered(line: string): Promise<void>;
}

/** A service in a process of its own, to be killed. */
async function startService(t: Test, token: string): Promise<TestService> {
  const service = spawn(process.execPath, [fixture('service.ts'), token, temporaryDirectory(t)], {
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  t.teardown(() => service.kill('SIGKILL'));
  const lines = createInterface(service.stdout)[Symbol.asyncIterator]();
  const spawner = processIdentity(Number((await lines.next()).value));
  if (spawner === undefined) throw new Error('the service has no spawner');
  return {
    service,
    spawner,
    async answered(line) {
      const { value } = await lines.next();
      if (value !== line) throw new Error(`the service said ${value}`);
    },
  };
}
