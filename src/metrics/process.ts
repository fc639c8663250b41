import { readdirSync } from 'node:fs';
import { type Metric, readMetric } from '../metric-cells.ts';
import { withSpare } from '../proc.ts';
import { openFilesMax } from '../system-limits.ts';

/**
 * The process metrics that Prometheus clients export, by the names that dashboards expect, for all threads together.
 * See proc(5).
 */
export function processMetrics(startedAtMs: number): Metric[] {
  const { user, system } = process.cpuUsage();
  return [
    readMetric(
      'counter',
      { name: 'process_cpu_seconds_total', help: 'User and system CPU time of the service.' },
      [{ value: (user + system) / 1e6 }],
    ),
    readMetric('gauge', { name: 'process_resident_memory_bytes', help: 'Resident memory of the service.' }, [
      { value: withSpare(process.memoryUsage.rss) },
    ]),
    readMetric('gauge', { name: 'process_open_fds', help: 'Open file descriptors.' }, [
      { value: withSpare(openDescriptors) },
    ]),
    readMetric('gauge', { name: 'process_max_fds', help: 'How many file descriptors may be open.' }, [
      { value: openFilesMax() },
    ]),
    readMetric(
      'gauge',
      { name: 'process_start_time_seconds', help: 'When the service was started, since 1970.' },
      [{ value: startedAtMs / 1000 }],
    ),
  ];
}

/** Without the descriptor that reading them takes. */
function openDescriptors(): number {
  return readdirSync('/proc/self/fd').length - 1;
}
