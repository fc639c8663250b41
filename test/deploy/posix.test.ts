import { closeSync, constants, readFileSync, readSync } from 'node:fs';
import t from 'tap';
import { posix, until } from '../helpers/commands.ts';

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

t.test('reading from a pipe does not wait for output, and no other program inherits it', async (t) => {
  const output = posix.pipe();
  t.teardown(() => closeSync(output));
  const [, flags = ''] = /^flags:\s*(\d+)$/m.exec(readFileSync(`/proc/self/fdinfo/${output}`, 'utf8')) ?? [];
  const expected = constants.O_NONBLOCK | 0o2000000; // O_CLOEXEC, which Node does not name
  t.equal(Number.parseInt(flags, 8) & expected, expected);
});

/** What one call reads; throws EAGAIN if there is nothing and somebody could still write. */
function textIn(descriptor: number): string {
  const bytes = Buffer.alloc(100);
  return bytes.toString('utf8', 0, readSync(descriptor, bytes));
}
