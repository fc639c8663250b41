import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { copyFileSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Readable, Writable } from 'node:stream';
import t from 'tap';
import { bootId } from '../src/boot-id.ts';
import { threadIds } from '../src/proc.ts';
import { isAlive, processIdentity } from '../src/process-identity.ts';
import { stateOf, until } from './helpers/commands.ts';
import { startProcess } from './helpers/marked-processes.ts';
import { temporaryDirectory } from './helpers/store.ts';

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
});

t.test('a thread is no process, though it has an id of the same kind', async (t) => {
  const ids = threadIds(process.pid).map(Number);
  t.ok(ids.length > 1);
  t.strictSame(
    ids.filter((id) => processIdentity(id) !== undefined),
    [process.pid],
  );
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
