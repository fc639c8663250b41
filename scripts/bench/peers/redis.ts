import { mkdirSync, mkdtempSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Bench } from '../measure.ts';
import { findProgram, guardDirectory, isInstalled, lineOf, start } from '../processes.ts';

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
  const absent = packages.filter((name) => !isInstalled(name));
  if (absent.length > 0) return { missing: `not installed: npm install --no-save ${absent.join(' ')}` };

  const data = join(directory, `redis-${appendFsync}`);
  mkdirSync(data);
  const socketDirectory = mkdtempSync(join(tmpdir(), 'davit-bench-'));
  guardDirectory(socketDirectory);
  const socketPath = join(socketDirectory, 'redis.sock');
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
