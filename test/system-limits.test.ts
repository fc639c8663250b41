import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import t from 'tap';
import { startService } from '../src/app.ts';
import { realEffects } from '../src/effects.ts';
import {
  fileSizeProblem,
  lookupThreads,
  openFilesMax,
  openFilesProblem,
  poolThreads,
  processesProblem,
  reservedMemoryProblem,
  spareFiles,
} from '../src/system-limits.ts';
import { COMPILE_CACHE, MAIN, place } from './helpers/cli.ts';
import { limitFileSize, limitOpenFiles, limitProcesses } from './helpers/limits.ts';
import { ifMayUnshare, runInNamespace } from './helpers/namespaces.ts';
import { ifMayBeNobody } from './helpers/nobody.ts';
import { ifHas } from './helpers/programs.ts';
import { CONFIG } from './helpers/whole-service.ts';

t.test('openFilesMax is the limit of the process', ifHas('prlimit'), async (t) => {
  const lift = limitOpenFiles(300);
  t.teardown(lift);
  t.equal(openFilesMax(), 300);
});

t.test(
  'too few open files for davit and its commands are reported with how many it takes',
  ifHas('prlimit'),
  async (t) => {
    const before = limitOpenFiles(949);
    t.teardown(before);
    t.match(openFilesProblem(2), /^only 949 files may be open: .* allow 950 /);
    const lift = limitOpenFiles(950);
    t.equal(openFilesProblem(2), undefined);
    t.match(openFilesProblem(3), / allow 954 /);
    lift();
  },
);

t.test(
  'davit does not start if not even the files that it has open itself are allowed, and says so',
  ifHas('prlimit'),
  async (t) => {
    const { dbPath } = place(t);
    const { status, stderr } = serveUnder('--nofile=66:66', dbPath);
    t.equal(status, 1);
    t.match(stderr, /^error: only 66 files may be open: davit has 67 open itself; allow 950 \(.*\n$/);
    t.notOk(existsSync(dbPath));
  },
);

t.test(
  'davit does not start with so little memory to reserve that V8 would abort it',
  ifHas('prlimit'),
  async (t) => {
    const { dbPath } = place(t);
    const limits = [
      [
        '--as=3900000000',
        /^error: only 3900000000 bytes of address space are allowed, .*: allow 5000000000 \(.*\n$/,
      ],
      [
        '--data=2500000000',
        /^error: only 2500000000 bytes of data are allowed, .*: allow 3500000000 \(.*\n$/,
      ],
    ] as const;
    for (const [limit, message] of limits) {
      const { status, stderr } = serveUnder(limit, dbPath);
      t.equal(status, 1, limit);
      t.match(stderr, message);
      t.notOk(existsSync(dbPath));
    }
    t.equal(reservedMemoryProblem(), undefined, 'normally there is no such limit');
  },
);

t.test('a limit for the size of files is reported', ifHas('prlimit'), async (t) => {
  t.equal(fileSizeProblem(), undefined);
  t.teardown(limitFileSize(50_000_000));
  t.match(fileSizeProblem(), /^files may have only 50000000 bytes: .* allow any size \(ulimit -f, /);
});

t.test('files that are left over are for idle connections', ifHas('prlimit'), async (t) => {
  const expected = [
    [1024, 37], // more may be beyond the hard limit
    [1000, 25],
    [950, 0],
    [949, 0],
  ] as const;
  for (const [files, spare] of expected) {
    const lift = limitOpenFiles(files);
    t.equal(spareFiles(2), spare, `of ${files}`);
    lift();
  }
});

const MODULE = join(import.meta.dirname, '../src/system-limits.ts');

t.test(
  'processes that the user runs already are not left for davit',
  { ...ifHas('prlimit'), ...ifMayBeNobody(MODULE, process.execPath) },
  async (t) => {
    const asNobody = { uid: 65_534 };
    const others = Array.from({ length: 20 }, () => spawn('sleep', ['600'], asNobody));
    t.teardown(() => {
      for (const other of others) other.kill();
    });
    await Promise.all(others.map((other) => once(other, 'spawn')));
    const script = `import('${pathToFileURL(MODULE)}').then(({ processesLeft }) => console.log(processesLeft()))`;
    const words = ['--nproc=500:', process.execPath, '--no-warnings', '--eval', script];
    const left = Number(execFileSync('prlimit', words, asNobody));
    t.ok(left > 0 && left < 480, `${left} of 500`);
  },
);

t.test('processes that a cgroup does not allow are not left for davit', ifMayUnshare, async (t) => {
  const script = `
    mount -t tmpfs none /sys/fs/cgroup
    mkdir -p "/sys/fs/cgroup$1"
    echo "$2" >"/sys/fs/cgroup$1/pids.max"
    echo 10 >"/sys/fs/cgroup$1/pids.current"
    echo "$0" >/sys/fs/cgroup/own
    mount --bind /sys/fs/cgroup/own /proc/$$/cgroup
    exec "$3" --eval "$4"`;
  const look = `import('${pathToFileURL(MODULE)}').then(({ processesLeft }) => console.log(processesLeft()))`;
  const left = (own: string, folder: string, max: string) => {
    const words = ['sh', '-euc', script, own, folder, max, process.execPath, look];
    const { stdout, stderr } = runInNamespace(...words);
    return stdout === '' ? stderr : Number(stdout);
  };
  t.equal(left('0::/a.slice/davit.service', '/a.slice/davit.service', '30'), 20);
  t.equal(left('0::/seen/from/the/host', '', '30'), 20, 'that of a container, which sees it as the root');
  t.equal(left('9:cpu:/x\n4:pids:/docker/c:1\n0::/', '/pids/docker/c:1', '30'), 20, 'version 1');
  const unlimited = left('0::/', '', 'max');
  t.ok(Number(unlimited) > 20, `${unlimited}`);
  t.equal(left('4:cpu:/docker', '/docker', '30'), unlimited, 'that of another controller does not count');
});

/** Below such a limit only the real root can start anything, such as what lifts it; not the root of a user namespace. */
const isRoot =
  /^ *0 +0 +4294967295$/m.test(readFileSync('/proc/self/uid_map', 'latin1')) && process.getuid?.() === 0;
const ifRootHasPrlimit = isRoot ? ifHas('prlimit') : { skip: 'needs root' };

t.test(
  'the pool has 64 threads, or a quarter of the processes allowed if that is less',
  ifRootHasPrlimit,
  async (t) => {
    const expected = [
      [300, 64], // more may be beyond the hard limit
      [256, 64],
      [100, 25],
      [10, 4],
    ] as const;
    for (const [processes, threads] of expected) {
      const lift = limitProcesses(processes);
      t.equal(poolThreads(), threads, `of ${processes}`);
      t.equal(lookupThreads(), Math.ceil(threads / 2));
      lift();
    }
  },
);

t.test('davit does not start if too few threads are allowed, and says so', ifRootHasPrlimit, async (t) => {
  const before = limitProcesses(7);
  t.teardown(before);
  t.match(processesProblem(), /^only 7 more processes and threads may be started: allow 8, /);
  const { dbPath } = place(t);
  const start = startService({ ...CONFIG, dbPath }, realEffects, () => undefined);
  await t.rejects(start, { code: 'conflict', message: /^only 7 more/ });
  t.notOk(existsSync(dbPath));
  const lift = limitProcesses(8);
  t.equal(processesProblem(), undefined);
  lift();
});

/** `davit serve` under a limit, an option of prlimit. */
function serveUnder(limit: string, dbPath: string) {
  const words = [limit, process.execPath, MAIN, 'serve', '--db', dbPath];
  return spawnSync('prlimit', words, { env: COMPILE_CACHE, encoding: 'utf8' });
}
