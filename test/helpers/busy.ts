import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import type { Test } from 'tap';
import { COMPILE_CACHE } from './cli.ts';
import { collected } from './collected.ts';

export interface BusyWriter {
  /** The ids of the projects that were acknowledged so far. */
  acknowledged(): string[];
  stop(): Promise<void>;
  /** SIGKILL, which leaves a WAL behind. */
  kill(): Promise<void>;
}

/** A process that keeps creating projects in the file; resolves after the first one. Killed with the test. */
export async function busyWriter(t: Test, dbPath: string): Promise<BusyWriter> {
  const script = join(import.meta.dirname, '../cli/acknowledging-writer.ts');
  const child = spawn(process.execPath, [script, dbPath], {
    env: COMPILE_CACHE,
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  const ended = once(child, 'close');
  const printed = collected(child);
  const kill = async () => {
    child.kill('SIGKILL');
    await ended;
  };
  t.teardown(kill);
  await printed.until(/\n/);
  return {
    // What comes after the last line end may be the half of an id.
    acknowledged: () => printed.text().split('\n').slice(0, -1),
    async stop() {
      child.stdin.end();
      await ended;
    },
    kill,
  };
}
