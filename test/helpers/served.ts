import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import type { Test } from 'tap';
import { COMPILE_CACHE, MAIN } from './cli.ts';
import { collected } from './collected.ts';
import { listening, type Served } from './listening.ts';
import { temporaryDirectory } from './store.ts';

export interface ServedWithLog extends Served {
  /** All that came on stderr so far. */
  stderr(): string;
  /** Each line of that, parsed. */
  log(): Record<string, unknown>[];
  /** Resolves when more has come. Rejects if it ended instead. */
  more(): Promise<void>;
  /** Resolves once a line with this message is in the log; gives the last such. */
  logged(message: string | RegExp): Promise<Record<string, unknown>>;
}

/** `davit serve` on `./davit.db` of this directory, ready; killed with the test, if it has not ended before. */
export async function serve(t: Test, directory: string, ...options: string[]): Promise<Served> {
  return listening(t, spawnServe(t, directory, 'inherit', {}, ['--log-level', 'error', ...options]));
}

/** Resolves once the dispatcher of a service has opened the file, too. */
export async function opened({ url }: Pick<Served, 'url'>): Promise<void> {
  await fetch(`${url}/readyz`);
}

/** The same as `serve`, with its log and with more in its environment. */
export async function serveWithLog(
  t: Test,
  directory: string,
  { options = [], env = {} }: { options?: readonly string[]; env?: Record<string, string> } = {},
): Promise<ServedWithLog> {
  const child = spawnServe(t, directory, 'pipe', env, options);
  const ended = once(child, 'exit');
  const stderr = collected(child, 'stderr').text;
  // What comes after the last line end may be the half of a line.
  const log = () =>
    stderr()
      .split('\n')
      .slice(0, -1)
      .map((line) => JSON.parse(line) as Record<string, unknown>);
  return {
    ...(await listening(t, child)),
    stderr,
    log,
    more,
    async logged(message) {
      const isMeant = ({ msg }: Record<string, unknown>) =>
        typeof message === 'string' ? msg === message : message.test(String(msg));
      for (;;) {
        const found = log().findLast(isMeant);
        if (found !== undefined) return found;
        await more();
      }
    },
  };

  async function more(): Promise<void> {
    if (child.stderr === null || child.exitCode !== null) throw new Error('davit serve has ended');
    await Promise.race([once(child.stderr, 'data'), ended]);
  }
}

/** `davit serve` in this directory, on a free port unless `options` say another, just started. */
export function spawnServe(
  t: Test,
  directory: string,
  stderr: 'pipe' | 'inherit',
  env: Record<string, string>,
  options: readonly string[],
): ChildProcess {
  return spawn(process.execPath, [MAIN, 'serve', '--listen', '127.0.0.1:0', ...options], {
    cwd: directory,
    // One that is killed leaves the files of its commands in it.
    env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', TMPDIR: temporaryDirectory(t), ...env },
    stdio: ['ignore', 'pipe', stderr],
  });
}
