import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { readFile, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import { readOutputs } from '../../src/deploy/outputs.ts';
import { run, type StopRequest } from '../../src/deploy/run.ts';
import type { Spawner } from '../../src/deploy/spawner.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { isAlive, processIdentity } from '../../src/process-identity.ts';
import {
  fixture,
  marked,
  namedPipe,
  openPipes,
  PATH,
  startRun,
  stateOf,
  testSpawner,
  until,
} from '../helpers/commands.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const spawner = testSpawner(t);

t.test('the outcome of a command that exits has its exit code', async (t) => {
  t.strictSame(await startRun(t, spawner, ['true']).outcome, { kind: 'exited', exitCode: 0 });
  t.strictSame(await startRun(t, spawner, ['sh', '-c', 'exit 143']).outcome, {
    kind: 'exited',
    exitCode: 143,
  });
});

t.test('the outcome of a command that a signal ends has the signal', async (t) => {
  t.strictSame(await startRun(t, spawner, ['sh', '-c', 'kill -SEGV $$']).outcome, {
    kind: 'signalled',
    signal: 'SIGSEGV',
  });
  t.strictSame(await startRun(t, spawner, ['sh', '-c', 'kill -TERM $$']).outcome, {
    kind: 'signalled',
    signal: 'SIGTERM',
  });
});

t.test('a command that a signal ends leaves no process behind, in its session or not', async (t) => {
  const script = 'sleep 1000 & setsid sleep 1000 & kill -KILL $$';
  const command = startRun(t, spawner, ['sh', '-c', script]);
  t.strictSame(await command.outcome, { kind: 'signalled', signal: 'SIGKILL' });
  t.strictSame(await marked(command.deploymentId), []);
});

t.test('nor one of its session without its environment, also where ids were reused', async (t) => {
  // It has no environment by the time it kills the command: before that it would be found by its marker.
  const script = 'env -i sh -c "echo \\$\\$; kill -KILL $$; exec sleep 1000" & wait';
  const command = startRun(t, spawner, ['sh', '-c', script]);
  t.strictSame(await command.outcome, { kind: 'signalled', signal: 'SIGKILL' });
  const left = processIdentity(Number(command.output()));
  t.notOk(left !== undefined && isAlive(left) && process.kill(left.processId));
});

t.test('stdout and stderr are logged in their true order', async (t) => {
  const command = startRun(t, spawner, [fixture('alternates')]);
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  const expected = Array.from({ length: 500 }, (_, number) => `out ${number}\nerr ${number}\n`).join('');
  t.equal(command.output(), expected);
});

t.test('/dev/stdout, /dev/stderr and tee work', async (t) => {
  const command = startRun(t, spawner, [fixture('reopens')]);
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  t.equal(command.output(), 'one\ntwo\nthree\nfour\n');
});

t.test('/dev/stdout and /dev/stderr work for another user', ifMayBeNobody(), async (t) => {
  const script = 'echo one >/dev/stdout; echo two >/dev/stderr';
  const command = startRun(t, spawner, [
    'setpriv',
    '--reuid=65534',
    '--regid=65534',
    '--clear-groups',
    'sh',
    '-c',
    script,
  ]);
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  t.equal(command.output(), 'one\ntwo\n');
});

t.test('output arrives byte for byte, without a newline or valid UTF-8', async (t) => {
  const command = startRun(t, spawner, ['printf', String.raw`\377\376\000end`]);
  await command.outcome;
  t.strictSame(command.outputBytes(), Buffer.from([0xff, 0xfe, 0, 0x65, 0x6e, 0x64]));
});

t.test('a command has its own session and group, no input, and exactly the given environment', async (t) => {
  const variables = { PATH, GREETING: 'a "b"\n$c' };
  const command = startRun(t, spawner, ['cat', '-', '/proc/self/stat', '/proc/self/environ'], {
    environment: Object.fromEntries([...Object.entries(variables), ['__proto__', 'own']]),
  });
  const { processId } = await command.started;
  await command.outcome;
  const [stat = '', ...rest] = command.output().split(/(?<=\n)/);
  t.match(stat, new RegExp(`^${processId} \\(cat\\) R \\d+ ${processId} ${processId} `));
  t.strictSame(
    rest.join('').split('\0').sort(),
    ['', `DEPLOY_ID=${command.deploymentId}`, 'GREETING=a "b"\n$c', `PATH=${PATH}`, '__proto__=own'].sort(),
  );
});

t.test('a command that cannot be started gives the cause', async (t) => {
  const attempt = startRun(t, spawner, ['/no/such/command']);
  t.strictSame(await attempt.outcome, {
    kind: 'notStarted',
    cause: 'the command /no/such/command does not exist',
  });
  t.equal(attempt.output(), '');
});

t.test('a command that a user stops is canceled', async (t) => {
  const command = startRun(t, spawner, ['sleep', '1000']);
  await command.started;
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
});

t.test('the first reason to stop decides the outcome', async (t) => {
  const command = startRun(t, spawner, [fixture('tidies-up')], { timeoutMs: 60_000 });
  await command.printed('ready');
  command.stop('shutdown');
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'interrupted' });
});

t.test('a command stopped while it waits to start is not started', async (t) => {
  const free = Promise.withResolvers<void>();
  const busy: Spawner = {
    ...spawner,
    async spawn(request, isWanted) {
      await free.promise;
      return spawner.spawn(request, isWanted);
    },
  };
  const command = startRun(t, busy, ['sh', '-c', 'echo started']);
  command.stop('user');
  free.resolve();
  t.strictSame(await command.outcome, { kind: 'canceled' });
  t.equal(command.output(), '');
});

t.test('a command that cannot be started and was stopped meanwhile is canceled', async (t) => {
  const missing = startRun(t, spawner, ['/no/such/command']);
  missing.stop('user');
  missing.stop('shutdown');
  t.strictSame(await missing.outcome, { kind: 'canceled' }, 'the first reason decides');
});

t.test('a command stopped while it is being started is stopped once started', async (t) => {
  const asked = Promise.withResolvers<void>();
  const answered = Promise.withResolvers<void>();
  const slow: Spawner = {
    ...spawner,
    async spawn(request, isWanted) {
      const spawned = await spawner.spawn(request, isWanted);
      asked.resolve();
      await answered.promise;
      return spawned;
    },
  };
  const command = startRun(t, slow, ['sleep', '1000']);
  await asked.promise;
  command.stop('user');
  answered.resolve();
  t.strictSame(await command.outcome, { kind: 'canceled' });
});

t.test('a command that exceeds its timeout is stopped', async (t) => {
  const command = startRun(t, spawner, ['sleep', '1000'], { timeoutMs: 20 });
  t.strictSame(await command.outcome, { kind: 'timedOut' });
});

t.test('a command silent for the idle timeout is stopped, and one that prints is not', async (t) => {
  const silent = startRun(t, spawner, ['sh', '-c', 'echo one; sleep 1000'], {
    idleTimeoutMs: 50,
    effects: standingUntil(() => silent.output() !== ''), // a busy machine may take longer to start it
  });
  t.strictSame(await silent.outcome, { kind: 'idleTimedOut' });
  t.equal(silent.output(), 'one\n');

  let nowMs = 0;
  const talking = startRun(
    t,
    spawner,
    ['sh', '-c', 'for i in 1 2 3 4 5 6 7 8; do sleep 0.2; echo $i; done'],
    {
      idleTimeoutMs: 1_400,
      // By this clock it prints once a second, however long it takes.
      effects: { ...realEffects, monotonicMs: () => nowMs },
      async onOutput() {
        nowMs += 1_000;
      },
    },
  );
  t.strictSame(await talking.outcome, { kind: 'exited', exitCode: 0 });
  t.ok(nowMs > 1_400);
});

t.test('a command that printed while davit itself was delayed is not idle', async (t) => {
  let delayedMs = 0;
  const later = join(temporaryDirectory(t), 'later');
  const script =
    'for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.1; done; echo more; echo >"$LATER"; sleep 1';
  const command = startRun(t, spawner, ['sh', '-c', script], {
    environment: { PATH, LATER: later },
    idleTimeoutMs: 500,
    effects: { ...realEffects, monotonicMs: () => delayedMs },
  });
  // After the first look at how long it was silent.
  await command.printed('8');
  await nextTurn();
  realEffects.block(700);
  while (!existsSync(later)) realEffects.block(10);
  delayedMs = 700;
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
});

t.test('a command blocked on its output is not idle', async (t) => {
  const gate = namedPipe(t);
  const idleTimeoutMs = 200;
  const taken = Promise.withResolvers<void>();
  let offeredAtMs = Number.POSITIVE_INFINITY;
  const effects = standingUntil(() => offeredAtMs < Number.POSITIVE_INFINITY);
  const command = startRun(t, spawner, ['sh', '-c', 'echo one; read line <"$GATE"'], {
    environment: { PATH, GATE: gate },
    idleTimeoutMs,
    effects,
    onOutput() {
      offeredAtMs = effects.monotonicMs();
      return taken.promise;
    },
  });
  const { processId } = await command.started;
  await until(() => effects.monotonicMs() > offeredAtMs + 2 * idleTimeoutMs);
  await writeFile(gate, 'go\n');
  await until(() => processIdentity(processId) === undefined);
  taken.resolve();
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
});

/** Real effects with a monotonic clock that begins to go once this holds. */
function standingUntil(holds: () => boolean): Effects {
  let beganAtMs: number | undefined;
  return {
    ...realEffects,
    monotonicMs() {
      if (beganAtMs === undefined && holds()) beganAtMs = realEffects.monotonicMs();
      return beganAtMs === undefined ? 0 : realEffects.monotonicMs() - beganAtMs;
    },
  };
}

t.test('a command that ignores SIGTERM gets SIGKILL after the grace', async (t) => {
  const command = startRun(t, spawner, [fixture('ignores-sigterm')], { killGraceMs: 100 });
  const leader = await command.started;
  await command.printed('ready');
  const stoppedAtMs = realEffects.monotonicMs();
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
  t.ok(realEffects.monotonicMs() - stoppedAtMs >= 100);
  t.notOk(isAlive(leader));
});

t.test('a command that ignores SIGTERM and exits with 0 has succeeded', async (t) => {
  const gate = namedPipe(t);
  const command = startRun(t, spawner, [fixture('finishes-anyway')], { environment: { PATH, GATE: gate } });
  await command.printed('ready');
  command.stop('user');
  await writeFile(gate, 'well\n');
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  t.equal(command.output(), 'ready\nfinished well\n');
});

t.test('a command that ignores SIGTERM and fails is canceled', async (t) => {
  const gate = namedPipe(t);
  const script = `trap '' TERM; echo ready; read line <"$GATE"; exit 3`;
  const command = startRun(t, spawner, ['sh', '-c', script], { environment: { PATH, GATE: gate } });
  await command.printed('ready');
  // It goes on once it was told to end, and not before.
  t.intercept(process, 'kill', {
    value(_target: number, signal: string) {
      if (signal === 'SIGTERM') writeFileSync(gate, 'go\n');
    },
  });
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
});

t.test('a command that finishes just before SIGTERM arrives has succeeded', async (t) => {
  const gate = namedPipe(t);
  const command = startRun(t, spawner, ['sh', '-c', 'echo ready; exec cat "$GATE"'], {
    environment: { PATH, GATE: gate },
  });
  const { processId } = await command.started;
  await command.printed('ready');
  await until(() => readFileSync(`/proc/${processId}/comm`, 'latin1') === 'cat\n');
  // The command is over before the signal arrives.
  t.intercept(process, 'kill', {
    value(_target: number, signal: string) {
      if (signal === 'SIGTERM') writeFileSync(gate, '');
    },
  });
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
});

t.test('a stop of the service waits 2 s for a command, whatever its own grace is', async (t) => {
  await t.test('that runs', (t) => stopsIn2Seconds(t, []));
  await t.test('that is being canceled', (t) => stopsIn2Seconds(t, ['user']));
});

async function stopsIn2Seconds(t: Test, before: readonly StopRequest[]): Promise<void> {
  const speed = 100;
  const effects: Effects = {
    ...realEffects,
    monotonicMs: () => realEffects.monotonicMs() * speed,
    after: (delayMs, action) => realEffects.after(delayMs / speed, action),
  };
  const ready = Promise.withResolvers<void>();
  const killGraceMs = 60 * 60_000;
  const { outcome, stop } = run(
    {
      ...REQUEST,
      environment: { PATH, DEPLOY_ID: `dpl_stop${process.pid}_${before.length}` },
      command: [fixture('ignores-sigterm')],
      killGraceMs,
    },
    { spawner, effects, onStarted() {}, onOutput: async () => ready.resolve() },
  );
  await ready.promise;
  for (const cause of before) stop(cause);
  await nextTurn();
  const stoppedAtMs = effects.monotonicMs();
  stop('shutdown');
  t.strictSame(await outcome, { kind: before.length > 0 ? 'canceled' : 'interrupted' });
  const stoppedForMs = effects.monotonicMs() - stoppedAtMs;
  t.ok(stoppedForMs >= 2_000 && stoppedForMs < killGraceMs, `${stoppedForMs} ms`);
}

t.test('a command that catches SIGTERM may clean up, and is canceled', async (t) => {
  const command = startRun(t, spawner, [fixture('tidies-up')]);
  await command.printed('ready');
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
  t.equal(command.output(), 'ready\ntidied up\n');
});

t.test(
  'a command that waits for SIGTERM is canceled by it, like one that traps it',
  ifHas('perl'),
  async (t) => {
    const waits =
      'use POSIX; my ($set, $pending) = (POSIX::SigSet->new(SIGTERM), POSIX::SigSet->new); sigprocmask(SIG_BLOCK, $set); ' +
      '$| = 1; print "ready\\n"; do { select undef, undef, undef, 0.01; sigpending($pending) } until $pending->ismember(SIGTERM)';
    const command = startRun(t, spawner, ['perl', '-e', waits]);
    await command.printed('ready');
    command.stop('user');
    t.strictSame(await command.outcome, { kind: 'canceled' });
  },
);

t.test('a process that ptraces the command and withholds its exit is ended', ifHas('python3'), async (t) => {
  const PTRACE_SEIZE = 0x4206;
  const traces = `import ctypes, os, time
me, (reader, writer) = os.getpid(), os.pipe()
if os.fork() == 0:
    os.setsid()
    print("seized" if ctypes.CDLL(None).ptrace(${PTRACE_SEIZE}, me, 0, 0) == 0 else "refused", flush=True)
    os.close(writer)
    time.sleep(1000)
os.close(writer)
os.read(reader, 1)
os._exit(0)`;
  const command = startRun(t, spawner, ['python3', '-c', traces]);
  const { processId } = await command.started;
  await command.printed('\n');
  if (command.output() === 'refused\n') t.comment('tracing is not allowed here');
  else await until(() => stateOf(processId) === 'Z');
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  t.strictSame(await marked(command.deploymentId), []);
});

t.test('stopping ends a process whose main thread has exited', ifHas('python3'), async (t) => {
  const command = startRun(t, spawner, [
    'sh',
    '-c',
    `setsid -f python3 -c 'import ctypes, os, threading, time
threading.Thread(target=lambda: (print(os.getpid(), flush=True), time.sleep(1000))).start()
ctypes.CDLL(None).pthread_exit(0)'
sleep 1000`,
  ]);
  await command.printed('\n');
  const processId = Number(command.output());
  await until(() => stateOf(processId) === 'Z');
  const runaway = processIdentity(processId);
  t.ok(runaway !== undefined && isAlive(runaway));
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
  t.ok(runaway !== undefined && !isAlive(runaway));
});

t.test('a command that has ended can no longer be canceled', async (t) => {
  const held = Promise.withResolvers<void>();
  const command = startRun(t, spawner, ['sh', '-c', 'echo done'], { onOutput: () => held.promise });
  const { processId } = await command.started;
  await until(() => processIdentity(processId) === undefined);
  command.stop('user');
  held.resolve();
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
});

t.test('a stop before the exit is reported changes no outcome and spares the daemon', async (t) => {
  const told = Promise.withResolvers<void>();
  const slow: Spawner = {
    ...spawner,
    async spawn(request, isWanted) {
      const spawned = await spawner.spawn(request, isWanted);
      if (spawned.kind !== 'started') return spawned;
      return { ...spawned, ended: told.promise.then(() => spawned.ended) };
    },
  };
  const command = startRun(t, slow, ['sh', '-c', 'sleep 1000 >/dev/null 2>&1 & echo $!']);
  const { processId } = await command.started;
  await until(() => stateOf(processId) === undefined);
  command.stop('user');
  told.resolve();
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  const [daemon] = await marked(command.deploymentId);
  t.equal(command.output(), `${daemon?.processId}\n`);
  process.kill(Number(command.output()), 'SIGKILL');
  await until(() => daemon !== undefined && !isAlive(daemon));
});

t.test('a suspended command gets its SIGTERM when stopped', async (t) => {
  const command = startRun(t, spawner, ['sh', '-c', `trap 'echo woken; exit 1' TERM; kill -STOP $$`]);
  const { processId } = await command.started;
  await until(() => stateOf(processId) === 'T');
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
  t.equal(command.output(), 'woken\n');
});

t.test('stopping ends processes that left the group, the session and the environment', async (t) => {
  // How long they sleep is what they are known by.
  const seconds = `1000.${process.pid}`;
  const command = startRun(t, spawner, [fixture('scatters')], {
    environment: { PATH, SECONDS_TO_SLEEP: seconds },
    killGraceMs: 500,
  });
  await until(() => sleepers(seconds).length === 8);
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
  t.strictSame(sleepers(seconds), []);
});

t.test('stopping ends processes that keep forking to escape it', async (t) => {
  const command = startRun(t, spawner, [fixture('runs-away')], { killGraceMs: 0 });
  await command.printed('ready');
  command.stop('user');
  t.strictSame(await command.outcome, { kind: 'canceled' });
  t.strictSame(await marked(command.deploymentId), []);
});

t.test('a daemon left by a command lives on, also if it prints', async (t) => {
  const gate = namedPipe(t);
  const report = namedPipe(t);
  const command = startRun(t, spawner, [fixture('leaves-a-daemon')], {
    environment: { PATH, GATE: gate, REPORT: report },
  });
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  const [daemon] = await marked(command.deploymentId);
  t.equal(command.output(), `daemon ${daemon?.processId}\n`);
  const told = readFile(report, 'utf8');
  await writeFile(gate, 'line\n');
  t.equal(await told, 'survived\n');
  t.equal(
    command.output(),
    `daemon ${daemon?.processId}\n`,
    'but not into the log of a command that is over',
  );
  await until(() => daemon !== undefined && !isAlive(daemon));
});

t.test('what a child of the command prints at its end is in the log', async (t) => {
  const gate = namedPipe(t);
  const report = namedPipe(t);
  const command = startRun(t, spawner, [fixture('leaves-a-daemon')], {
    environment: { PATH, GATE: gate, REPORT: report },
  });
  const { processId } = await command.started;
  await until(() => processIdentity(processId) === undefined);
  const told = readFile(report, 'utf8');
  await writeFile(gate, 'line\n');
  t.equal(await told, 'survived\n');
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  t.match(command.output(), /^daemon \d+\nlate line\nlater line\n$/);
});

t.test('a command that floods its output is slowed down and costs little memory', async (t) => {
  const bytes = 400_000_000;
  let received = 0;
  let largest = 0;
  const before = process.memoryUsage().rss;
  let peak = before;
  const command = startRun(t, spawner, ['head', '-c', String(bytes), '/dev/zero'], {
    async onOutput(piece) {
      received += piece.length;
      largest = Math.max(largest, piece.length);
      peak = Math.max(peak, process.memoryUsage.rss());
    },
  });
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  t.equal(received, bytes);
  t.ok(largest <= 128 * 1024, `largest piece ${largest}`);
  t.ok(peak - before < 150_000_000, `grew by ${peak - before}`);
});

t.test('a command blocks while its output is not taken', async (t) => {
  const taken = Promise.withResolvers<void>();
  let pieces = 0;
  const command = startRun(t, spawner, ['yes'], {
    onOutput() {
      pieces += 1;
      return taken.promise;
    },
  });
  const { processId } = await command.started;
  await until(() => pieces > 0 && readFileSync(`/proc/${processId}/wchan`, 'latin1').includes('pipe'));
  t.equal(pieces, 1);
  command.stop('user');
  taken.resolve();
  t.strictSame(await command.outcome, { kind: 'canceled' });
});

t.test('of 10,000 outputs 100 are kept, with at most 11 notes', async (t) => {
  const file = `${temporaryDirectory(t)}/outputs`;
  const command = startRun(t, spawner, [fixture('writes-outputs')], {
    environment: { PATH, DEPLOY_OUTPUT: file },
  });
  t.strictSame(await command.outcome, { kind: 'exited', exitCode: 0 });
  const { outputs, notes } = readOutputs(file, []);
  t.equal(Object.keys(outputs).length, 100);
  t.equal(outputs['name_99'], 'value 99');
  t.ok(notes.length <= 11);
});

t.test('a command whose output cannot be recorded is stopped, and the run fails', async (t) => {
  const deploymentId = `dpl_full${process.pid}`;
  const { outcome } = run(
    { ...REQUEST, environment: { PATH, DEPLOY_ID: deploymentId }, command: ['yes'] },
    {
      spawner,
      effects: realEffects,
      onStarted: async () => undefined,
      onOutput: async () => {
        throw new Error('the disk is full');
      },
    },
  );
  await t.rejects(outcome, { message: 'the disk is full' });
  t.strictSame(await marked(deploymentId), []);
});

t.test('a finished run leaves no timer behind', async (t) => {
  const timers = new Set<object>();
  const effects: Effects = {
    ...realEffects,
    after(delayMs, action) {
      const timer = {};
      timers.add(timer);
      const cancel = realEffects.after(delayMs, () => {
        timers.delete(timer);
        action();
      });
      return () => {
        timers.delete(timer);
        cancel();
      };
    },
  };
  const { outcome } = run(
    {
      ...REQUEST,
      environment: { PATH, DEPLOY_ID: 'dpl_timers' },
      command: ['true'],
      timeoutMs: 60_000,
      idleTimeoutMs: 60_000,
    },
    { spawner, effects, onStarted() {}, onOutput: async () => undefined },
  );
  await outcome;
  t.equal(timers.size, 0);
});

t.test('40 runs leave no pipe open', async (t) => {
  const before = openPipes();
  for (let number = 0; number < 40; number++) await startRun(t, spawner, ['true']).outcome;
  // One that was watched is closed a turn of the event loop later.
  await until(() => openPipes() <= before);
});

const REQUEST = {
  directory: '/',
  timeoutMs: null,
  idleTimeoutMs: null,
  killGraceMs: 10_000,
};

function sleepers(seconds: string): string[] {
  return readdirSync('/proc').filter((name) => commandLineOf(name) === `sleep\0${seconds}\0`);
}

function commandLineOf(processId: string): string {
  try {
    return readFileSync(`/proc/${processId}/cmdline`, 'latin1');
  } catch {
    return '';
  }
}
