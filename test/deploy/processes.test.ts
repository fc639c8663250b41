import { spawn } from 'node:child_process';
import { once } from 'node:events';
import fs from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { join } from 'node:path';
import t from 'tap';
import { stopTree } from '../../src/deploy/process-tree.ts';
import { findMarked, terminationDisposition, visitProcesses } from '../../src/deploy/processes.ts';
import { realEffects } from '../../src/effects.ts';
import { readEnvironment } from '../../src/proc.ts';
import { readStat } from '../../src/process-identity.ts';
import { TURN_MAX_MS } from '../../src/turns.ts';
import { fixture, newDeploymentId, until } from '../helpers/commands.ts';
import { startProcess } from '../helpers/marked-processes.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('the SIGTERM disposition of a process is read', async (t) => {
  const deploymentId = newDeploymentId();
  const plain = await startProcess(t, ['sleep', '1000'], deploymentId);
  t.equal(terminationDisposition(plain.identity), 'default');
  const ignoring = await startProcess(t, [fixture('ignores-sigterm')], deploymentId);
  await once(ignoring.output, 'data');
  t.equal(terminationDisposition(ignoring.identity), 'ignored');
  const catching = await startProcess(t, [fixture('tidies-up')], deploymentId);
  await once(catching.output, 'data');
  t.equal(terminationDisposition(catching.identity), 'caught');
  t.equal(terminationDisposition({ ...plain.identity, processStartedAt: 1 }), 'gone');
  await stopTree({ deploymentId, leader: undefined }, { graceMs: () => 0, effects: realEffects });
});

t.test('one pass finds the processes of several deployments and no others', async (t) => {
  const [one, two, three] = [newDeploymentId(), newDeploymentId(), newDeploymentId()];
  const first = await startProcess(t, ['sleep', '1000'], one);
  const second = await startProcess(t, ['sleep', '1000'], two);
  const again = await startProcess(t, ['sleep', '1000'], two);
  await startProcess(t, ['sleep', '1000'], `${one}0`);
  await startProcess(t, ['sleep', '1000'], undefined, { MY_DEPLOY_ID: one, NOTE: `DEPLOY_ID=${one}` });
  const found = await findMarked(new Set([one, two, three]));
  t.strictSame([...found.keys()].sort(), [one, two].sort());
  t.strictSame(found.get(one), [first.identity]);
  // In the order of their ids, which begin anew now and then.
  t.strictSame(new Set(found.get(two)), new Set([second.identity, again.identity]));
});

t.test('the deployment marker is found in a large environment', async (t) => {
  const deploymentId = newDeploymentId();
  const { identity } = await startProcess(t, ['sleep', '1000'], undefined, {
    LARGE: 'x'.repeat(100_000),
    DEPLOY_ID: deploymentId,
  });
  t.strictSame((await findMarked(new Set([deploymentId]))).get(deploymentId), [identity]);
});

t.test('of a process that shows more than execve(2) can have given it, no more is read', async (t) => {
  const program = join(import.meta.dirname, '../fixtures/endless-environment.ts');
  const endless = await startProcess(t, [process.execPath, program]);
  const [said] = await once(endless.output, 'data');
  if (String(said) !== 'ready\n') {
    t.pass(`the kernel has no PR_SET_MM_MAP: ${said}`);
    return;
  }
  const environment = readEnvironment(`/proc/${endless.identity.processId}`);
  t.equal(environment?.length, 6 * 1024 * 1024);
  const deploymentId = newDeploymentId();
  const { identity } = await startProcess(t, ['sleep', '1000'], deploymentId);
  t.strictSame((await findMarked(new Set([deploymentId]))).get(deploymentId), [identity]);
});

t.test('a pass lets other work in between processes that take long to read', async (t) => {
  const long = await Promise.all([1, 2, 3, 4, 5].map(() => startProcess(t, ['sleep', '1000'])));
  const longIds = new Set(long.map(({ identity }) => identity.processId));
  let turn = 0;
  const count = () => {
    turn += 1;
    next = setImmediate(count);
  };
  let next = setImmediate(count);
  const turns: number[] = [];
  await visitProcesses(({ processId }) => {
    if (!longIds.has(processId)) return;
    turns.push(turn);
    realEffects.block(TURN_MAX_MS);
  });
  clearImmediate(next);
  t.equal(new Set(turns).size, long.length, `each in a turn of its own: ${turns}`);
});

t.test('a pass meets all that run, also what was forked during it, but for this process', async (t) => {
  // It exits only once its parent is no shell any more, which may wait for it, so that nothing of it is left.
  const exits = 'until grep -qx sleep /proc/$$/comm; do :; done';
  const { output } = await startProcess(t, ['sh', '-c', `${exits} & echo $!; exec sleep 1000`]);
  const exitedId = Number(String(await once(output, 'data')));
  await until(() => readStat(exitedId)?.state === 'Z');
  let forkedId: number | undefined;
  const visitedIds = new Set<number>();
  await visitProcesses(({ processId }) => {
    visitedIds.add(processId);
    if (processId !== 1) return; // the oldest is met last
    const forked = spawn('sleep', ['1000']);
    t.teardown(() => forked.kill('SIGKILL'));
    forkedId = forked.pid;
  });
  t.ok(forkedId !== undefined && visitedIds.has(forkedId));
  for (const id of [process.pid, exitedId]) t.notOk(visitedIds.has(id));
});

t.test('a process that was forked last is met also if it is in no list of processes', async (t) => {
  const { identity } = await startProcess(t, ['sleep', '1000']);
  const loadavg = join(temporaryDirectory(t), 'loadavg');
  const { openSync, readdirSync } = fs;
  const listed = readdirSync('/proc').filter((name) => name !== String(identity.processId));
  const replacedBy = new Map([
    ['/proc/loadavg', loadavg],
    [`/proc/self/task/${process.pid}/children`, '/dev/null'],
  ]);
  const open: typeof openSync = (path, ...words) => openSync(replacedBy.get(String(path)) ?? path, ...words);
  const list = (path: string) => (path === '/proc' ? listed : readdirSync(path));
  t.intercept(fs, 'openSync', { value: open });
  t.intercept(fs, 'readdirSync', { value: list });
  syncBuiltinESMExports();
  t.teardown(syncBuiltinESMExports);
  const met: boolean[] = [];
  for (const laterIds of [0, 7, 100]) {
    fs.writeFileSync(loadavg, `0.00 0.00 0.00 1/1 ${identity.processId + laterIds}\n`);
    let isMet = false;
    await visitProcesses(({ processId }) => {
      isMet ||= processId === identity.processId;
    });
    met.push(isMet);
  }
  t.strictSame(met, [true, true, false]);
});

t.test('a pass asks once for a process that hidepid hides', async (t) => {
  const { openSync } = fs;
  let asked = 0;
  const hide: typeof openSync = (...words) => {
    if (words[0] !== '/proc/1/stat') return openSync(...words);
    asked += 1;
    throw Object.assign(new Error('EPERM'), { code: 'EPERM' });
  };
  t.intercept(fs, 'openSync', { value: hide });
  syncBuiltinESMExports();
  t.teardown(syncBuiltinESMExports);
  await visitProcesses(() => undefined);
  t.equal(asked, 1);
});
