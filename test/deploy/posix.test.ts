import { closeSync, readSync } from 'node:fs';
import t from 'tap';
import { posix, stateOf, until } from '../helpers/commands.ts';

t.test('nobody can write to a new pipe but the program that is started with it', async (t) => {
  const output = posix.pipe();
  t.teardown(() => closeSync(output));
  t.equal(textIn(output), '', 'it has no writer');
  const program = { path: '/bin/echo', arguments: ['echo', 'said'], environment: {}, directory: '/', output };
  const spawned = await posix.spawn(program);
  if ('code' in spawned) throw new Error(spawned.code);
  await until(() => posix.reap(spawned.processId) !== undefined);
  t.equal(textIn(output), 'said\n');
  t.equal(textIn(output), '', 'it has no writer any more');
});

t.test('the session of a process is told until it is reaped', async (t) => {
  t.equal(posix.sessionOf(process.pid), posix.sessionOf(0), '0 stands for this process');
  const output = posix.pipe();
  t.teardown(() => closeSync(output));
  const program = { path: '/bin/true', arguments: ['true'], environment: {}, directory: '/', output };
  const spawned = await posix.spawn(program);
  if ('code' in spawned) throw new Error(spawned.code);
  const { processId } = spawned;
  await until(() => stateOf(processId) === 'Z');
  t.equal(posix.sessionOf(processId), processId);
  t.strictSame(posix.reap(processId), { kind: 'exited', exitCode: 0 });
  t.equal(posix.sessionOf(processId), undefined);
});

/** What one call reads; throws EAGAIN if there is nothing and somebody could still write. */
function textIn(descriptor: number): string {
  const bytes = Buffer.alloc(100);
  return bytes.toString('utf8', 0, readSync(descriptor, bytes));
}
