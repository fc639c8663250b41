import { type ChildProcessWithoutNullStreams, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pino } from 'pino';
import t, { type Test } from 'tap';
import { type RecoverOptions, recover } from '../../src/deploy/recover.ts';
import type { DeploymentId, ProjectId } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { AppError } from '../../src/errors.ts';
import { processIds, readProc } from '../../src/proc.ts';
import { isAlive, type ProcessIdentity, processIdentity, readStat } from '../../src/process-identity.ts';
import { sharedMemoryPath } from '../../src/store/place.ts';
import type { Writer } from '../../src/store/writer.ts';
import { fixture, namedPipe, PATH, posix, testWorkspaces, until } from '../helpers/commands.ts';
import { stayAlive } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { openAgain, refuseToOpen } from '../helpers/limits.ts';
import { newDeployment, type TestStore, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('after a crash, running commands are ended and recorded, and queued deployments go on', async (t) => {
  const { store, id, projectId } = await crashed(t);
  const second = await store.writer.write('deployments.create', newDeployment(projectId));
  const identity = identityOf(leftOver(t, ['/bin/sleep', '600'], { DEPLOY_ID: id }));
  await store.writer.write('deployments.setProcess', { id, ...identity });

  const parent = temporaryDirectory(t);
  testWorkspaces(t, { parent }).make(projectId, null);
  await recoverIn(parent, store);
  t.notOk(isAlive(identity));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
  t.match(store.query("SELECT count(*) AS ends FROM events WHERE type = 'deployment.failed'"), [{ ends: 1 }]);
  t.match(await store.writer.write('deployments.claim', undefined), { id: second.id });
  await until(() => readdirSync(parent).length === 0); // nor are its files left
});

t.test('a command whose process was never recorded is found by its marker', async (t) => {
  const { store, id } = await crashed(t);
  const identity = identityOf(leftOver(t, ['/bin/sleep', '600'], { DEPLOY_ID: id }));
  await recoverIn(temporaryDirectory(t), store);
  t.notOk(isAlive(identity));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('a command that cleared its environment is found by its recorded process', async (t) => {
  const { store, id } = await crashed(t);
  const identity = identityOf(leftOver(t, ['/bin/sleep', '600'], {}));
  await store.writer.write('deployments.setProcess', { id, ...identity });
  await recoverIn(temporaryDirectory(t), store);
  t.notOk(isAlive(identity));
});

t.test('commands left by a crash get their grace to clean up', async (t) => {
  const { store, id } = await crashed(t);
  const left = leftOver(t, [fixture('tidies-up')], { DEPLOY_ID: id, PATH });
  const printed: string[] = [];
  left.stdout.setEncoding('utf8').on('data', (text: string) => printed.push(text));
  await once(left.stdout, 'data');
  const closed = once(left, 'close');
  const identity = identityOf(left);
  const livedWhenFilesWent: boolean[] = [];
  await recoverIn(temporaryDirectory(t), store, {
    workspaces: {
      ...testWorkspaces(t),
      removeLeft: async () => void livedWhenFilesWent.push(isAlive(identity)),
    },
  });
  await closed;
  t.equal(printed.join(''), 'ready\ntidied up\n');
  t.strictSame(livedWhenFilesWent, [false], 'and their files until then');
});

t.test('a deployment that was being canceled is recorded as canceled', async (t) => {
  const { store, id } = await crashed(t);
  await store.writer.write('deployments.cancel', { id });
  await recoverIn(temporaryDirectory(t), store);
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user' });
});

t.test('so is one that is canceled while its processes are being ended', async (t) => {
  const { store, id } = await crashed(t);
  const script = 'trap "echo asked; read go; exit" TERM; echo ready; sleep 600 & wait; wait';
  const left = leftOver(t, ['/bin/sh', '-c', script], { DEPLOY_ID: id, PATH });
  let printed = '';
  left.stdout.on('data', (bytes: Buffer) => {
    printed += bytes;
  });
  await until(() => printed === 'ready\n');
  const recovered = recoverIn(temporaryDirectory(t), store);
  await until(() => printed === 'ready\nasked\n');
  await store.writer.write('deployments.cancel', { id });
  left.stdin.end();
  await recovered;
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user' });
});

t.test('a command that a killed service was just starting is ended', async (t) => {
  const { store, id } = await crashed(t);
  // Beside one whose process is recorded.
  await store.writer.write('deployments.create', newDeployment(await store.project({ name: 'other' })));
  const { id: other } = (await store.writer.write('deployments.claim', undefined)) ?? { id };
  const identity = identityOf(leftOver(t, ['/bin/sleep', '600'], {}));
  await store.writer.write('deployments.setProcess', { id: other, ...identity });
  const directory = temporaryDirectory(t);
  const { service, shared, command } = await startingService(t, directory);
  await kill(service);
  rmSync(shared); // as whoever opens the database after a crash and closes it again does
  await recoverIn(directory, store, { sharedMemoryPath: shared });
  t.notOk(hasMemory(command), 'it cannot go on');
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('so is one of a database whose path has other letters than ASCII and a line end', async (t) => {
  const { store } = await crashed(t);
  const directory = join(temporaryDirectory(t), 'münchen\n');
  mkdirSync(directory);
  const { service, shared, command } = await startingService(t, directory);
  await kill(service);
  await recoverIn(temporaryDirectory(t), store, { sharedMemoryPath: shared });
  t.notOk(hasMemory(command), 'it cannot go on');
});

t.test('so is one that has come to the starting service, which has the same memory', async (t) => {
  const { store } = await crashed(t);
  const shared = sharedMemoryPath(store.path);
  posix.becomeSubreaper();
  const { service, command } = await startingService(t, temporaryDirectory(t), shared);
  await kill(service);
  t.equal(readStat(command.processId)?.parentId, process.pid);
  await recoverIn(temporaryDirectory(t), store, { sharedMemoryPath: shared });
  t.notOk(hasMemory(command), 'it cannot go on');
});

t.test('but not one of another database', async (t) => {
  const { store } = await crashed(t);
  const { service, command } = await startingService(t, temporaryDirectory(t));
  await kill(service);
  await recoverIn(temporaryDirectory(t), store, { sharedMemoryPath: sharedMemoryPath(store.path) });
  t.ok(hasMemory(command));
});

t.test('a lack of open files while it is looked for is waited out', async (t) => {
  const { store } = await crashed(t);
  const directory = temporaryDirectory(t);
  const { service, shared, command } = await startingService(t, directory);
  await kill(service);
  t.teardown(openAgain);
  const effects: Effects = {
    ...realEffects,
    after(delayMs, action) {
      openAgain();
      return realEffects.after(delayMs, action);
    },
  };
  const recovered = recoverIn(directory, store, { sharedMemoryPath: shared, effects });
  refuseToOpen('ENFILE');
  await recovered;
  t.notOk(hasMemory(command), 'it cannot go on');
});

t.test('whoever else has the database in memory is left alone, and keeps nobody waiting', async (t) => {
  const { store, id } = await crashed(t);
  const directory = temporaryDirectory(t);
  // One with the same path in another mount namespace, or a program that read the database and closed its files.
  const { service, shared, command } = await startingService(t, directory);
  const effects: Effects = {
    ...realEffects,
    after(delayMs, action) {
      t.fail('it waits');
      return realEffects.after(delayMs, action);
    },
  };
  await recoverIn(directory, store, { sharedMemoryPath: shared, effects });
  t.ok(isAlive(identityOf(service)));
  t.ok(hasMemory(command));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('a command that SIGKILL does not end is not awaited for ever', async (t) => {
  const { store, id } = await crashed(t);
  const directory = temporaryDirectory(t);
  const { service, shared, command } = await startingService(t, directory);
  await kill(service);

  let waits = 0;
  let asked = 0;
  const effects: Effects = {
    ...realEffects,
    // While other processes fork, looking for any goes on until half a second is over: so time passes with each look, too.
    monotonicMs: () => waits * 1_000 + asked++ * 10,
    after(_delayMs, action) {
      waits += 1;
      return realEffects.after(0, action);
    },
  };
  t.intercept(process, 'kill', { value: () => true });
  await recoverIn(directory, store, { sharedMemoryPath: shared, effects });
  t.equal(waits, 10);
  t.ok(hasMemory(command));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('an end that a full disk kept from being recorded is recorded once there is room', async (t) => {
  const { store, id } = await crashed(t);
  let refusals = 0;
  const write: Writer['write'] = (name, input) => {
    if (refusals === 2) return store.writer.write(name, input);
    refusals += 1;
    return Promise.reject(new AppError('unavailable', 'the disk is full'));
  };
  const effects = {
    ...realEffects,
    after: (_delayMs: number, action: () => void) => realEffects.after(0, action),
  };
  await recoverIn(temporaryDirectory(t), { ...store, writer: { ...store.writer, write } }, { effects });
  t.equal(refusals, 2);
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('files of dead runs are removed before their end is recorded, which may need the space', async (t) => {
  const { store, id } = await crashed(t);
  const directory = temporaryDirectory(t);
  const workspaces = testWorkspaces(t);
  const { promise: room, resolve: makeRoom } = Promise.withResolvers<void>();
  const write: Writer['write'] = async (name, input) => {
    await room;
    return await store.writer.write(name, input);
  };
  await recoverIn(
    directory,
    { ...store, writer: { ...store.writer, write } },
    {
      workspaces: { ...workspaces, removeLeft: async () => makeRoom() },
    },
  );
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('removing files of dead runs does not delay recovery', async (t) => {
  const { store, id } = await crashed(t);
  const directory = temporaryDirectory(t);
  const workspaces = testWorkspaces(t);
  await recoverIn(directory, store, {
    workspaces: { ...workspaces, removeLeft: () => new Promise(() => undefined) },
  });
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('files that cannot be removed are reported and do not block recovery', async (t) => {
  const { store, id } = await crashed(t);
  const { logger, lines } = keptLog({ level: 'warn' });
  const directory = temporaryDirectory(t);
  await recoverIn(directory, store, {
    workspaces: {
      ...testWorkspaces(t),
      removeLeft: () => Promise.reject(new Error('no')),
    },
    logger,
  });
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
  const isReport = ({ msg }: Record<string, unknown>) =>
    msg === 'directories of earlier runs are left behind';
  await until(() => lines.some(isReport));
  t.match(lines.find(isReport), { err: { message: 'no' } });
});

/** A deployment recorded as running without a service, as after a kill. */
async function crashed(t: Test): Promise<{ store: TestStore; id: DeploymentId; projectId: ProjectId }> {
  stayAlive(t);
  const store = testStore(t, realEffects);
  const projectId = await store.project();
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  await store.writer.write('deployments.claim', undefined);
  return { store, id, projectId };
}

function recoverIn(
  temporaryDirectory: string,
  store: TestStore,
  changes: Partial<RecoverOptions> = {},
): Promise<void> {
  return recover(store, {
    killGraceMs: 5_000,
    workspaces: testWorkspaces(t, { parent: temporaryDirectory }),
    sharedMemoryPath: join(temporaryDirectory, 'davit.db-shm'),
    effects: realEffects,
    logger: pino({ level: 'silent' }),
    ...changes,
  });
}

/** A command that outlived its service. */
function leftOver(
  t: Test,
  [program, ...words]: readonly [string, ...string[]],
  env: Record<string, string>,
): ChildProcessWithoutNullStreams {
  const left = spawn(program, words, { detached: true, env });
  t.teardown(() => left.kill('SIGKILL'));
  return left;
}

/** A service that starts a command, which hangs before execve(2). Both end with the test. */
async function startingService(
  t: Test,
  directory: string,
  shared = join(directory, 'davit.db-shm'),
): Promise<{ service: ChildProcessWithoutNullStreams; shared: string; command: ProcessIdentity }> {
  writeFileSync(shared, 'x', { flag: 'a' });
  const program = join(import.meta.dirname, '../fixtures/starting-service.ts');
  const service = leftOver(t, [process.execPath, program, shared, namedPipe(t)], { PATH });
  const isCommand = (processId: number) => readStat(processId)?.parentId === service.pid;
  await until(() => processIds().some(isCommand));
  const command = processIdentity(processIds().find(isCommand) ?? 0);
  if (command === undefined) throw new Error('the command is not there');
  t.teardown(() => isAlive(command) && process.kill(command.processId, 'SIGKILL'));
  return { service, shared, command };
}

/** Whether it is alive, and not just ending. */
function hasMemory({ processId }: ProcessIdentity): boolean {
  return (readProc(`/proc/${processId}/maps`) ?? '') !== '';
}

async function kill(service: ChildProcessWithoutNullStreams): Promise<void> {
  service.kill('SIGKILL');
  await once(service, 'exit');
}

function identityOf({ pid = 0 }: ChildProcessWithoutNullStreams): ProcessIdentity {
  const identity = processIdentity(pid);
  if (identity === undefined) throw new Error('the process is not there');
  return identity;
}
