import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import type { Bench } from '../measure.ts';
import { findProgram, lineOf, packagesMissing, socketDirectory, start } from '../processes.ts';

/**
 * A Redis of the measure's own, on a Unix socket, with an append-only file; or why it cannot take part. With `always`,
 * what it has acknowledged survives a power cut, as with davit; with `everysec`, all but the last second does.
 */
export async function startRedis(
  { directory, defer }: Bench,
  appendFsync: 'always' | 'everysec',
  ...packages: string[]
): Promise<{ socketPath: string } | { missing: string }> {
  const server = findProgram('redis-server');
  if (server === undefined) return { missing: 'redis-server is not installed: apt-get install redis-server' };
  const missing = packagesMissing(packages);
  if (missing !== undefined) return { missing };

  const data = join(directory, `redis-${appendFsync}`);
  mkdirSync(data);
  const socketPath = join(socketDirectory(), 'redis.sock');
  const words = [
    ...['--port', '0'],
    ...['--unixsocket', socketPath],
    ...['--dir', data],
    ...['--save', ''],
    ...['--appendonly', 'yes'],
    ...['--appendfsync', appendFsync],
  ];
  const running = start(server, words, { stdio: ['ignore', 'pipe', 'ignore'] });
  defer(() => running.stop());
  await lineOf(running, /ready to accept connections/i);
  return { socketPath };
}
