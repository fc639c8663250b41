import { execFileSync } from 'node:child_process';
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
import { servedBy } from '../../src/store/holder.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { lockPath } from '../../src/store/place.ts';
import { fakeEffects } from '../helpers/effects.ts';
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
  chmodSync(lockPath(path), 0o640);
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
