import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, existsSync, openSync, readdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { includesLock, isServedByProcess, refuseOtherMachine, servedBy } from '../../src/store/holder.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { lockPath } from '../../src/store/place.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { ifMayUnshare, runInNamespace } from '../helpers/namespaces.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a file that another machine serves is refused, not one of this machine', ifMayUnshare, async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const source = import.meta.resolve('../../src/store/holder.ts');
  const program = `import(${JSON.stringify(source)}).then(({ refuseOtherMachine }) => refuseOtherMachine(${JSON.stringify(path)}))`;
  /** In a namespace where, as on another machine, the process that holds the lock cannot be seen. */
  const refusedElsewhere = () => runInNamespace(process.execPath, '--eval', program).stderr;
  refuseOtherMachine(path);
  const release = lockForServing(path, 4711, fakeEffects());
  refuseOtherMachine(path);
  t.equal(refusedElsewhere(), '');
  release();
  const other = new Sqlite(`${path}-lock`);
  other.exec("UPDATE holder SET boot_id = 'b7e3bd5c-0000-4000-8000-000000000000'");
  t.equal(refusedElsewhere(), '', 'nobody serves it');
  other.exec('BEGIN IMMEDIATE');
  t.match(
    refusedElsewhere(),
    /AppError: \/.*\/davit\.db is served by process 4711 since \S+ on another machine: run davit there/,
  );
  refuseOtherMachine(path); // by a process of this machine, whatever boot id its container has
  t.match(servedBy(path), { process_id: 4711 });
  t.notOk(existsSync(path), 'it was not opened');
  other.exec('ROLLBACK');
  other.exec('ALTER TABLE holder DROP COLUMN boot_id; BEGIN IMMEDIATE');
  t.equal(refusedElsewhere(), '', 'an older davit serves it, and does not say where');
  other.close();
});

t.test('which process holds the lock is told by the kernel, whatever the lock file says', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const release = lockForServing(path, 4711, fakeEffects());
  t.ok(isServedByProcess(process.pid, path));
  t.notOk(isServedByProcess(4711, path));
  release();
  t.notOk(isServedByProcess(process.pid, path));
  const descriptor = openSync(lockPath(path), 'r');
  t.ok(isServedByProcess(process.pid, path), 'or, where it does not tell that, by what is open');
  closeSync(descriptor);
  const lock = lockPath(path);
  t.strictSame(
    [[lock], [`${lock} (deleted)`], [path, `${lock}s`]].map((files) => includesLock(files, path)),
    [true, true, false],
  );
});

t.test('servedBy names the process that holds the lock even if the lock file was overwritten', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const hold = `
    const { lockForServing } = await import('${import.meta.resolve('../../src/store/lock.ts')}');
    globalThis.release = lockForServing('${path}', process.pid, { now: Date.now });
    process.stdout.write('has it');
    setInterval(() => {}, 60_000);`;
  const child = spawn(process.execPath, ['--input-type=module', '--eval', hold], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  await once(child.stdout, 'data');
  writeFileSync(lockPath(path), 'garbage'.repeat(1_000));
  const openFiles = readdirSync('/proc/self/fd').length;
  t.strictSame(servedBy(path), { process_id: child.pid, since: null, max_concurrent: null });
  t.equal(readdirSync('/proc/self/fd').length, openFiles, 'and has nothing open any more');
  child.kill('SIGKILL');
  await once(child, 'exit');
  t.equal(servedBy(path), null);
});
