import { closeSync, readSync } from 'node:fs';
import t, { type Test } from 'tap';
import { loadPosix, type Posix } from '../../src/deploy/posix.ts';
import { loadCLibrary } from '../../src/libc.ts';
import { posix, until } from '../helpers/commands.ts';

t.test('nobody can write to a new pipe but the program that is started with it', async (t) => {
  const output = pipe(t);
  t.equal(textIn(output), '', 'it has no writer');
  await echo(posix, output);
  t.equal(textIn(output), 'said\n');
  t.equal(textIn(output), '', 'it has no writer any more');
});

t.test('a process that is not dumpable, as its file has capabilities, starts programs', async (t) => {
  const { declare } = await loadCLibrary();
  const setDumpable = declare('int prctl(int option, unsigned long value)');
  const PR_SET_DUMPABLE = 4;
  t.teardown(() => setDumpable(PR_SET_DUMPABLE, 1));
  setDumpable(PR_SET_DUMPABLE, 0);
  const output = pipe(t);
  await echo(await loadPosix(), output);
  t.equal(textIn(output), 'said\n');
});

function pipe(t: Test): number {
  const output = posix.pipe();
  t.teardown(() => closeSync(output));
  return output;
}

/** Resolves when the program that says it has ended. */
async function echo({ spawn, reap }: Posix, output: number): Promise<void> {
  const program = { path: '/bin/echo', arguments: ['echo', 'said'], environment: {}, directory: '/', output };
  const spawned = await spawn(program);
  if ('code' in spawned) throw new Error(spawned.code);
  await until(() => reap(spawned.processId) !== undefined);
}

/** What one call reads; throws EAGAIN if there is nothing and somebody could still write. */
function textIn(descriptor: number): string {
  const bytes = Buffer.alloc(100);
  return bytes.toString('utf8', 0, readSync(descriptor, bytes));
}
