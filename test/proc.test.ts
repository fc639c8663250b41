import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, openSync, readFileSync, renameSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import t from 'tap';
import { removeTree } from '../src/deploy/remove-tree.ts';
import {
  hasOpened,
  hiddenProcessesProblem,
  openFilesOf,
  processIds,
  readProc,
  requireOwnProc,
} from '../src/proc.ts';
import { useUpFiles } from './helpers/limits.ts';
import { ifMayUnshare, OWN_PROCESSES, runInNamespace } from './helpers/namespaces.ts';
import { ifMayBeNobody } from './helpers/nobody.ts';
import { ifHas } from './helpers/programs.ts';
import { temporaryDirectory } from './helpers/store.ts';

t.test('processIds lists all processes, and readProc reads a file of /proc or gives undefined', async (t) => {
  t.ok(processIds().includes(process.pid));
  t.ok(processIds().every(Number.isInteger));
  t.match(readProc('/proc/self/stat'), new RegExp(`^${process.pid} `));
  t.equal(readProc('/proc/0/stat'), undefined, 'there is no such process');
  t.throws(() => readProc('/proc'), { code: 'EISDIR' });
});

t.test(
  'a process has a file open that it may read or write, whatever the name, and not one of that name',
  async (t) => {
    const path = join(temporaryDirectory(t), 'file');
    writeFileSync(path, '');
    const file = statSync(path);
    const O_PATH = 0o10000000; // without a right to the file
    const place = openSync(path, O_PATH);
    t.notOk(hasOpened(process.pid, [file]));
    for (const flags of ['r', 'a']) {
      const descriptor = openSync(path, flags);
      renameSync(path, `${path}.moved`);
      writeFileSync(path, '');
      t.ok(hasOpened(process.pid, [{ dev: undefined, ino: undefined }, file]), flags);
      t.notOk(hasOpened(process.pid, [statSync(path)]), flags);
      t.notOk(hasOpened(process.pid, [{ ...file, dev: file.dev + 1 }]), 'of another file system');
      t.notOk(hasOpened(0, [file]), 'there is no such process');
      renameSync(`${path}.moved`, path);
      closeSync(descriptor);
    }
    t.notOk(hasOpened(process.pid, [file]));
    closeSync(place);
  },
);

t.test('a list in /proc is read whole, though the system hands it out by the page', async (t) => {
  // The mappings change, but for the last ones.
  const lastOf = (maps: string) => maps.split('\n').at(-2);
  const maps = readProc('/proc/self/maps') ?? '';
  t.ok(maps.length > 4_096, 'more than a page');
  t.equal(lastOf(maps), lastOf(readFileSync('/proc/self/maps', 'latin1')));
});

/** In a container, process 1 may belong to the user who runs the tests and be readable; root switches to another user. */
const isRoot = process.getuid?.() === 0;
const ifFirstIsAnothers =
  statSync('/proc/1', { throwIfNoEntry: false })?.uid !== process.getuid?.()
    ? {}
    : { skip: 'process 1 is of the same user' };

t.test('hardly more is read of a long file than asked', (t) => {
  const path = join(temporaryDirectory(t), 'long');
  writeFileSync(path, 'x'.repeat(1_000_000));
  t.equal(readProc(path)?.length, 1_000_000);
  const { length } = readProc(path, 500_000) ?? '';
  t.ok(length >= 500_000 && length < 600_000, `${length}`);
  t.end();
});

t.test(
  'the environment of another user is not readable',
  isRoot ? ifMayBeNobody() : ifFirstIsAnothers,
  async (t) => {
    if (isRoot) process.seteuid?.(65_534);
    t.teardown(() => {
      if (isRoot) process.seteuid?.(0);
    });
    t.equal(readProc('/proc/1/environ'), undefined);
  },
);

t.test('constant opening and closing of files does not hide other open files', async (t) => {
  const directory = temporaryDirectory(t);
  writeFileSync(join(directory, 'held'), '');
  const churn = `
    const { closeSync, openSync } = require('node:fs');
    openSync('held');
    process.stdout.write('has it');
    for (;;) closeSync(openSync('/dev/null'));`;
  const child = spawn(process.execPath, ['--eval', churn], {
    cwd: directory,
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  await once(child.stdout, 'data');
  const looks = Array.from({ length: 500 }, () => openFilesOf(child.pid ?? 0));
  t.ok(looks.every((files) => files.includes(join(directory, 'held'))));
  t.equal(openFilesOf(0).length, 0, 'there is no such process');
});

t.test('a file with a path that is too long to be read hides no other open files', async (t) => {
  const directory = temporaryDirectory(t);
  writeFileSync(join(directory, 'held'), '');
  const deep = `
    const { mkdirSync, openSync } = require('node:fs');
    openSync('held');
    for (let depth = 0; depth < 30; depth++) {
      mkdirSync('d'.repeat(200));
      process.chdir('d'.repeat(200));
    }
    openSync('.');
    process.stdout.write('has it');
    setInterval(() => {}, 1_000);`;
  const child = spawn(process.execPath, ['--eval', deep], {
    cwd: directory,
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  await once(child.stdout, 'data');
  try {
    t.ok(openFilesOf(child.pid ?? 0).includes(join(directory, 'held')));
  } finally {
    await removeTree(join(directory, 'd'.repeat(200))); // Node cannot remove it
  }
});

const PROC = join(import.meta.dirname, '../src/proc.ts');
const LOOK = `import('${pathToFileURL(PROC)}').then((proc) => proc.requireOwnProc())`;

const HIDE = 'mount -o remount,hidepid=2 /proc';
const AS_NOBODY = 'setpriv --reuid=65534 --regid=65534 --clear-groups';
const ifMayHide =
  spawnSync('unshare', ['--pid', '--fork', '--mount-proc', 'sh', '-c', `${HIDE} && ${AS_NOBODY} true`])
    .status === 0
    ? ifMayBeNobody(PROC, process.execPath)
    : { skip: '/proc may not be mounted otherwise here' };

t.test('a /proc of another PID namespace is refused', ifMayUnshare, async (t) => {
  requireOwnProc();
  t.match(runInNamespace(process.execPath, '--eval', LOOK), { status: 0, stderr: '' });
  const words = ['--map-root-user', '--pid', '--fork', process.execPath, '--eval', LOOK];
  t.match(spawnSync('unshare', words, { encoding: 'utf8' }), {
    status: 1,
    stderr:
      /\/proc is that of another PID namespace, where davit is process \d+ in place of 1: mount its own there/,
  });
});

t.test('a /proc that hides other users is reported to non-root users', ifMayHide, async (t) => {
  t.equal(hiddenProcessesProblem(), undefined);
  const look = `import('${pathToFileURL(PROC)}').then((proc) => console.log(proc.hiddenProcessesProblem()))`;
  const told = (script: string) => {
    const words = [...OWN_PROCESSES.filter((word) => word !== '--map-root-user'), 'sh', '-c', script];
    return spawnSync('unshare', [...words, process.execPath, look], { encoding: 'utf8' }).stdout;
  };
  t.match(
    told(`${HIDE} && ${AS_NOBODY} "$0" --eval "$1"`),
    /^the processes of other users are hidden in \/proc \(hidepid\)/,
  );
  t.equal(told(`${HIDE} && "$0" --eval "$1"`), 'undefined\n', 'they are not from root');
  t.equal(told(`${AS_NOBODY} "$0" --eval "$1"`), 'undefined\n');
});

t.test('a /proc mounted with subset=pid is refused', ifMayUnshare, async (t) => {
  const script = 'mount -t proc -o subset=pid proc /proc && exec "$0" --eval "$1"';
  t.match(runInNamespace('sh', '-c', script, process.execPath, LOOK), {
    status: 1,
    stderr:
      /boot_id is not there, .*: mount all of \/proc \(without subset=pid, which ProcSubset= of systemd sets\)/,
  });
});

t.test('without free file descriptors /proc is still read', ifHas('prlimit'), async (t) => {
  t.ok(processIds().includes(process.pid));
  const release = useUpFiles();
  try {
    for (let look = 0; look < 3; look++) {
      t.throws(() => openSync('/dev/null', 'r'), { code: 'EMFILE' });
      t.ok(processIds().includes(process.pid));
      t.match(readProc('/proc/self/stat'), new RegExp(`^${process.pid} `));
    }
  } finally {
    release();
  }
});
