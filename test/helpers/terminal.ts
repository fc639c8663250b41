import { spawnSync } from 'node:child_process';
import { COMPILE_CACHE, MAIN, type Place } from './cli.ts';

/** For tests that need a terminal: script(1) makes one. */
export const needsTerminal =
  spawnSync('script', ['--version']).status === 0 ? {} : { skip: 'needs script(1)' };

/** `davit` with these words on a terminal of its own, 80 columns wide; gives what stood on it and the exit code. */
export function onTerminal(
  { directory }: Place,
  words: readonly string[],
  env: Record<string, string> = {},
): { shown: string; exitCode: number | null } {
  const line = [process.execPath, MAIN, ...words].map((word) => `'${word}'`).join(' ');
  const { stdout, status } = spawnSync('script', ['-qec', `stty cols 80; ${line}`, '/dev/null'], {
    cwd: directory,
    env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', TERM: 'xterm-256color', ...env },
    input: '',
    encoding: 'utf8',
  });
  return { shown: stdout.replaceAll('\r\n', '\n'), exitCode: status };
}
