import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { copyFileSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Readable, Writable } from 'node:stream';
import t, { type Test } from 'tap';
import { bootId } from '../../src/boot-id.ts';
import {
  findMarked,
  isAlive,
  noIdWasReused,
  processIdentity,
  stopTree,
  terminationDisposition,
} from '../../src/deploy/processes.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import type { ProcessIdentity } from '../../src/store/deployments.ts';
import { fixture, PATH, stateOf, until } from '../helpers/commands.ts';
import { openAgain, refuseToOpen } from '../helpers/limits.ts';
import { ifMayUnshare, runInNamespace } from '../helpers/namespaces.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/** The real ones, whose timers keep this process alive, as a service's sockets do. */
const effects: Effects = {
  ...realEffects,
  after(delayMs, action) {
    const timer = setTimeout(action, delayMs);
    return () => clearTimeout(timer);
  },
};

t.test('a process is known by its id, its start and the boot', async (t) => {
  const { child, identity } = await start(t, ['sleep', '1000']);
  t.equal(identity.processId, child.pid);
  t.equal(identity.bootId, bootId());
  t.ok(isAlive(identity));
  t.notOk(
    isAlive({ ...identity, processStartedAt: identity.processStartedAt - 1 }),
    'an id that was given again',
  );
  t.notOk(isAlive({ ...identity, bootId: 'b7e3bd5c-0000-4000-8000-000000000000' }), 'an id of another boot');
  child.kill('SIGKILL');
  await once(child, 'exit');
  t.notOk(isAlive(identity));
  t.equal(processIdentity(identity.processId), undefined);
});

t.test('a process that nobody has waited for has exited', async (t) => {
  const parent = spawn('sh', ['-c', 'cat <&3 & echo $!; exec sleep 1000'], {
    stdio: ['ignore', 'pipe', 'inherit', 'pipe'],
  });
  t.teardown(() => parent.kill('SIGKILL'));
  const [, output, , toChild] = parent.stdio;
  const [line] = await once(output as Readable, 'data');
  const processId = Number(line);
  // A shell would wait for its child; what it has become does not.
  await until(() => readFileSync(`/proc/${parent.pid}/comm`, 'utf8') === 'sleep\n');
  (toChild as Writable).end();
  await until(() => stateOf(processId) === 'Z');
  const identity = processIdentity(processId);
  t.ok(identity);
  t.notOk(identity && isAlive(identity));
  t.equal(identity && terminationDisposition(identity), 'gone');
});

t.test('a program may be called anything', async (t) => {
  const file = join(temporaryDirectory(t), 'a) R 1 (b c');
  copyFileSync('/bin/sleep', file);
  const { identity } = await start(t, [file, '1000']);
  const { identity: later } = await start(t, ['sleep', '1000']);
  t.ok(identity.processStartedAt > 0);
  t.ok(identity.processStartedAt <= later.processStartedAt);
  t.ok(isAlive(identity));
});

t.test('what SIGTERM would do is known', async (t) => {
  const deploymentId = newDeploymentId();
  const plain = await start(t, ['sleep', '1000'], deploymentId);
  t.equal(terminationDisposition(plain.identity), 'default');
  const ignoring = await start(t, [fixture('ignores-sigterm')], deploymentId);
  await once(ignoring.output, 'data');
  t.equal(terminationDisposition(ignoring.identity), 'ignored');
  const catching = await start(t, [fixture('tidies-up')], deploymentId);
  await once(catching.output, 'data');
  t.equal(terminationDisposition(catching.identity), 'caught');
  t.equal(terminationDisposition({ ...plain.identity, processStartedAt: 1 }), 'gone');
  await stopTree({ deploymentId, leader: undefined }, { graceMs: () => 0, effects });
});

t.test('one pass finds the processes of many deployments, and no others', async (t) => {
  const [one, two, three] = [newDeploymentId(), newDeploymentId(), newDeploymentId()];
  const first = await start(t, ['sleep', '1000'], one);
  const second = await start(t, ['sleep', '1000'], two);
  const again = await start(t, ['sleep', '1000'], two);
  await start(t, ['sleep', '1000'], `${one}0`);
  await start(t, ['sleep', '1000'], undefined, { MY_DEPLOY_ID: one, NOTE: `DEPLOY_ID=${one}` });
  const found = await findMarked(new Set([one, two, three]));
  t.strictSame([...found.keys()].sort(), [one, two].sort());
  t.strictSame(found.get(one), [first.identity]);
  // In the order of their ids, which begin anew now and then.
  t.strictSame(new Set(found.get(two)), new Set([second.identity, again.identity]));
});

t.test('a marker is found in a large environment', async (t) => {
  const deploymentId = newDeploymentId();
  const { identity } = await start(t, ['sleep', '1000'], undefined, {
    LARGE: 'x'.repeat(100_000),
    DEPLOY_ID: deploymentId,
  });
  t.strictSame((await findMarked(new Set([deploymentId]))).get(deploymentId), [identity]);
});

t.test('stopping without a leader ends whatever carries the marker', async (t) => {
  const deploymentId = newDeploymentId();
  const one = await start(t, ['sleep', '1000'], deploymentId);
  const other = await start(t, [fixture('ignores-sigterm')], deploymentId);
  await once(other.output, 'data');
  const stranger = await start(t, ['sleep', '1000'], newDeploymentId());
  t.equal(await stopTree({ deploymentId, leader: undefined }, { graceMs: () => 50, effects }), 'gone');
  t.notOk(isAlive(one.identity));
  t.notOk(isAlive(other.identity));
  t.ok(isAlive(stranger.identity));
});

t.test('stopping a leader ends its session and its descendants, marked or not', ifHas('ps'), async (t) => {
  const script = 'setsid sleep 1000 & sleep 1000 & echo ready; wait';
  const leader = await start(t, ['sh', '-c', script]);
  await once(leader.output, 'data');
  const children = await descendantsOf(leader.identity);
  t.equal(children.length, 2);
  const disposition = await stopTree(
    { deploymentId: newDeploymentId(), leader: leader.identity },
    { graceMs: () => 10_000, effects },
  );
  t.equal(disposition, 'default');
  t.notOk(isAlive(leader.identity));
  t.notOk(children.some(isAlive));
});

t.test('a stranger who was given the id of a leader is left alone', async (t) => {
  const stranger = await start(t, ['sleep', '1000']);
  const leader = { ...stranger.identity, processStartedAt: stranger.identity.processStartedAt - 1 };
  t.equal(await stopTree({ deploymentId: newDeploymentId(), leader }, { graceMs: () => 0, effects }), 'gone');
  t.ok(isAlive(stranger.identity));
});

t.test('what ran before the machine was booted again is not looked for', async (t) => {
  const deploymentId = newDeploymentId();
  const { identity } = await start(t, ['sleep', '1000'], deploymentId);
  const leader = { ...identity, bootId: 'b7e3bd5c-0000-4000-8000-000000000000' };
  t.equal(await stopTree({ deploymentId, leader }, { graceMs: () => 0, effects }), 'gone');
  t.ok(isAlive(identity));
});

t.test('what a leader left that exited by itself may be spared', async (t) => {
  const deploymentId = newDeploymentId();
  const { child, identity: leader } = await start(t, ['sleep', '0'], deploymentId);
  const daemon = await start(t, ['sleep', '1000'], deploymentId);
  if (child.exitCode === null) await once(child, 'exit');
  const tree = { deploymentId, leader };
  t.equal(await stopTree(tree, { graceMs: () => 0, effects, spareWhenExited: true }), 'gone');
  t.ok(isAlive(daemon.identity));
  t.equal(await stopTree(tree, { graceMs: () => 0, effects }), 'gone');
  t.notOk(isAlive(daemon.identity));
});

t.test('what a dead leader left in its session is found with whoever is marked there', async (t) => {
  const deploymentId = newDeploymentId();
  const script = 'env -i sleep 1000 & echo $!; sleep 1000 & echo $!';
  const left = await leftBy(t, ['sh', '-c', script], deploymentId);
  const tree = { deploymentId, leader: left.leader };
  t.equal(await stopTree(tree, { graceMs: () => 10_000, effects }), 'gone');
  t.strictSame(left.processes.map(isAlive), [false, false]);
});

t.test(
  'and without anybody marked, as long as no id can be another’s',
  noIdWasReused() ? {} : { skip: 'ids were given out again since the machine was booted' },
  async (t) => {
    const left = await leftBy(t, ['sh', '-c', 'env -i sleep 1000 & echo $!'], newDeploymentId());
    const tree = { deploymentId: newDeploymentId(), leader: left.leader };
    t.equal(await stopTree(tree, { graceMs: () => 10_000, effects }), 'gone');
    t.strictSame(left.processes.map(isAlive), [false]);
  },
);

t.test('nobody of a PID namespace that is younger than the command is its own', ifMayUnshare, async (t) => {
  const source = join(import.meta.dirname, '../../src');
  // A session whose leader has ended, with the number that the command had in the namespace before.
  const script = `
    set -- $(setsid sh -c 'sleep 600 >/dev/null & echo $$ $!')
    "$0" --input-type=module --eval "$PROGRAM" "$1"
    kill -0 "$2" && echo lives`;
  const program = `
    const { bootId } = await import('${source}/boot-id.ts');
    const { stopTree } = await import('${source}/deploy/processes.ts');
    const { realEffects } = await import('${source}/effects.ts');
    const leader = { processId: Number(process.argv[1]), processStartedAt: 1, bootId: bootId() };
    const alive = setInterval(() => undefined, 1_000);
    console.log(await stopTree({ deploymentId: 'dpl_1', leader }, { graceMs: () => 0, effects: realEffects }));
    clearInterval(alive);`;
  const words = ['env', `PROGRAM=${program}`, 'sh', '-c', script, process.execPath];
  t.match(runInNamespace(...words), { status: 0, stdout: 'gone\nlives\n', stderr: '' });
});

t.test('processes that cannot be ended are told once, and waited for', async (t) => {
  const deploymentId = newDeploymentId();
  const { identity } = await start(t, ['sleep', '1000'], deploymentId);
  const { kill } = process;
  let refusals = 0;
  // As the kernel answers where a command became another user.
  const intercepted = t.intercept(process, 'kill', {
    value() {
      refusals += 1;
      throw Object.assign(new Error('kill EPERM'), { code: 'EPERM' });
    },
  });
  const told: number[][] = [];
  const heard = Promise.withResolvers<void>();
  const hurried: Effects = { ...effects, after: (_delayMs, action) => effects.after(0, action) };
  const stopped = stopTree(
    { deploymentId, leader: identity },
    {
      graceMs: () => 0,
      effects: hurried,
      onStuck(processIds) {
        told.push(processIds);
        heard.resolve();
      },
    },
  );
  await heard.promise;
  const refusalsBefore = refusals;
  await until(() => refusals > refusalsBefore + 10);
  t.ok(isAlive(identity));
  intercepted.restore();
  kill.call(process, identity.processId, 'SIGKILL');
  t.equal(await stopped, 'default');
  t.strictSame(told, [[identity.processId]]);
});

/** One at the first look, one at SIGTERM, one at SIGKILL: each tells two or more of the tree. */
const SHORTAGES = 5;

for (const code of ['ENFILE', 'ENOMEM'] as const) {
  t.test(`a tree is ended however often the machine has no file or memory for a look: ${code}`, async (t) => {
    const deploymentId = newDeploymentId();
    const leader = await start(t, [fixture('ignores-sigterm')], deploymentId);
    await once(leader.output, 'data');
    const other = await start(t, ['sleep', '1000'], deploymentId);
    t.teardown(openAgain);
    let shortages = 0;
    const runShort = () => {
      if (shortages === SHORTAGES) return;
      shortages += 1;
      refuseToOpen(code);
    };
    // It is over when somebody has waited for that, and comes back as soon as somebody was signaled.
    const { kill } = process;
    t.intercept(process, 'kill', {
      value(target: number, signal: NodeJS.Signals) {
        runShort();
        return kill.call(process, target, signal);
      },
    });
    const fickle: Effects = {
      ...effects,
      after(delayMs, action) {
        openAgain();
        return effects.after(delayMs, action);
      },
    };
    runShort();
    const tree = { deploymentId, leader: leader.identity };
    t.equal(await stopTree(tree, { graceMs: () => 50, effects: fickle }), 'ignored');
    t.equal(shortages, SHORTAGES);
    t.notOk(isAlive(leader.identity));
    t.notOk(isAlive(other.identity));
  });
}

t.test('trees that are ended together share what is read of the machine’s processes', async (t) => {
  const trees = [];
  for (let number = 0; number < 32; number++) {
    const deploymentId = newDeploymentId();
    const { identity: leader } = await start(t, ['sleep', '1000'], deploymentId);
    trees.push({ deploymentId, leader });
  }
  const processes = readdirSync('/proc').filter((name) => /^[0-9]+$/.test(name)).length;
  const readsBefore = readCalls();
  await Promise.all(trees.map((tree) => stopTree(tree, { graceMs: () => 10_000, effects })));
  const reads = readCalls() - readsBefore;
  t.notOk(trees.some(({ leader }) => isAlive(leader)));
  // Each for itself makes three passes, in which it reads a file of each process.
  t.ok(reads < trees.length * processes, `${reads} reads for ${processes} processes`);
});

let lastDeployment = 0;

function newDeploymentId(): string {
  lastDeployment += 1;
  return `dpl_process${process.pid}x${lastDeployment}`;
}

/** How often this process has called read(2) and the like. */
function readCalls(): number {
  return Number(/^syscr: (\d+)$/m.exec(readFileSync('/proc/self/io', 'latin1'))?.[1]);
}

interface Started {
  child: ChildProcess;
  identity: ProcessIdentity;
  output: NodeJS.ReadableStream;
}

/** A process in a session of its own, as the spawner starts them; ended with the test. */
async function start(
  t: Test,
  [file, ...rest]: [string, ...string[]],
  deploymentId?: string,
  variables: Record<string, string> = {},
): Promise<Started> {
  const child = spawn(file, rest, {
    env: { PATH, ...variables, ...(deploymentId === undefined ? {} : { DEPLOY_ID: deploymentId }) },
    stdio: ['ignore', 'pipe', 'inherit'],
    detached: true,
  });
  const identity = processIdentity(child.pid ?? 0);
  if (identity === undefined) throw new Error(`${file} was not started`);
  t.teardown(() => child.kill('SIGKILL'));
  return { child, identity, output: child.stdout };
}

/** As ps tells it, so that the code under test does not judge itself. */
async function descendantsOf({ processId }: ProcessIdentity): Promise<ProcessIdentity[]> {
  const ps = spawn('ps', ['-o', 'pid=', '--ppid', String(processId)], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const text = (await ps.stdout.toArray()).join('');
  return text
    .split('\n')
    .map((line) => processIdentity(Number(line)))
    .filter((identity) => identity !== undefined);
}

/** What a command left running, which prints the ids of it and ends. */
async function leftBy(t: Test, command: [string, ...string[]], deploymentId: string) {
  const { child, identity: leader, output } = await start(t, command, deploymentId);
  let text = '';
  output.on('data', (bytes: Buffer) => {
    text += bytes.toString();
  });
  if (child.exitCode === null) await once(child, 'exit');
  await until(() => text.endsWith('\n'));
  const processes = text
    .trim()
    .split('\n')
    .map((id) => processIdentity(Number(id)))
    .filter((identity) => identity !== undefined);
  for (const { processId } of processes) t.teardown(() => signalIfThere(processId));
  return { leader, processes };
}

function signalIfThere(processId: number): void {
  try {
    process.kill(processId, 'SIGKILL');
  } catch {
    // It is gone, as it should be.
  }
}
