import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { basename, join } from 'node:path';
import t from 'tap';
import { DAY_MS } from '../../src/durations.ts';
import { processIdentity } from '../../src/process-identity.ts';
import { startPartial } from '../../src/store/partial-file.ts';
import { diskCallsOf } from '../helpers/disk-calls.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const NOW_MS = 100 * DAY_MS;
/** More than the system gives to any process. */
const NO_PROCESS = 4_194_305;

t.test('a partial file is synced before it gets its name, and its directory after that', async (t) => {
  const directory = temporaryDirectory(t);
  const partial = startPartial(directory, NOW_MS);
  t.equal(statSync(partial.path).mode & 0o777, 0o600);
  writeFileSync(partial.path, 'all of it');
  const name = basename(partial.path);
  t.strictSame(
    diskCallsOf(() => partial.publishAs(join(directory, 'copy.db'))),
    [`sync ${name}`, `link ${name} copy.db`, `remove ${name}`, `sync ${basename(directory)}`],
  );
  t.strictSame(readdirSync(directory), ['copy.db']);
  t.equal(readFileSync(join(directory, 'copy.db'), 'utf8'), 'all of it');
});

t.test('publishing replaces no existing file, also on a file system without hard links', async (t) => {
  const directory = temporaryDirectory(t);
  const [taken, free] = [join(directory, 'taken'), join(directory, 'free')];
  writeFileSync(taken, 'notes');
  for (const failing of [{}, { linkSync: 'EPERM' }]) {
    const partial = startPartial(directory, NOW_MS);
    t.throws(() => diskCallsOf(() => partial.publishAs(taken), failing), {
      code: 'conflict',
      message: /taken is there already/,
    });
    partial.discard();
    t.strictSame(readdirSync(directory), ['taken']);
  }
  t.equal(readFileSync(taken, 'utf8'), 'notes');

  const partial = startPartial(directory, NOW_MS);
  t.throws(() => diskCallsOf(() => partial.publishAs(free), { linkSync: 'ENOSPC' }), { code: 'ENOSPC' });
  t.notOk(existsSync(free));
  partial.discard();
  for (const code of ['EPERM', 'ENOTSUP', 'ENOSYS']) {
    rmSync(free, { force: true });
    const linkless = startPartial(directory, NOW_MS);
    const calls = diskCallsOf(() => linkless.publishAs(free), { linkSync: code });
    t.match(calls.slice(-2), [/^rename \S+ free$/, /^sync /], code);
    t.strictSame(readdirSync(directory), ['free', 'taken']);
  }
});

t.test('whatever already has the name of the partial file is left alone', async (t) => {
  const directory = temporaryDirectory(t);
  const theirs = join(directory, 'theirs');
  writeFileSync(theirs, 'notes');
  const { path, discard } = startPartial(directory, NOW_MS);
  discard();
  symlinkSync(theirs, path);
  t.throws(() => startPartial(directory, NOW_MS), {
    code: 'conflict',
    message: /^cannot write in .* \(EEXIST\)/,
  });
  t.equal(readFileSync(theirs, 'utf8'), 'notes');
});

t.test('discarding a partial file removes what SQLite put beside it', async (t) => {
  const directory = temporaryDirectory(t);
  const { path, discard } = startPartial(directory, NOW_MS);
  for (const side of ['-wal', '-shm', '-journal']) writeFileSync(path + side, '');
  discard();
  t.strictSame(readdirSync(directory), []);
});

t.test(
  'partial files of dead processes are removed, those of another boot or container after a day',
  async (t) => {
    const directory = temporaryDirectory(t);
    // Its name tells how those of this boot and this PID namespace are named.
    const { path, discard } = startPartial(directory, NOW_MS);
    discard();
    const [, bootId = '', namespace = ''] = /-([\da-f-]{36})-(\d+)$/.exec(path) ?? [];
    const parent = processIdentity(process.ppid)?.processStartedAt ?? 0;
    const here = (processId: number, startedAt = 1, madeIn = namespace) =>
      `.davit-partial-${processId}-${startedAt}-${bootId}-${madeIn}`;
    const otherBootId = '22222222-2222-2222-2222-222222222222';
    const elsewhere = (processId: number) => `.davit-partial-${processId}-1-${otherBootId}`;
    const rows: [name: string, ageMs: number, goes: boolean][] = [
      [here(process.ppid, parent), 2 * DAY_MS, false],
      [here(process.ppid, parent + 1), 0, true],
      [here(NO_PROCESS), 0, true],
      [`${here(NO_PROCESS)}-wal`, 0, true],
      [here(NO_PROCESS, 1, '4026532001'), DAY_MS, false],
      [here(NO_PROCESS, 2, '4026532001'), DAY_MS + 1, true],
      [elsewhere(1), DAY_MS, false],
      [elsewhere(2), DAY_MS + 1, true],
      // The first namespace of every machine has the same number.
      [`${elsewhere(3)}-${namespace}`, 0, false],
      [`not${here(NO_PROCESS)}`, 2 * DAY_MS, false],
    ];
    for (const [name, ageMs] of rows) {
      const at = (NOW_MS - ageMs) / 1000;
      writeFileSync(join(directory, name), '');
      utimesSync(join(directory, name), at, at);
    }
    startPartial(directory, NOW_MS).discard();
    for (const [name, , goes] of rows) t.equal(existsSync(join(directory, name)), !goes, name);
  },
);

t.test('an abandoned file that cannot be removed prevents no other one', async (t) => {
  const directory = temporaryDirectory(t);
  const { path, discard } = startPartial(directory, NOW_MS);
  discard();
  const left = path.replace(`partial-${process.pid}`, `partial-${NO_PROCESS}`);
  mkdirSync(left);
  symlinkSync(`${basename(left)}-loop`, `${left}-loop`);
  const another = startPartial(directory, NOW_MS);
  t.strictSame(readdirSync(directory).sort(), [basename(left), basename(another.path)].sort());
});
