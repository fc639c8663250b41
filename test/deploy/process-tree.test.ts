import { spawn } from 'node:child_process';
import { once } from 'node:events';
import fs from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { text } from 'node:stream/consumers';
import t, { type Test } from 'tap';
import { noIdWasReused, stopTree } from '../../src/deploy/process-tree.ts';
import { signal } from '../../src/deploy/signals.ts';
import { type Effects, realEffects as effects } from '../../src/effects.ts';
import { isAlive, type ProcessIdentity, processIdentity, readStat } from '../../src/process-identity.ts';
import { fixture, newDeploymentId, until } from '../helpers/commands.ts';
import { openAgain, refuseToOpen } from '../helpers/limits.ts';
import { startProcess } from '../helpers/marked-processes.ts';
import { ifMayUnshare, runInNamespace } from '../helpers/namespaces.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('stopping without a leader ends every process that carries the marker', async (t) => {
  const deploymentId = newDeploymentId();
  const one = await startProcess(t, ['sleep', '1000'], deploymentId);
  const other = await startProcess(t, [fixture('ignores-sigterm')], deploymentId);
  await once(other.output, 'data');
  const stranger = await startProcess(t, ['sleep', '1000'], newDeploymentId());
  t.equal(await stopTree({ deploymentId, leader: undefined }, { graceMs: () => 50, effects }), 'gone');
  t.notOk(isAlive(one.identity));
  t.notOk(isAlive(other.identity));
  t.ok(isAlive(stranger.identity));
});

t.test('stopping a leader ends its session and its descendants, marked or not', ifHas('ps'), async (t) => {
  const script = 'setsid sleep 1000 & sleep 1000 & echo ready; wait';
  const leader = await startProcess(t, ['sh', '-c', script]);
  await once(leader.output, 'data');
  const children = await descendantsOf(leader.identity);
  t.equal(children.length, 2);
  const disposition = await stopTree(
    { deploymentId: newDeploymentId(), leader: leader.identity },
    { graceMs: () => 60_000, effects }, // longer than a test may take: SIGTERM ends them all
  );
  t.equal(disposition, 'default');
  t.notOk(isAlive(leader.identity));
  t.notOk(children.some(isAlive));
});

t.test(
  'each group outside that of the leader gets SIGTERM at once, that of a script before that of its step',
  async (t) => {
    const { deploymentId, leader, groups } = await startGroups(t);
    const signals = t.capture(process, 'kill', process.kill);
    await stopTree({ deploymentId, leader }, { graceMs: () => 10_000, effects });
    t.strictSame(targetsOf(signals.args(), 'SIGTERM'), groups);
  },
);

/** A command, a script in a group of its own, a pipeline of it, and a step of that which has its own group again. */
async function startGroups(t: Test, beginning = ':') {
  const deploymentId = newDeploymentId();
  const script = `setsid --wait sh -c '${beginning}; sleep 1000 | setsid sleep 1000 & echo $$ $!; wait'`;
  const { identity: leader, output } = await startProcess(t, ['sh', '-c', script], deploymentId);
  const [printed] = await once(output, 'data');
  const [scriptId = 0, stepId = 0] = String(printed).trim().split(' ').map(Number);
  await until(() => readStat(stepId)?.groupId === stepId);
  return { deploymentId, leader, groups: [-leader.processId, -scriptId, -stepId] };
}

t.test('the group of a leader that was killed gets SIGTERM at once', async (t) => {
  const deploymentId = newDeploymentId();
  const script = 'sleep 1000 | sleep 1000 & echo ready; wait';
  const { child, identity: leader, output } = await startProcess(t, ['sh', '-c', script], deploymentId);
  await once(output, 'data');
  child.kill('SIGKILL');
  await once(child, 'exit');
  const signals = t.capture(process, 'kill', process.kill);
  await stopTree({ deploymentId, leader, ownsId: true }, { graceMs: () => 10_000, effects });
  t.strictSame(targetsOf(signals.args(), 'SIGTERM'), [-leader.processId]);
});

t.test(
  'a process that leaves the group of the leader after it was looked up gets SIGTERM, too',
  ifHas('perl'),
  async (t) => {
    const { deploymentId, leader, leaverId, hasLeft } = await startLeaver(t, 'USR1');
    // The leader is asked what SIGTERM means to it once all are looked up.
    const { openSync } = fs;
    const openOnceLeft: typeof openSync = (...words) => {
      if (words[0] === `/proc/${leader.processId}/status` && !fs.existsSync(hasLeft)) {
        process.kill(leaverId, 'SIGUSR1');
        while (!fs.existsSync(hasLeft));
      }
      return openSync(...words);
    };
    t.intercept(fs, 'openSync', { value: openOnceLeft });
    syncBuiltinESMExports();
    t.teardown(syncBuiltinESMExports);
    const signals = t.capture(process, 'kill', process.kill);
    await stopTree({ deploymentId, leader }, { graceMs: () => 0, effects });
    t.strictSame(targetsOf(signals.args(), 'SIGTERM'), [-leader.processId, -leaverId]);
  },
);

t.test(
  'a process that leaves the group of the leader on its SIGTERM gets no second one',
  ifHas('perl'),
  async (t) => {
    const { deploymentId, leader, hasLeft } = await startLeaver(t, 'TERM');
    const { kill } = process;
    const signals = t.capture(process, 'kill', (target: number, name: NodeJS.Signals) => {
      const isSent = kill.call(process, target, name);
      if (name === 'SIGTERM') while (!fs.existsSync(hasLeft));
      return isSent;
    });
    await stopTree({ deploymentId, leader }, { graceMs: () => 0, effects });
    t.strictSame(targetsOf(signals.args(), 'SIGTERM'), [-leader.processId]);
  },
);

/** A command whose child leaves its process group on that signal, and makes a directory then. */
async function startLeaver(t: Test, signalName: 'USR1' | 'TERM') {
  const deploymentId = newDeploymentId();
  const hasLeft = `${temporaryDirectory(t)}/left`;
  // Perl acts on a signal that comes just before it sleeps only once it wakes.
  const sleeping = 'select undef, undef, undef, 0.05 while 1';
  const leaving = `$SIG{${signalName}} = sub { setsid(); mkdir "${hasLeft}" }; $| = 1; print $$; ${sleeping}`;
  const script = `perl -MPOSIX -e '${leaving}' & wait`;
  const { identity, output } = await startProcess(t, ['sh', '-c', script], deploymentId);
  return { deploymentId, leader: identity, leaverId: Number(await once(output, 'data')), hasLeft };
}

function targetsOf(signals: unknown[][], sent: NodeJS.Signals): unknown[] {
  return signals.filter(([, name]) => name === sent).map(([target]) => target);
}

t.test(
  'a descendant that ignores SIGTERM is killed though nothing tells any more whose it was',
  async (t) => {
    const script = `setsid env -i sh -c 'trap "" TERM; echo $$; exec sleep 1000' & wait`;
    const { identity: leader, output } = await startProcess(t, ['sh', '-c', script]);
    const left = processIdentity(Number(String(await once(output, 'data'))));
    if (left === undefined) throw new Error('it was not started');
    t.teardown(() => signal(left.processId, 'SIGKILL'));
    await stopTree({ deploymentId: newDeploymentId(), leader }, { graceMs: () => 50, effects });
    t.notOk(isAlive(left));
  },
);

t.test('a descendant of a descendant is ended though nothing else tells whose it was', async (t) => {
  const script = `setsid env -i sh -c 'setsid sleep 1000 & echo $!; wait' & wait`;
  const { identity: leader, output } = await startProcess(t, ['sh', '-c', script]);
  const leftId = Number(String(await once(output, 'data')));
  await until(() => readStat(leftId)?.sessionId === leftId);
  const left = processIdentity(leftId);
  if (left === undefined) throw new Error('it was not started');
  t.teardown(() => isAlive(left) && signal(leftId, 'SIGKILL'));
  await stopTree({ deploymentId: newDeploymentId(), leader }, { graceMs: () => 10_000, effects });
  t.notOk(isAlive(left));
});

t.test('the group that davit is in is not signalled as a whole: a command may have started it', async (t) => {
  const source = import.meta.resolve('../../src');
  const program = `
    const { stopTree } = await import('${source}/deploy/process-tree.ts');
    const { realEffects } = await import('${source}/effects.ts');
    const { processIdentity } = await import('${source}/process-identity.ts');
    const alive = setInterval(() => undefined, 1_000);
    const leader = process.env.IS_KNOWN ? processIdentity(process.ppid) : undefined;
    await stopTree({ deploymentId: process.env.DEPLOY_ID, leader }, { graceMs: () => 0, effects: realEffects });
    clearInterval(alive);
    console.log('lives');`;
  const script = '"$0" --input-type=module --eval "$PROGRAM"; echo went on';
  const command: [string, ...string[]] = ['sh', '-c', script, process.execPath];
  for (const isKnown of ['', 'yes']) {
    const variables = { PROGRAM: program, IS_KNOWN: isKnown };
    const { output } = await startProcess(t, command, newDeploymentId(), variables);
    t.equal(await text(output), 'lives\n');
  }
});

t.test('a group that another process leads is not signalled as a whole', async (t) => {
  const deploymentId = newDeploymentId();
  const script = `DEPLOY_ID=${deploymentId} sleep 1000 & echo $!; wait; exec sleep 1000`;
  const { identity: stranger, output } = await startProcess(t, ['sh', '-c', script]);
  const memberId = Number(await once(output, 'data'));
  await until(() => readStat(memberId)?.name === 'sleep');
  const signals = t.capture(process, 'kill', process.kill);
  await stopTree({ deploymentId, leader: undefined }, { graceMs: () => 0, effects });
  const targets = new Set(signals.args().map(([target]) => target));
  t.strictSame([...targets], [memberId]);
  t.ok(isAlive(stranger));
});

t.test('groups that ignore SIGTERM get it once, and are killed at once and in the same order', async (t) => {
  const { deploymentId, leader, groups } = await startGroups(t, 'trap "" TERM');
  const signals = t.capture(process, 'kill', process.kill);
  await stopTree({ deploymentId, leader }, { graceMs: () => 0, effects });
  const sent = signals.args();
  t.strictSame(targetsOf(sent, 'SIGTERM'), groups);
  const killed = new Set(targetsOf(sent, 'SIGKILL'));
  t.strictSame([...killed].slice(0, groups.length), groups);
});

t.test('processes that fork and end without pause are ended', ifHas('perl'), async (t) => {
  const chain =
    '$SIG{TERM} = "IGNORE"; $until = time + 20; $| = 1; print "ready\\n"; ' +
    'while (time < $until) { exit if fork } print "survived"';
  const script = `env -i perl -e '${chain}' & exec sleep 1000`;
  const leader = await startProcess(t, ['sh', '-c', script]);
  let output = '';
  leader.output.on('data', (bytes) => {
    output += bytes;
  });
  const closed = once(leader.output, 'end');
  await until(() => output === 'ready\n');
  const tree = { deploymentId: newDeploymentId(), leader: leader.identity };
  await stopTree(tree, { graceMs: () => 500, effects });
  await closed;
  t.equal(output, 'ready\n');
});

t.test(
  'what takes the place of a killed process is stopped before it is killed',
  ifHas('perl'),
  async (t) => {
    const deploymentId = newDeploymentId();
    // Four of them start a process of the deployment for each one that ends, until one is stopped.
    const replacing =
      'use POSIX; $| = 1; $until = time + 5; fork; fork; while (time < $until) { ' +
      `if (!($child = fork)) { $ENV{DEPLOY_ID} = "${deploymentId}"; exec "sh", "-c", "echo started; exec sleep 20" } ` +
      'waitpid $child, WUNTRACED; if (kill 0, $child) { print "stopped\\n"; exit } }';
    const { output } = await startProcess(t, ['perl', '-e', replacing]);
    let printed = '';
    output.on('data', (bytes) => {
      printed += bytes;
    });
    const closed = once(output, 'end');
    await until(() => printed.split('started').length > 4);
    await stopTree({ deploymentId, leader: undefined }, { graceMs: () => 0, effects });
    await closed;
    t.match(printed, /stopped/);
  },
);

t.test('another process that reuses the id of the leader is left alone', async (t) => {
  const stranger = await startProcess(t, ['sleep', '1000']);
  const leader = { ...stranger.identity, processStartedAt: stranger.identity.processStartedAt - 1 };
  const stopped = [false, true].map((ownsId) =>
    stopTree({ deploymentId: newDeploymentId(), leader, ownsId }, { graceMs: () => 0, effects }),
  );
  t.strictSame(await Promise.all(stopped), ['gone', 'gone'], 'also if it ran until just now');
  t.ok(isAlive(stranger.identity));
});

t.test('processes of an earlier boot are not looked for', async (t) => {
  const deploymentId = newDeploymentId();
  const { identity } = await startProcess(t, ['sleep', '1000'], deploymentId);
  const leader = { ...identity, bootId: 'b7e3bd5c-0000-4000-8000-000000000000' };
  t.equal(await stopTree({ deploymentId, leader }, { graceMs: () => 0, effects }), 'gone');
  t.ok(isAlive(identity));
});

t.test('processes left by a leader that exited by itself can be spared', async (t) => {
  const deploymentId = newDeploymentId();
  const { child, identity: leader } = await startProcess(t, ['sleep', '0'], deploymentId);
  const daemon = await startProcess(t, ['sleep', '1000'], deploymentId);
  if (child.exitCode === null) await once(child, 'exit');
  const tree = { deploymentId, leader };
  t.equal(await stopTree(tree, { graceMs: () => 0, effects, spareWhenExited: true }), 'gone');
  t.ok(isAlive(daemon.identity));
  t.equal(await stopTree(tree, { graceMs: () => 0, effects }), 'gone');
  t.notOk(isAlive(daemon.identity));
});

t.test('the session of a dead leader is found through its marked members', async (t) => {
  const deploymentId = newDeploymentId();
  const script = 'env -i sleep 1000 & echo $!; sleep 1000 & echo $!';
  const left = await leftBy(t, ['sh', '-c', script], deploymentId);
  const tree = { deploymentId, leader: left.leader };
  t.equal(await stopTree(tree, { graceMs: () => 10_000, effects }), 'gone');
  t.strictSame(left.processes.map(isAlive), [false, false]);
});

t.test('the session of a dead leader is found without marked members, unless ids were reused', async (t) => {
  const left = await leftBy(t, ['sh', '-c', 'env -i sleep 1000 & echo $!'], newDeploymentId());
  const mayBeAnothers = !noIdWasReused();
  const tree = { deploymentId: newDeploymentId(), leader: left.leader };
  t.equal(await stopTree(tree, { graceMs: () => 10_000, effects }), 'gone');
  t.strictSame(left.processes.map(isAlive), [mayBeAnothers]);
});

t.test('processes in a PID namespace younger than the command are not ended', ifMayUnshare, async (t) => {
  const source = import.meta.resolve('../../src');
  // A session whose leader has ended, with the number that the command had in the namespace before.
  const script = `
    set -- $(setsid sh -c 'sleep 600 >/dev/null & echo $$ $!')
    "$0" --input-type=module --eval "$PROGRAM" "$1"
    kill -0 "$2" && echo lives`;
  const program = `
    const { bootId } = await import('${source}/boot-id.ts');
    const { stopTree } = await import('${source}/deploy/process-tree.ts');
    const { realEffects } = await import('${source}/effects.ts');
    const leader = { processId: Number(process.argv[1]), processStartedAt: 1, bootId: bootId() };
    const alive = setInterval(() => undefined, 1_000);
    console.log(await stopTree({ deploymentId: 'dpl_1', leader }, { graceMs: () => 0, effects: realEffects }));
    clearInterval(alive);`;
  const words = ['env', `PROGRAM=${program}`, 'sh', '-c', script, process.execPath];
  t.match(runInNamespace(...words), { status: 0, stdout: 'gone\nlives\n', stderr: '' });
});

t.test('processes that cannot be ended are reported once, waited for and not stopped', async (t) => {
  const deploymentId = newDeploymentId();
  const { identity } = await startProcess(t, ['sleep', '1000'], deploymentId);
  const { kill } = process;
  const refused: unknown[] = [];
  // As the kernel answers where a command became another user.
  const intercepted = t.intercept(process, 'kill', {
    value(_target: number, name: unknown) {
      refused.push(name);
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
  const refusalsBefore = refused.length;
  await until(() => refused.length > refusalsBefore + 10);
  t.notOk(refused.includes('SIGSTOP'));
  t.ok(isAlive(identity));
  intercepted.restore();
  kill.call(process, identity.processId, 'SIGKILL');
  t.equal(await stopped, 'default');
  t.strictSame(told, [[identity.processId]]);
});

/** One at the first look, one at SIGTERM, one at SIGKILL: each tells two or more of the tree. */
const SHORTAGES = 5;

for (const code of ['ENFILE', 'ENOMEM'] as const) {
  t.test(`a process tree is ended despite repeated ${code} while it is looked for`, async (t) => {
    const deploymentId = newDeploymentId();
    const leader = await startProcess(t, [fixture('ignores-sigterm')], deploymentId);
    await once(leader.output, 'data');
    const other = await startProcess(t, ['sleep', '1000'], deploymentId);
    t.teardown(openAgain);
    let shortages = 0;
    const runShort = () => {
      if (shortages === SHORTAGES) return;
      shortages += 1;
      refuseToOpen(code);
    };
    // The shortage ends when a timer has waited for that, and returns as soon as a process was signaled.
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

t.test('trees that are stopped together share one reading of /proc', async (t) => {
  const trees = [];
  for (let number = 0; number < 32; number++) {
    const deploymentId = newDeploymentId();
    const { identity: leader } = await startProcess(t, ['sleep', '1000'], deploymentId);
    trees.push({ deploymentId, leader });
  }
  // A long-lived one tells how often all were read: others come and go on a busy machine.
  const { identity: stranger } = await startProcess(t, ['sleep', '1000']);
  const readings = countOpened(t, `/proc/${stranger.processId}/stat`);
  // While others fork, a tree is looked for again and again until half a second is over: each look takes as long here.
  let nowMs = 0;
  const hasty = { ...effects, monotonicMs: () => (nowMs += 500) };
  const graceMs = () => Number.POSITIVE_INFINITY;
  await Promise.all(trees.map((tree) => stopTree(tree, { graceMs, effects: hasty })));
  t.notOk(trees.some(({ leader }) => isAlive(leader)));
  // Each for itself makes four passes.
  t.ok(readings() < 2 * trees.length, `${readings()} readings for ${trees.length} trees`);
});

/** How often this process has opened a file since. */
function countOpened(t: Test, path: string): () => number {
  const { openSync } = fs;
  let count = 0;
  t.teardown(() => {
    fs.openSync = openSync;
    syncBuiltinESMExports();
  });
  fs.openSync = (...words) => {
    if (words[0] === path) count += 1;
    return openSync(...words);
  };
  syncBuiltinESMExports();
  return () => count;
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
  const { child, identity: leader, output } = await startProcess(t, command, deploymentId);
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
  for (const { processId } of processes) t.teardown(() => signal(processId, 'SIGKILL'));
  return { leader, processes };
}
