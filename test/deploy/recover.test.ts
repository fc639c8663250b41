import { type ChildProcessWithoutNullStreams, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pino } from 'pino';
import t, { type Test } from 'tap';
import { recover } from '../../src/deploy/recover.ts';
import type { DeploymentId, ProjectId } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { AppError } from '../../src/errors.ts';
import { holdersOf } from '../../src/proc.ts';
import { isAlive, type ProcessIdentity, processIdentity } from '../../src/process-identity.ts';
import type { Writer } from '../../src/store/writer.ts';
import { fixture, PATH, testWorkspaces, until } from '../helpers/commands.ts';
import { stayAlive } from '../helpers/effects.ts';
import { newDeployment, type TestStore, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('after a crash, running commands are ended and recorded, and queued deployments go on', async (t) => {
  const { store, id, projectId } = await crashed(t);
  const second = await store.writer.write('deployments.create', newDeployment(projectId));
  const identity = identityOf(leftOver(t, ['/bin/sleep', '600'], { DEPLOY_ID: id }));
  await store.writer.write('deployments.setProcess', { id, ...identity });

  const parent = temporaryDirectory(t);
  testWorkspaces(t, { parent, lockPath: lockFile(parent) }).make(projectId, null);
  await recoverIn(parent, store);
  t.notOk(isAlive(identity));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
  t.match(store.query("SELECT count(*) AS ends FROM events WHERE type = 'deployment.failed'"), [{ ends: 1 }]);
  t.match(await store.writer.write('deployments.claim', undefined), { id: second.id });
  await until(() => readdirSync(parent).length === 1); // the lock: nor are its files left
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
  await recoverIn(temporaryDirectory(t), store);
  await closed;
  t.equal(printed.join(''), 'ready\ntidied up\n');
});

t.test('a deployment that was being canceled is recorded as canceled', async (t) => {
  const { store, id } = await crashed(t);
  await store.writer.write('deployments.cancel', { id });
  await recoverIn(temporaryDirectory(t), store);
  t.match(store.reads.deployments.get(id), { status: 'canceled', reason: 'user' });
});

t.test('a command that a killed service was just starting is ended', async (t) => {
  const { store, id } = await crashed(t);
  const directory = temporaryDirectory(t);
  // As before execve(2): the service's memory, and neither its files nor the command's environment.
  const shared = join(directory, 'davit.db-shm');
  writeFileSync(shared, 'x');
  const program = join(import.meta.dirname, '../fixtures/maps-file.ts');
  const starting = leftOver(t, [process.execPath, program, shared], { PATH });
  await once(starting.stdout, 'data');
  rmSync(shared); // as whoever opens the database after a crash and closes it again does
  const identity = identityOf(starting);
  await recoverIn(directory, store, { sharedMemoryPath: shared });
  t.notOk(isAlive(identity));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('one that still has all the files of the service is awaited', async (t) => {
  const { store, id } = await crashed(t);
  const directory = temporaryDirectory(t);
  const lock = lockFile(directory);
  const script = 'exec 3<"$1"; read go; DEPLOY_ID="$2" exec sleep 600 3<&-';
  const starting = leftOver(t, ['/bin/sh', '-c', script, 'sh', lock, id], {});
  const identity = identityOf(starting);
  await until(() => holdersOf(lock).length > 0);

  let waits = 0;
  const effects: Effects = {
    ...realEffects,
    monotonicMs: () => 0, // a machine that takes its time for these looks is given it
    after(delayMs, action) {
      waits += 1;
      if (waits === 20) starting.stdin.write('go\n');
      return realEffects.after(delayMs, action);
    },
  };
  await recoverIn(directory, store, { effects });
  t.notOk(isAlive(identity));
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('a process that holds the lock file open for ever does not block recovery', async (t) => {
  const { store, id } = await crashed(t);
  const directory = temporaryDirectory(t);
  const lock = lockFile(directory);
  const identity = identityOf(leftOver(t, ['/bin/sh', '-c', 'exec 3<"$1"; read never', 'sh', lock], {}));
  await until(() => holdersOf(lock).length > 0);

  let waits = 0;
  const effects: Effects = {
    ...realEffects,
    monotonicMs: () => waits * 1_000,
    after(_delayMs, action) {
      waits += 1;
      return realEffects.after(0, action);
    },
  };
  await recoverIn(directory, store, { effects });
  t.equal(waits, 10);
  t.ok(isAlive(identity), 'it is not ended');
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
  const workspaces = testWorkspaces(t, { parent: directory, lockPath: lockFile(directory) });
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
  const workspaces = testWorkspaces(t, { parent: directory, lockPath: lockFile(directory) });
  await recoverIn(directory, store, {
    workspaces: { ...workspaces, removeLeft: () => new Promise(() => undefined) },
  });
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
});

t.test('files that cannot be removed are reported and do not block recovery', async (t) => {
  const { store, id } = await crashed(t);
  const lines: Record<string, unknown>[] = [];
  const directory = temporaryDirectory(t);
  await recoverIn(directory, store, {
    workspaces: {
      ...testWorkspaces(t, { parent: directory, lockPath: lockFile(directory) }),
      removeLeft: () => Promise.reject(new Error('no')),
    },
    logger: pino({ level: 'warn' }, { write: (line) => void lines.push(JSON.parse(line)) }),
  });
  t.match(store.reads.deployments.get(id), { status: 'failed', reason: 'interrupted' });
  const isReport = ({ msg }: Record<string, unknown>) =>
    msg === 'directories of earlier runs are left behind';
  await until(() => lines.some(isReport));
  t.match(lines.find(isReport), { err: { message: 'no' } });
});

function lockFile(directory: string): string {
  const path = join(directory, 'lock');
  writeFileSync(path, '', { flag: 'a' });
  return path;
}

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
  changes: Partial<Parameters<typeof recover>[1]> = {},
): Promise<void> {
  return recover(store, {
    killGraceMs: 5_000,
    workspaces: testWorkspaces(t, { parent: temporaryDirectory, lockPath: lockFile(temporaryDirectory) }),
    lockPath: lockFile(temporaryDirectory),
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

function identityOf({ pid = 0 }: ChildProcessWithoutNullStreams): ProcessIdentity {
  const identity = processIdentity(pid);
  if (identity === undefined) throw new Error('the process is not there');
  return identity;
}
