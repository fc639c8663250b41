import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import type { Test } from 'tap';
import { collected } from './collected.ts';

export interface Served {
  url: string;
  processId: number;
  signal(name: NodeJS.Signals): void;
  /** SIGTERM; gives the exit code. */
  stop(): Promise<number | null>;
  /** As a power cut does to a process. */
  kill(): Promise<void>;
}

/** Resolves once this `davit serve` listens; killed with the test, if it has not ended before. */
export async function listening(t: Test, child: ChildProcess): Promise<Served> {
  const ended = once(child, 'exit');
  const end = async (signal: NodeJS.Signals) => {
    child.kill(signal);
    await ended;
  };
  t.teardown(() => end('SIGKILL'));
  const stdout = await collected(child).until(/\n/);
  const url = /^davit listening on (\S+)\n/.exec(stdout)?.[1];
  if (url === undefined) throw new Error(`not the line of a service that listens: ${stdout}`);
  return {
    url,
    processId: child.pid ?? 0,
    signal: (name) => void child.kill(name),
    async stop() {
      await end('SIGTERM');
      return child.exitCode;
    },
    kill: () => end('SIGKILL'),
  };
}
