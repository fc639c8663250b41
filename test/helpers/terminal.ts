import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import type { Test } from 'tap';
import { COMPILE_CACHE, MAIN, type Place } from './cli.ts';
import { collected } from './collected.ts';
import { ifHas } from './programs.ts';

/** For tests that need a terminal: script(1) makes one. */
export const needsTerminal = ifHas('script');

/**
 * `davit` with these words on a terminal of its own, 80 columns wide, on which `typed` is typed; gives what stood on it
 * and the exit code.
 */
export function onTerminal(
  { directory }: Pick<Place, 'directory'>,
  words: readonly string[],
  { env = {}, typed = '' }: { env?: Record<string, string>; typed?: string } = {},
): { shown: string; exitCode: number | null } {
  const line = [process.execPath, MAIN, ...words].map((word) => `'${word}'`).join(' ');
  const { stdout, status } = spawnSync('script', ['-qec', `stty cols 80; ${line}`, '/dev/null'], {
    cwd: directory,
    env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', TERM: 'xterm-256color', ...env },
    input: typed,
    encoding: 'utf8',
  });
  return { shown: stdout.replaceAll('\r\n', '\n'), exitCode: status };
}

/**
 * What a shell shows on a terminal of its own on which these keys are typed, each after the answer to those before it;
 * then it is told to exit.
 */
export async function shownBy(
  t: Test,
  directory: string,
  command: string,
  path: string,
  typed: readonly (readonly [keys: string, answer: RegExp])[],
): Promise<string> {
  const child = spawn('script', ['--quiet', '--return', '--command', command, '/dev/null'], {
    cwd: directory,
    env: { PATH: path, TERM: 'xterm', HOME: directory },
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  const ended = once(child, 'close');
  t.teardown(async () => {
    child.kill('SIGKILL');
    await ended;
  });
  const shown = collected(child);
  for (const [keys, answer] of typed) {
    const from = shown.text().length;
    child.stdin.write(keys);
    await shown.until((text) => answer.test(text.slice(from)));
  }
  child.stdin.write('\u0015 exit\n');
  await ended;
  return shown.text();
}
