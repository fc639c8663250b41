import t from 'tap';
import { openFilesMax, poolThreads } from '../src/system-limits.ts';
import { limitOpenFiles, limitProcesses } from './helpers/limits.ts';
import { ifHas } from './helpers/programs.ts';

t.test('how many files may be open', ifHas('prlimit'), async (t) => {
  const lift = limitOpenFiles(300);
  t.teardown(lift);
  t.equal(openFilesMax(), 300);
});

/** Others start nothing any more below such a limit, not even what lifts it. */
const ifRootHasPrlimit = process.getuid?.() === 0 ? ifHas('prlimit') : { skip: 'needs root' };

t.test(
  'the pool has 64 threads, and a quarter of what may run where that is less',
  ifRootHasPrlimit,
  async (t) => {
    const expected = [
      [96_000, 64],
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
