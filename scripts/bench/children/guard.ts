import { rmSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';

/*
 * Outlives the benchmark for a moment, whatever ended that: ends the processes that it had not stopped yet, and removes
 * its data.
 */

export type GuardRequest =
  | { kind: 'started'; processId: number; signal: NodeJS.Signals }
  | { kind: 'ended'; processId: number }
  | { kind: 'directory'; directory: string };

const PATIENCE_MS = 5_000;

const processes = new Map<number, NodeJS.Signals>();
const directories = new Set<string>();

process.on('message', (request: GuardRequest) => {
  switch (request.kind) {
    case 'started':
      processes.set(request.processId, request.signal);
      return;
    case 'ended':
      processes.delete(request.processId);
      return;
    case 'directory':
      directories.add(request.directory);
      return;
    default:
      request satisfies never;
  }
});
process.on('disconnect', async () => {
  for (const [processId, signal] of processes) send(processId, signal);
  const untilMs = performance.now() + PATIENCE_MS;
  while (performance.now() < untilMs && [...processes.keys()].some((processId) => send(processId, 0))) {
    await delay(50);
  }
  for (const processId of processes.keys()) send(processId, 'SIGKILL');
  for (const directory of directories) {
    rmSync(directory, { recursive: true, force: true, maxRetries: 20, retryDelay: 100 });
  }
});

/** Sends a signal; 0 sends none. Whether there is such a process. */
function send(processId: number, signal: NodeJS.Signals | 0): boolean {
  try {
    return process.kill(processId, signal);
  } catch {
    return false;
  }
}
