import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  existsSync,
  linkSync,
  mkdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import {
  isServedByProcess,
  lockForServing,
  lockPath,
  refuseOtherMachine,
  servedBy,
} from '../../src/store/lock.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { ifMayUnshare, runInNamespace } from '../helpers/namespaces.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('servedBy names the process that serves a file while it does, and no longer', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  t.equal(servedBy(path), null);
  t.notOk(existsSync(`${path}-lock`), 'servedBy creates no lock file');

  const release = lockForServing(path, 4711, fakeEffects(), 2);
  t.strictSame(servedBy(path), {
    process_id: 4711,
    since: '2026-11-21T08:00:00.000Z',
    max_concurrent: 2,
  });
  t.throws(() => lockForServing(path, 4712, fakeEffects()), {
    code: 'conflict',
    message: /is served already by process 4711 since 2026-11-21T08:00:00\.000Z/,
  });
  t.match(servedBy(path), { process_id: 4711 }, 'a refusal changes nothing');
  release();
  t.equal(servedBy(path), null, 'the lock file outlives the service, its lock does not');

  const next = lockForServing(path, 4712, fakeEffects());
  t.match(servedBy(path), { process_id: 4712, max_concurrent: null });
  next();
});

t.test('of several starts at once, the lock names the one that holds it', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const others = [4712, 4713];
  const { exec } = Sqlite.prototype;
  // Each writes who it is, and has ended before the one before it locks the file for good.
  Sqlite.prototype.exec = function (sql) {
    exec.call(this, sql);
    const next = sql === 'COMMIT' ? others.shift() : undefined;
    if (next !== undefined) lockForServing(path, next, fakeEffects())();
    return this;
  };
  t.teardown(() => {
    Sqlite.prototype.exec = exec;
  });
  const release = lockForServing(path, 4711, fakeEffects(), 2);
  t.strictSame(others, []);
  t.match(servedBy(path), { process_id: 4711, max_concurrent: 2 });
  t.throws(() => lockForServing(path, 4714, fakeEffects()), { message: /served already by process 4711 / });
  release();
});

t.test('a file that another machine serves is refused, not one of this machine', ifMayUnshare, async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const source = import.meta.resolve('../../src/store/lock.ts');
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

t.test('a lock file is private, so that no other user can hold a lock on it', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  lockForServing(path, 4711, fakeEffects())();
  t.equal(statSync(lockPath(path)).mode & 0o777, 0o600);
});

t.test('a lock file that a power cut damaged counts as unlocked, and is made anew', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  lockForServing(path, 4711, fakeEffects())();
  const whole = readFileSync(lockPath(path));
  const secondPageLost = Buffer.concat([whole.subarray(0, 4096), Buffer.alloc(whole.length - 4096)]);
  for (const damaged of [Buffer.alloc(8192), Buffer.alloc(0), secondPageLost]) {
    writeFileSync(lockPath(path), damaged);
    t.equal(servedBy(path), null);
    t.strictSame(readFileSync(lockPath(path)), damaged, 'servedBy repairs nothing');
    const release = lockForServing(path, 4712, fakeEffects());
    t.match(servedBy(path), { process_id: 4712 });
    t.throws(() => lockForServing(path, 4713, fakeEffects()), { code: 'conflict' });
    release();
  }
});

t.test('whatever else has the name of the lock file is refused and left as it is', async (t) => {
  const directory = temporaryDirectory(t);
  const path = join(directory, 'davit.db');
  const [theirs, file] = [join(directory, 'theirs'), lockPath(path)];
  const makings: (() => void)[] = [
    () => writeFileSync(file, 'a diary'),
    () => symlinkSync(theirs, file),
    () => symlinkSync(join(directory, 'nowhere'), file),
    () => linkSync(theirs, file),
    () => execFileSync('mkfifo', [file]),
    () => mkdirSync(file),
  ];
  for (const make of makings) {
    rmSync(file, { force: true });
    writeFileSync(theirs, Buffer.alloc(4096));
    chmodSync(theirs, 0o644);
    make();
    t.throws(() => lockForServing(path, 4711, fakeEffects()), {
      code: 'conflict',
      message: /is not a lock file of davit, which needs that name: move it away$/,
    });
    t.strictSame(readFileSync(theirs), Buffer.alloc(4096));
    t.equal(statSync(theirs).mode & 0o777, 0o644);
    t.notOk(existsSync(join(directory, 'nowhere')));
  }
});

t.test('a lock file that others could read is made private', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  lockForServing(path, 4711, fakeEffects())();
  chmodSync(lockPath(path), 0o644);
  lockForServing(path, 4711, fakeEffects())();
  t.equal(statSync(lockPath(path)).mode & 0o777, 0o600);
});

t.test('a lock file that is overwritten while locked still keeps others out', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const release = lockForServing(path, 4711, fakeEffects());
  writeFileSync(lockPath(path), Buffer.alloc(8192));
  t.throws(() => lockForServing(path, 4712, fakeEffects()), {
    code: 'conflict',
    message: /is served already: stop that one first/,
  });
  t.strictSame(servedBy(path), { process_id: null, since: null, max_concurrent: null });
  release();
});

t.test('which process holds the lock is told by the kernel, whatever the lock file says', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const release = lockForServing(path, 4711, fakeEffects());
  t.ok(isServedByProcess(process.pid, path));
  t.notOk(isServedByProcess(4711, path));
  release();
  t.notOk(isServedByProcess(process.pid, path));
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
  t.strictSame(servedBy(path), { process_id: child.pid, since: null, max_concurrent: null });
  child.kill('SIGKILL');
  await once(child, 'exit');
  t.equal(servedBy(path), null);
});

t.test(
  'a lock file that root makes belongs to the owner of the file; one that cannot be opened is an error',
  ifMayBeNobody(),
  async (t) => {
    const directory = temporaryDirectory(t);
    const path = join(directory, 'davit.db');
    writeFileSync(path, '');
    chownSync(path, 65_534, 65_533);
    lockForServing(path, 4711, fakeEffects())();
    t.match(statSync(lockPath(path)), { uid: 65_534, gid: 65_533 });

    chownSync(lockPath(path), 0, 0);
    chmodSync(directory, 0o755);
    process.seteuid?.(65_534);
    t.teardown(() => process.seteuid?.(0));
    const refusal = { code: 'conflict', message: /^cannot open .*davit\.db-lock/ };
    t.throws(() => servedBy(path), refusal);
    t.throws(() => lockForServing(path, 4711, fakeEffects()), refusal);
  },
);

t.test(
  'a lock file that root makes where no file is yet belongs to the owner of the directory',
  ifMayBeNobody(),
  async (t) => {
    const directory = temporaryDirectory(t);
    const path = join(directory, 'davit.db');
    const link = join(temporaryDirectory(t), 'link.db');
    symlinkSync(path, link);
    chownSync(directory, 65_534, 65_533);
    lockForServing(link, 4711, fakeEffects())();
    t.match(statSync(lockPath(path)), { uid: 65_534, gid: 65_533 });

    process.seteuid?.(65_534);
    t.teardown(() => process.seteuid?.(0));
    lockForServing(path, 4711, fakeEffects())();
  },
);

t.test('a file has one lock, whichever links lead to it, even before it exists', async (t) => {
  const directory = temporaryDirectory(t);
  const path = join(directory, 'davit.db');
  symlinkSync('davit.db', join(directory, 'link.db'));
  symlinkSync(join(directory, 'link.db'), join(directory, 'far.db'));
  symlinkSync('circle.db', join(directory, 'circle.db'));
  const release = lockForServing(join(directory, 'far.db'), 4711, fakeEffects());
  t.match(servedBy(path), { process_id: 4711 });
  t.throws(() => lockForServing(join(directory, 'link.db'), 4712, fakeEffects()), { code: 'conflict' });
  release();
  t.throws(() => lockForServing(join(directory, 'missing', 'davit.db'), 4711, fakeEffects()), {
    code: 'conflict',
  });
  t.equal(lockPath(join(directory, 'circle.db')), join(directory, 'circle.db-lock'));

  mkdirSync(join(directory, 'real/sub'), { recursive: true });
  symlinkSync('real/sub', join(directory, 'linked'));
  symlinkSync('../up.db', join(directory, 'real/sub/link.db'));
  const real = realpathSync(directory);
  t.equal(lockPath(join(directory, 'linked/link.db')), join(real, 'real/up.db-lock'), 'relative to the link');
});
