import { type ChildProcess, spawn } from 'node:child_process';
import type { Test } from 'tap';
import { type ProcessIdentity, processIdentity } from '../../src/process-identity.ts';
import { PATH } from './commands.ts';
import { stayAlive } from './effects.ts';

export interface Started {
  child: ChildProcess;
  identity: ProcessIdentity;
  output: NodeJS.ReadableStream;
}

/** A process in a session of its own, as the spawner starts them; ended with the test. */
export async function startProcess(
  t: Test,
  [file, ...rest]: [string, ...string[]],
  deploymentId?: string,
  variables: Record<string, string> = {},
): Promise<Started> {
  stayAlive(t); // who waits for the end of all of them waits by timers alone
  const child = spawn(file, rest, {
    env: { PATH, ...variables, ...(deploymentId === undefined ? {} : { DEPLOY_ID: deploymentId }) },
    stdio: ['ignore', 'pipe', 'inherit'],
    detached: true,
  });
  const identity = processIdentity(child.pid ?? 0);
  if (identity === undefined) throw new Error(`${file} was not started`);
  t.teardown(() => child.kill('SIGKILL'));
  return { child, identity, output: child.stdout };
}
