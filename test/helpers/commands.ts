import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { pino } from 'pino';
import type { Test } from 'tap';
import { DEPLOYMENT_MARKER } from '../../src/deploy/environment.ts';
import { loadPosix } from '../../src/deploy/posix.ts';
import { findMarked } from '../../src/deploy/processes.ts';
import { type Run, type RunRequest, run } from '../../src/deploy/run.ts';
import { createSpawner, type Spawner } from '../../src/deploy/spawner.ts';
import { createWorkspaces, type Workspaces, type WorkspacesOptions } from '../../src/deploy/workspace.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { openFilesOf } from '../../src/proc.ts';
import { type ProcessIdentity, readStat } from '../../src/process-identity.ts';
import { stayAlive } from './effects.ts';
import { temporaryDirectory } from './store.ts';

export const posix = await loadPosix();

/** The path of a program of test/fixtures/commands. */
export function fixture(name: string): string {
  return join(import.meta.dirname, '../fixtures/commands', name);
}

export const PATH = process.env['PATH'] ?? '/usr/bin:/bin';

/** A real spawner, closed when the test has ended. */
export function testSpawner(t: Test, adopts = false): Spawner {
  stayAlive(t);
  const spawner = createSpawner(posix, realEffects, adopts);
  t.teardown(() => spawner.close());
  return spawner;
}

/** The files of runs, below `parent`, of the service that has `lockPath`. */
export function testWorkspaces(
  t: Test,
  { parent = temporaryDirectory(t), lockPath = parent, ...changes }: Partial<WorkspacesOptions> = {},
): Workspaces {
  return createWorkspaces({
    parent,
    lockPath,
    hasOrphans: () => false,
    effects: realEffects,
    logger: pino({ level: 'silent' }),
    ...changes,
  });
}

export interface TestRun extends Run {
  deploymentId: string;
  started: Promise<ProcessIdentity>;
  output(): string;
  outputBytes(): Buffer;
  /** Resolves when it has printed `text`. */
  printed(text: string): Promise<void>;
}

let lastDeployment = 0;

/** The id of a deployment that no other process of this machine carries. */
export function newDeploymentId(): string {
  lastDeployment += 1;
  return `dpl_test${process.pid}x${lastDeployment}`;
}

/**
 * Runs a command for real. When the test has ended, whatever carries its marker must be gone: what a test leaves
 * on purpose it ends itself.
 */
export function startRun(
  t: Test,
  spawner: Spawner,
  command: readonly [string, ...string[]],
  changes: Partial<Omit<RunRequest, 'environment'>> & {
    environment?: Record<string, string>;
    onOutput?: (bytes: Uint8Array) => Promise<void>;
    effects?: Effects;
  } = {},
): TestRun {
  const deploymentId = newDeploymentId();
  const started = Promise.withResolvers<ProcessIdentity>();
  const waiting = new Set<() => void>();
  let bytes = Buffer.alloc(0);
  const { onOutput, effects = realEffects, environment = { PATH }, ...request } = changes;
  const running = run(
    {
      command,
      directory: '/',
      environment: { ...environment, [DEPLOYMENT_MARKER]: deploymentId },
      timeoutMs: null,
      idleTimeoutMs: null,
      killGraceMs: 10_000,
      ...request,
    },
    {
      spawner,
      effects,
      onStarted: async (identity) => started.resolve(identity),
      async onOutput(piece) {
        if (onOutput !== undefined) return await onOutput(piece);
        bytes = Buffer.concat([bytes, piece]);
        for (const look of waiting) look();
      },
    },
  );
  t.teardown(async () => {
    running.stop('shutdown');
    await running.outcome.catch(() => undefined);
    const left = await marked(deploymentId);
    if (left.length > 0) throw new Error(`left running: ${JSON.stringify(left)}`);
  });
  return {
    ...running,
    deploymentId,
    started: started.promise,
    output: () => bytes.toString(),
    outputBytes: () => bytes,
    printed: (text) =>
      new Promise((resolve) => {
        const look = () => {
          if (bytes.includes(text)) resolve();
        };
        waiting.add(look);
        look();
      }),
  };
}

export async function marked(deploymentId: string): Promise<ProcessIdentity[]> {
  return (await findMarked(new Set([deploymentId]))).get(deploymentId) ?? [];
}

/** Polls until `condition` holds: for changes in another process that give no event. */
export async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await nextTurn();
}

/** Named pipes, to let a command wait for the test and the test for a command. */
export function namedPipe(t: Test): string {
  const path = join(temporaryDirectory(t), 'pipe');
  execFileSync('mkfifo', [path]);
  return path;
}

/** Those that its main thread started, proc_tid_children(5). */
export function childrenOf(processId: number | undefined): number[] {
  const children = readFileSync(`/proc/${processId}/task/${processId}/children`, 'utf8');
  return children.trim().split(' ').filter(Boolean).map(Number);
}

/** One letter, proc_pid_stat(5); undefined when there is no such process. */
export function stateOf(processId: number): string | undefined {
  return readStat(processId)?.state;
}

/** How many ends of pipes this process has open. */
export function openPipes(): number {
  return openFilesOf(process.pid).filter((path) => path.startsWith('pipe:')).length;
}
