import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { rmSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { pathToFileURL } from 'node:url';
import type { Test } from 'tap';
import { COMPILE_CACHE, MAIN } from './cli.ts';
import { untilFile } from './deploy-client.ts';
import { temporaryDirectory } from './store.ts';

const PRELOAD = join(import.meta.dirname, '../fixtures/hangs-once-copied.ts');

export interface Copying {
  child: ChildProcess;
  /** The exit code and the signal that ended it. */
  ended: Promise<unknown[]>;
  stderr: Promise<string>;
  goOn(): void;
}

/** `davit` with these words, once it has made a copy, which it has not checked; it waits there. */
export async function copying(t: Test, directory: string, words: readonly string[]): Promise<Copying> {
  const elsewhere = temporaryDirectory(t);
  const copied = join(elsewhere, 'copied');
  const isCopied = untilFile(elsewhere, 'copied');
  const child = spawn(process.execPath, [MAIN, ...words], {
    cwd: directory,
    env: { ...COMPILE_CACHE, NODE_OPTIONS: `--import=${pathToFileURL(PRELOAD)}`, TEST_COPIED: copied },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  const ended = once(child, 'exit');
  const stderr = text(child.stderr);
  await isCopied;
  return { child, ended, stderr, goOn: () => rmSync(copied) };
}
