import { readdirSync } from 'node:fs';
import t from 'tap';
import { exposition } from '../../src/metrics/exposition.ts';
import { processMetrics } from '../../src/metrics/process.ts';
import { openFilesMax } from '../../src/system-limits.ts';
import { useUpFiles } from '../helpers/limits.ts';
import { parseMetrics } from '../helpers/metrics.ts';
import { ifHas } from '../helpers/programs.ts';

processMetrics(0); // opens the spare file descriptor

t.test('metrics of the process are in the units that their names state', async (t) => {
  const openBefore = readdirSync('/proc/self/fd').length - 1; // but for the one that looks
  const { user, system } = process.cpuUsage();
  const { value } = parseMetrics(exposition(processMetrics(1_500)));
  const { user: userAfter, system: systemAfter } = process.cpuUsage();
  t.equal(value('process_open_fds'), openBefore);
  t.equal(value('process_max_fds'), openFilesMax());
  t.equal(value('process_start_time_seconds'), 1.5);
  const cpuSeconds = value('process_cpu_seconds_total');
  t.ok(cpuSeconds >= (user + system) / 1e6 && cpuSeconds <= (userAfter + systemAfter) / 1e6, `${cpuSeconds}`);
});

t.test(
  'they are told also when no file descriptor is left to read them with',
  ifHas('prlimit'),
  async (t) => {
    const release = useUpFiles();
    try {
      const { value } = parseMetrics(exposition(processMetrics(1_500)));
      t.ok(value('process_resident_memory_bytes') > 0);
      t.equal(value('process_open_fds'), 255, 'all but the spare one');
      t.equal(value('process_max_fds'), 256);
    } finally {
      release();
    }
  },
);
