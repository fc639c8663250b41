import { spawn } from 'node:child_process';
import { once } from 'node:events';
import fs, { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { join } from 'node:path';
import type { Readable, Writable } from 'node:stream';
import { setImmediate as nextTurn } from 'node:timers/promises';
import koffi from 'koffi';
import t, { type Test } from 'tap';
import type { SpawnRequest } from '../../src/deploy/command-path.ts';
import { raiseOomScoreOf, withRaisedOomScore } from '../../src/deploy/oom-score.ts';
import type { Posix } from '../../src/deploy/posix.ts';
import { createSpawner, type Spawner, type StartedProcess } from '../../src/deploy/spawner.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { hasOrphans, openFilesOf } from '../../src/proc.ts';
import { processIdentity } from '../../src/process-identity.ts';
import {
  fixture,
  namedPipe,
  openPipes,
  PATH,
  posix,
  stateOf,
  testSpawner,
  until,
} from '../helpers/commands.ts';
import { stayAlive } from '../helpers/effects.ts';
import { openAgain, refuseToOpen, useUpFiles } from '../helpers/limits.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const REQUEST = { directory: '/', environment: { PATH } };
const SCORE_FILE = '/proc/self/oom_score_adj';
/** Before anything was started. */
const OWN_SCORE = ownScore();

t.test('a hundred commands can be started and end at once, while another goes on', async (t) => {
  const spawner = testSpawner(t);
  const other = await start(spawner, ['sleep', '1000']);
  // The first opens a file that stays open.
  await (await start(spawner, ['true'])).ended;
  // But for the one that libuv keeps in reserve from the first stream on, which is of these where stdout is a file.
  const openFiles = () => openFilesOf(process.pid).filter((path) => path !== '/dev/null').length;
  const before = openFiles();
  const ends = await Promise.all(
    Array.from({ length: 100 }, async (_, number) => {
      const started = await start(spawner, ['sh', '-c', `echo ${number}; exit ${255 - number}`]);
      return { output: await outputOf(started), end: await started.ended };
    }),
  );
  t.strictSame(
    ends,
    Array.from({ length: 100 }, (_, number) => ({
      output: `${number}\n`,
      end: { kind: 'exited', exitCode: 255 - number },
    })),
  );
  t.equal(openFiles(), before);
  process.kill(other.identity.processId, 'SIGKILL');
  await other.ended;
});

t.test('a started command has the exact identity of its process, and its signal is reported', async (t) => {
  const spawner = testSpawner(t);
  for (const signal of ['SIGKILL', 'SIGTERM', 'SIGABRT', 40] as const) {
    const started = await start(spawner, ['sleep', '1000']);
    t.strictSame(started.identity, processIdentity(started.identity.processId));
    t.equal(started.identity.bootId, readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim());
    process.kill(started.identity.processId, signal);
    const name = signal === 40 ? 'SIG40' : signal; // a real-time signal
    t.strictSame(await started.ended, { kind: 'signalled', signal: name });
    t.equal(stateOf(started.identity.processId), undefined, 'somebody has waited for it');
  }
});

t.test('a command leads its own session and process group', async (t) => {
  const spawner = testSpawner(t);
  const started = await start(spawner, ['cat', '/proc/self/stat']);
  const { processId } = started.identity;
  const [parentId, groupId, sessionId] =
    /\) \w (\d+) (\d+) (\d+)/.exec(await outputOf(started))?.slice(1) ?? [];
  t.strictSame([parentId, groupId, sessionId].map(Number), [process.pid, processId, processId]);
});

t.test('a command has three open files, default signals and an empty stdin', async (t) => {
  const spawner = testSpawner(t);
  const files = await start(spawner, ['ls', '/proc/self/fd']);
  // 3 is the directory that ls reads.
  t.equal(await outputOf(files), '0\n1\n2\n3\n');
  const status = await start(spawner, ['cat', '/proc/self/status']);
  t.match(await outputOf(status), /SigBlk:\s*0+\n(Sig.*\n)*SigIgn:\s*0+\n/);
  const input = await start(spawner, ['wc', '-c']);
  t.equal(await outputOf(input), '0\n');
});

t.test('the output of a command is one pipe, which can be reopened by name', async (t) => {
  const spawner = testSpawner(t);
  const script = 'echo one; echo two >&2; echo three >/dev/stderr; echo four >/dev/stdout';
  const started = await start(spawner, ['sh', '-c', script]);
  t.equal(await outputOf(started), 'one\ntwo\nthree\nfour\n');
  const mode = await start(spawner, ['stat', '-L', '-c', '%a', '/dev/stdout']);
  t.equal(await outputOf(mode), '622\n', 'another user may write to it, and not read it');
});

t.test('of the pipe of a command davit has only the end open from which it reads', async (t) => {
  stayAlive(t);
  const before = openPipes();
  const during: number[] = [];
  const watched: Posix = {
    ...posix,
    spawn(program) {
      during.push(openPipes() - before);
      return posix.spawn(program);
    },
  };
  const spawner = createSpawner(watched, realEffects, false);
  t.teardown(() => spawner.close());
  await outputOf(await start(spawner, ['true']));
  t.strictSame(during, [1], 'another command that is just being started cannot hold the other end');
});

t.test('the OOM killer prefers commands to the service', async (t) => {
  const spawner = testSpawner(t);
  const scoresOfStarting = () =>
    Promise.all(
      Array.from({ length: 5 }, async () =>
        Number(await outputOf(await start(spawner, ['cat', SCORE_FILE]))),
      ),
    );
  for (const score of await scoresOfStarting()) t.ok(score >= Math.max(OWN_SCORE, 500));
  t.equal(ownScore(), OWN_SCORE);

  t.teardown(() => writeFileSync(SCORE_FILE, String(OWN_SCORE)));
  writeFileSync(SCORE_FILE, '700');
  for (const score of await scoresOfStarting()) t.ok(score >= 700, 'a higher one is theirs, too');
  t.equal(ownScore(), 700);
  const { identity } = await start(spawner, ['sleep', '1000']);
  t.equal(scoreOf(identity.processId), 1000);
  process.kill(identity.processId, 'SIGKILL');
});

t.test('while the service starts a command, the OOM killer prefers those that run', async (t) => {
  const spawner = testSpawner(t);
  const { identity } = await start(spawner, ['sleep', '1000']);
  const ownHighest = await withRaisedOomScore(async () => ownScore());
  t.equal(ownHighest, Math.max(OWN_SCORE, 500), 'which the new one has from its first moment');
  t.equal(scoreOf(identity.processId), 1000, 'higher by half of all memory, more than the service takes');
  process.kill(identity.processId, 'SIGKILL');
});

t.test('its score is raised until the last of the commands that it starts at once is started', async (t) => {
  const [one, other] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  const [first, last] = [one, other].map(({ promise }) => withRaisedOomScore(() => promise));
  one.resolve();
  await first;
  t.equal(ownScore(), Math.max(OWN_SCORE, 500));
  other.resolve();
  await last;
  t.equal(ownScore(), OWN_SCORE);
});

t.test('where a container forbids to raise it, commands are started all the same', async (t) => {
  const { writeSync } = fs;
  t.teardown(() => {
    Object.assign(fs, { writeSync });
    syncBuiltinESMExports();
  });
  const refuse = () => {
    throw Object.assign(new Error('EACCES'), { code: 'EACCES' });
  };
  Object.assign(fs, { writeSync: refuse });
  syncBuiltinESMExports();
  t.equal(await withRaisedOomScore(async () => 'started'), 'started');
});

t.test('a command that has set its own score, as by choom(1), keeps it', async (t) => {
  const child = spawn('sh', ['-c', `echo 900 >${SCORE_FILE}; echo set; exec sleep 1000`]);
  t.teardown(() => child.kill('SIGKILL'));
  await once(child.stdout, 'data');
  const { pid = 0 } = child;
  raiseOomScoreOf(pid);
  t.equal(scoreOf(pid), 900);
});

t.test('a command gets exactly its environment and its arguments', async (t) => {
  const spawner = testSpawner(t);
  const environment = { PATH, EMPTY: '', ODD: 'a=b\n"\'$HOME é' };
  const seen = await start(spawner, ['cat', '/proc/self/environ'], { environment });
  t.equal(
    await outputOf(seen),
    Object.entries(environment)
      .map(([name, value]) => `${name}=${value}\0`)
      .join(''),
  );
  const words = ['', '$HOME', '; rm -rf /', '-n', 'é'];
  const echoed = await start(spawner, ['printf', '<%s>', ...words]);
  t.equal(await outputOf(echoed), words.map((word) => `<${word}>`).join(''));
});

t.test('a path counts from the directory, a name is looked up in the PATH of the command', async (t) => {
  const spawner = testSpawner(t);
  const directory = temporaryDirectory(t);
  mkdirSync(join(directory, 'bin'));
  writeFileSync(join(directory, 'bin/tool'), '#!/bin/sh\necho "$0 in $PWD"\n', { mode: 0o755 });
  const path = join(directory, 'bin/tool');
  const byPath = await start(spawner, ['bin/tool'], { directory });
  t.equal(await outputOf(byPath), `${path} in ${directory}\n`);
  const environment = { PATH: `/no/such/directory:${directory}/bin` };
  const byName = await start(spawner, ['tool'], { directory, environment });
  t.equal(await outputOf(byName), `${path} in ${directory}\n`);
});

t.test('a command that cannot be started gives the cause and leaves no file open', async (t) => {
  const spawner = testSpawner(t);
  const directory = temporaryDirectory(t);
  writeFileSync(join(directory, 'plain'), 'echo without a first line that says by what\n', { mode: 0o755 });
  writeFileSync(join(directory, 'closed'), '#!/bin/sh\n');
  const script = fixture('without-its-interpreter');
  const descriptors = readdirSync('/proc/self/fd').length;
  for (const [command, cause] of [
    [['no-such-program'], `the command no-such-program was not found in PATH (the project's own)`],
    [['./missing'], `the command ${directory}/missing does not exist`],
    [['./closed'], `the command ${directory}/closed is not executable`],
    [['/usr'], 'the command /usr is a directory'],
    [
      [script],
      `the command ${script} begins with #!/no/such/interpreter, which does not exist or is not executable`,
    ],
    [
      ['./plain'],
      `the command ${directory}/plain is neither a program for this machine nor a script that begins with #!`,
    ],
    [
      ['true', 'x'.repeat(200_000)],
      'the arguments and the environment of the command are larger than the system allows',
    ],
  ] as const) {
    t.strictSame(await spawner.spawn({ ...REQUEST, directory, command }), { kind: 'notStarted', cause });
  }
  for (const [place, cause] of [
    ['/no/such/directory', 'the directory /no/such/directory does not exist'],
    [script, `${script} is not a directory`],
  ] as const) {
    const result = await spawner.spawn({ ...REQUEST, directory: place, command: ['true'] });
    t.strictSame(result, { kind: 'notStarted', cause });
  }
  t.equal(readdirSync('/proc/self/fd').length, descriptors);
});

t.test('a name that was not found in PATH is not searched again to say so', async (t) => {
  const spawner = testSpawner(t);
  const directory = temporaryDirectory(t);
  const request = { ...REQUEST, command: ['tool'] as const, environment: { PATH: directory } };
  const spawned = spawner.spawn(request, () => {
    writeFileSync(join(directory, 'tool'), '#!/bin/sh\n', { mode: 0o755 });
    return true;
  });
  t.strictSame(await spawned, {
    kind: 'notStarted',
    cause: "the command tool was not found in PATH (the project's own)",
  });
});

t.test('adopted orphans are reaped and not taken for commands', async (t) => {
  const spawner = adoptingSpawner(t);
  const orphanIds = await Promise.all(
    Array.from({ length: 50 }, async (_, number) => {
      const command = ['sh', '-c', `sh -c 'exit 3' & echo $!; exit ${number}`] as const;
      const started = await start(spawner, command);
      const output = await outputOf(started);
      t.strictSame(await started.ended, { kind: 'exited', exitCode: number });
      return Number(output);
    }),
  );
  await until(() => orphanIds.every((processId) => stateOf(processId) === undefined));
});

t.test('orphans that come faster than they are reaped get 10 ms of a turn of the event loop', async (t) => {
  const { identity } = await start(testSpawner(t), ['sleep', '1000']);
  t.teardown(() => process.kill(identity.processId, 'SIGKILL'));
  let left = 1_000;
  const many: Posix = {
    ...posix,
    zombieChild: () => (left > 0 ? identity.processId : undefined),
    reap() {
      left -= 1;
      return undefined;
    },
  };
  // Each takes 1/32 ms, of which a clock can count 32 without rounding.
  const effects = { ...realEffects, monotonicMs: () => (1_000 - left) / 32 };
  const spawner = createSpawner(many, effects, true);
  t.teardown(() => spawner.close());
  for (let signals = 0; signals < 100; signals++) process.emit('SIGCHLD', 'SIGCHLD');
  t.equal(left, 680, 'those that are left wait for later turns');
  await nextTurn();
  t.equal(left, 360);
  await until(() => left === 0);
});

t.test('hasOrphans is true while an orphan lives, and a command does not count', async (t) => {
  const spawner = adoptingSpawner(t);
  const pipe = namedPipe(t);
  const running = await start(spawner, ['sleep', '1000']);
  t.equal(hasOrphans(), false);
  const command = ['sh', '-c', `setsid env -i sh -c 'read line <"${pipe}"' >/dev/null 2>&1 &`] as const;
  await (await start(spawner, command)).ended;
  t.equal(hasOrphans(), true);
  writeFileSync(pipe, 'go\n');
  await until(() => !hasOrphans());
  process.kill(running.identity.processId, 'SIGKILL');
  await running.ended;
});

t.test('an orphan that ends while no file can be opened is reaped all the same', async (t) => {
  const spawner = adoptingSpawner(t);
  const command = ['sh', '-c', 'sleep 1000 >/dev/null 2>&1 & echo $!'] as const;
  const orphanId = Number(await outputOf(await start(spawner, command)));
  await until(hasOrphans);
  t.teardown(openAgain);
  process.kill(orphanId, 'SIGKILL');
  // The first signal may still be for the end of the shell.
  do {
    refuseToOpen('ENFILE');
    await once(process, 'SIGCHLD');
    openAgain();
  } while (stateOf(orphanId) !== undefined);
  t.equal(stateOf(orphanId), undefined);
});

t.test('a background child that existed before davit is reaped and keeps no orphan waiting', async (t) => {
  const source = import.meta.resolve('../../src');
  const program = `
    const { loadPosix } = await import('${source}/deploy/posix.ts');
    const { createSpawner } = await import('${source}/deploy/spawner.ts');
    const { childrenOfMainThread } = await import('${source}/proc.ts');
    const { realEffects } = await import('${source}/effects.ts');
    const posix = await loadPosix();
    const spawner = createSpawner(posix, realEffects, posix.becomeSubreaper());
    const command = ['/bin/sh', '-c', 'setsid true >/dev/null 2>&1 &'];
    await spawner.spawn({ command, directory: '/', environment: {} });
    process.stdin.once('data', () => console.log('ended')).once('end', () => {
      setInterval(() => childrenOfMainThread().length === 0 && process.exit(0), 1);
    });`;
  // The one in the background ends, and with it what its end is told by, once davit has begun.
  const script = 'cat <&3 >/dev/null & exec "$0" --input-type=module --eval "$1" 3<&-';
  const child = spawn('sh', ['-c', script, process.execPath, program], {
    stdio: ['pipe', 'pipe', 'inherit', 'pipe'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  const [stdin, stdout, , background] = child.stdio as unknown as [Writable, Readable, null, Writable];
  stdin.write('x');
  await once(stdout, 'data');
  background.end();
  stdin.end();
  t.strictSame(await once(child, 'exit'), [0, null]);
});

t.test('a spawn without free file descriptors fails for a shortage', ifHas('prlimit'), async (t) => {
  const spawner = testSpawner(t);
  const release = useUpFiles();
  try {
    t.strictSame(await spawner.spawn({ ...REQUEST, command: ['/bin/true'] }), {
      kind: 'shortage',
      cause: 'pipe2: EMFILE',
    });
  } finally {
    release();
  }
  await start(spawner, ['true']);
});

t.test('so does one to which the system gives no process', async (t) => {
  const spawner = createSpawner({ ...posix, spawn: async () => ({ code: 'EAGAIN' }) }, realEffects, false);
  t.teardown(spawner.close);
  t.match(await spawner.spawn({ ...REQUEST, command: ['/bin/true'] }), { kind: 'shortage' });
});

t.test("of libuv's threads, commands that hang as they are started take sixteen at most", async (t) => {
  stayAlive(t);
  const hung = Promise.withResolvers<void>();
  let begun = 0;
  const slow: Posix = {
    ...posix,
    async spawn(program) {
      begun += 1;
      await hung.promise;
      return await posix.spawn(program);
    },
  };
  const spawner = createSpawner(slow, realEffects, false);
  t.teardown(spawner.close);
  const started = Array.from({ length: 20 }, () => start(spawner, ['/bin/true']));
  await nextTurn();
  t.equal(begun, 16);
  hung.resolve();
  for (const { ended } of await Promise.all(started)) t.match(await ended, { exitCode: 0 });
});

t.test('a command started while no file can be opened is not ended for that', async (t) => {
  stayAlive(t);
  const before = openPipes();
  const effects: Effects = {
    ...realEffects,
    after(delayMs, action) {
      openAgain();
      t.equal(openPipes(), before + 1, 'nothing is open that could do without');
      return realEffects.after(delayMs, action);
    },
  };
  const spawner = createSpawner(posix, effects, false);
  t.teardown(spawner.close);
  refuseToOpen('ENFILE');
  t.teardown(openAgain);
  const started = await start(spawner, ['sh', '-c', 'exit 3']);
  t.strictSame(await started.ended, { kind: 'exited', exitCode: 3 });
});

t.test('a command that /proc hides is not left running', async (t) => {
  const { spawner, processId } = hidingSpawner(t);
  const result = await spawner.spawn({ ...REQUEST, command: ['sleep', '1000'] });
  openAgain();
  t.match(result, { kind: 'notStarted', cause: /hidepid/ });
  t.ok(processId() > 0);
  t.teardown(() => stateOf(processId()) === undefined || process.kill(processId(), 'SIGKILL'));
  await until(() => stateOf(processId()) === undefined);
});

t.test('a command that /proc hides, and that davit may not end, is reported and reaped', async (t) => {
  const { spawner, processId } = hidingSpawner(t);
  const kill = process.kill;
  t.teardown(() => {
    process.kill = kill;
  });
  process.kill = () => {
    throw Object.assign(new Error('kill EPERM'), { code: 'EPERM' });
  };
  const result = await spawner.spawn({ ...REQUEST, command: ['sleep', '1000'] });
  openAgain();
  process.kill = kill;
  t.match(result, { kind: 'notStarted', cause: /hidepid/ });
  t.not(stateOf(processId()), undefined);
  process.kill(processId(), 'SIGKILL');
  await until(() => stateOf(processId()) === undefined);
});

/** A spawner to which /proc hides each command that it starts, until `openAgain`; and the id of the last one. */
function hidingSpawner(t: Test) {
  let processId = 0;
  const watched: typeof posix = {
    ...posix,
    async spawn(program) {
      const spawned = await posix.spawn(program);
      if ('processId' in spawned) processId = spawned.processId;
      refuseToOpen('ENOENT');
      return spawned;
    },
  };
  t.teardown(openAgain);
  const spawner = createSpawner(watched, realEffects, false);
  t.teardown(spawner.close);
  return { spawner, processId: () => processId };
}

t.test('a command that is no longer wanted at the last moment is not started', async (t) => {
  const spawner = testSpawner(t);
  const file = join(temporaryDirectory(t), 'started');
  const result = await spawner.spawn({ ...REQUEST, command: ['touch', file] }, () => false);
  t.strictSame(result, { kind: 'notStarted', cause: 'it is no longer wanted' });
  t.throws(() => readFileSync(file), { code: 'ENOENT' });
});

t.test('a closed spawner starts nothing', async (t) => {
  const spawner = testSpawner(t);
  const listeners = process.listenerCount('SIGCHLD');
  spawner.close();
  t.equal(process.listenerCount('SIGCHLD'), listeners - 1);
  t.strictSame(await spawner.spawn({ ...REQUEST, command: ['true'] }), {
    kind: 'notStarted',
    cause: 'davit is shutting down',
  });
});

function adoptingSpawner(t: Test): Spawner {
  t.equal(posix.becomeSubreaper(), true);
  t.teardown(() => koffi.load('libc.so.6').func('int prctl(int option, unsigned long value)')(36, 0));
  return testSpawner(t, true);
}

function ownScore(): number {
  return Number(readFileSync(SCORE_FILE, 'utf8'));
}

function scoreOf(processId: number): number {
  return Number(readFileSync(`/proc/${processId}/oom_score_adj`, 'utf8'));
}

async function start(
  spawner: Spawner,
  command: SpawnRequest['command'],
  changes: Partial<SpawnRequest> = {},
): Promise<StartedProcess> {
  const result = await spawner.spawn({ ...REQUEST, command, ...changes });
  if (result.kind !== 'started') throw new Error(`it was not started: ${JSON.stringify(result)}`);
  return result;
}

async function outputOf(started: StartedProcess): Promise<string> {
  const pieces: Uint8Array[] = [];
  await started.readOutput(async (bytes) => {
    pieces.push(bytes);
  }).ended;
  return Buffer.concat(pieces).toString();
}
