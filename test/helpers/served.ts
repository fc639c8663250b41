import { spawn } from 'node:child_process';
import { once } from 'node:events';
import type { Test } from 'tap';
import { COMPILE_CACHE, MAIN } from './cli.ts';

export interface Served {
  url: string;
  processId: number;
  /** SIGTERM; gives the exit code. */
  stop(): Promise<number | null>;
  /** As a power cut does to a process. */
  kill(): Promise<void>;
}

/** `davit serve` on `./davit.db` of this directory, ready; killed with the test, if it has not ended before. */
export async function serve(t: Test, directory: string, ...options: string[]): Promise<Served> {
  const words = ['serve', '--listen', '127.0.0.1:0', '--log-level', 'error', ...options];
  const child = spawn(process.execPath, [MAIN, ...words], {
    cwd: directory,
    env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin' },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const ended = once(child, 'exit');
  const end = async (signal: NodeJS.Signals) => {
    child.kill(signal);
    await ended;
  };
  t.teardown(() => end('SIGKILL'));
  let stdout = '';
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    stdout += text;
  });
  while (!stdout.includes('\n')) {
    if (child.exitCode !== null) throw new Error('davit serve ended before it listened');
    await Promise.race([once(child.stdout, 'data'), ended]);
  }
  return {
    url: /^davit listening on (\S+)\n/.exec(stdout)?.[1] ?? '',
    processId: child.pid ?? 0,
    async stop() {
      await end('SIGTERM');
      return child.exitCode;
    },
    kill: () => end('SIGKILL'),
  };
}
