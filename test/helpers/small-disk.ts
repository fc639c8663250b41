import { spawn, spawnSync } from 'node:child_process';
import { text } from 'node:stream/consumers';
import { COMPILE_CACHE, MAIN } from './cli.ts';

/** For tests that need a disk of their own. */
export const ifMayMount =
  spawnSync('unshare', ['-rm', 'mount', '-t', 'tmpfs', 'none', '/mnt']).status === 0
    ? {}
    : { skip: 'mounting is not allowed here' };

/** Runs shell lines with a tmpfs of `size` mounted on `folder`; `"$0" "$1"` in them is davit. */
export async function onSmallDisk(
  directory: string,
  folder: string,
  size: string,
  lines: readonly string[],
): Promise<{ stdout: string; stderr: string }> {
  const script = [`mount -t tmpfs -o size=${size} none ${folder}`, ...lines].join('\n');
  const child = spawn('unshare', ['-rm', 'sh', '-c', script, process.execPath, MAIN], {
    cwd: directory,
    env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin' },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const [stdout, stderr] = await Promise.all([text(child.stdout), text(child.stderr)]);
  return { stdout, stderr };
}
