import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { copyFileSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Readable, Writable } from 'node:stream';
import t from 'tap';
import { bootId } from '../../src/boot-id.ts';
import { stopTree } from '../../src/deploy/process-tree.ts';
import { findMarked, isAlive, processIdentity, terminationDisposition } from '../../src/deploy/processes.ts';
import { realEffects } from '../../src/effects.ts';
import { fixture, stateOf, until } from '../helpers/commands.ts';
import { newDeploymentId, startProcess } from '../helpers/marked-processes.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a process is identified by its id, start time and boot id', async (t) => {
  const { child, identity } = await startProcess(t, ['sleep', '1000']);
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

t.test('a zombie has exited', async (t) => {
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

t.test('a program may have any name, such as one with parentheses', async (t) => {
  const file = join(temporaryDirectory(t), 'a) R 1 (b c');
  copyFileSync('/bin/sleep', file);
  const { identity } = await startProcess(t, [file, '1000']);
  const { identity: later } = await startProcess(t, ['sleep', '1000']);
  t.ok(identity.processStartedAt > 0);
  t.ok(identity.processStartedAt <= later.processStartedAt);
  t.ok(isAlive(identity));
});

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
