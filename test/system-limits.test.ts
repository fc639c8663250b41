import { readFileSync } from 'node:fs';
import t from 'tap';
import { openFilesMax, openFilesProblem, poolThreads, spareFiles } from '../src/system-limits.ts';
import { limitOpenFiles, limitProcesses } from './helpers/limits.ts';
import { ifHas } from './helpers/programs.ts';

t.test('how many files may be open', ifHas('prlimit'), async (t) => {
  const lift = limitOpenFiles(300);
  t.teardown(lift);
  t.equal(openFilesMax(), 300);
});

t.test(
  'too few files for davit and its commands are told, with how many are enough',
  ifHas('prlimit'),
  async (t) => {
    const before = limitOpenFiles(935);
    t.teardown(before);
    t.match(openFilesProblem(2), /^only 935 files may be open: .* allow 936 /);
    const lift = limitOpenFiles(936);
    t.equal(openFilesProblem(2), undefined);
    t.match(openFilesProblem(3), / allow 940 /);
    lift();
  },
);

t.test('what is left of the files is for idle connections', ifHas('prlimit'), async (t) => {
  const expected = [
    [4096, 1580],
    [1024, 44],
    [936, 0],
    [935, 0],
  ] as const;
  for (const [files, spare] of expected) {
    const lift = limitOpenFiles(files);
    t.equal(spareFiles(2), spare, `of ${files}`);
    lift();
  }
});

/** Others start nothing any more below such a limit, not even what lifts it; nor does the root of a user namespace. */
const isRoot =
  /^ *0 +0 +4294967295$/m.test(readFileSync('/proc/self/uid_map', 'latin1')) && process.getuid?.() === 0;
const ifRootHasPrlimit = isRoot ? ifHas('prlimit') : { skip: 'needs root' };

t.test(
  'the pool has 64 threads, and a quarter of what may run where that is less',
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
      lift();
    }
  },
);
