import { userInfo } from 'node:os';
import type { DeploymentId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import type { DeploymentEnd } from '../store/endings.ts';
import type { ClaimedDeployment } from '../store/queue.ts';
import type { Store } from '../store/store.ts';
import { writePersistently } from '../store/writer.ts';
import {
  type BaseEnvironment,
  COMMAND_PATH,
  commandEnvironment,
  type Outputs,
  readOutputs,
} from './environment.ts';
import { createLogKeeper, type LogKeeper, maskText } from './log.ts';
import { type Run, type RunOutcome, run } from './run.ts';
import type { Spawner } from './spawner.ts';
import { makeWorkspace, type Workspace } from './workspace.ts';

export interface ExecutorOptions {
  store: Store;
  spawner: Spawner;
  effects: Effects;
  logger: Logger;
  /** How many commands run at a time, over all projects. */
  maxConcurrent: number;
  /** From SIGTERM to SIGKILL when a command is stopped. */
  killGraceMs: number;
  /** Where a directory is made for the files of each run. */
  temporaryDirectory: string;
}

export interface Executor {
  /** Starts every deployment that may start now, and stops those that were canceled. */
  tick(): Promise<null>;
  /** Resolves when no command runs. */
  settled(): Promise<void>;
  /** Starts nothing any more; gives running commands `graceMs`, then stops them as `interrupted`. */
  stop(graceMs: number): Promise<void>;
}

const LOG_HEAD_BYTES = 256 * 1024;
const LOG_TAIL_BYTES = 5 * 1024 * 1024;

/** Carries deployments out: claim, run, finish. */
export function createExecutor(options: ExecutorOptions): Executor {
  const { store, spawner, effects, logger, maxConcurrent, killGraceMs, temporaryDirectory } = options;
  const { reads, writer } = store;
  const underWay = new Map<DeploymentId, { stop: Run['stop']; ended: Promise<void> }>();
  let stopping = false;

  return { tick, settled, stop };

  async function tick(): Promise<null> {
    for (const { id, status } of reads.deployments.unfinished()) {
      if (status === 'canceling') underWay.get(id)?.stop('user');
    }
    while (!stopping && underWay.size < maxConcurrent) {
      const claimed = await writer.write('deployments.claim', undefined);
      if (claimed === null) break;
      begin(claimed);
    }
    return null;
  }

  async function settled(): Promise<void> {
    await Promise.all([...underWay.values()].map(({ ended }) => ended));
  }

  async function stop(graceMs: number): Promise<void> {
    stopping = true;
    const cancelStop = effects.after(graceMs, () => {
      for (const { stop } of underWay.values()) stop('shutdown');
    });
    await settled();
    cancelStop();
  }

  function begin(claimed: ClaimedDeployment): void {
    const log = createLogKeeper({
      headBytes: LOG_HEAD_BYTES,
      tailBytes: LOG_TAIL_BYTES,
      secrets: Object.values(claimed.variables),
      effects,
      write: (append) => writePersistently(writer, 'logs.append', { id: claimed.id, ...append }, effects),
    });
    const stopRequest = Promise.withResolvers<Parameters<Run['stop']>[0]>();
    const ended = carryOut(claimed, log, stopRequest.promise)
      .catch((error) => {
        logger.fatal(
          { err: error, deployment_id: claimed.id },
          'the end of a deployment could not be recorded',
        );
      })
      .finally(() => underWay.delete(claimed.id));
    underWay.set(claimed.id, { stop: stopRequest.resolve, ended });
  }

  async function carryOut(
    claimed: ClaimedDeployment,
    log: LogKeeper,
    stopRequest: Promise<Parameters<Run['stop']>[0]>,
  ): Promise<void> {
    logger.info(
      { deployment_id: claimed.id, project_id: claimed.project_id, ref: claimed.ref },
      'deployment started',
    );
    const { outcome, outputs } = await runInWorkspace(claimed, log, stopRequest);
    await log.end();
    const end = endOf(claimed.id, outcome, outputs);
    await writePersistently(writer, 'deployments.finish', end, effects);
    logger.info({ deployment_id: claimed.id, status: end.status, reason: end.reason }, 'deployment ended');
  }

  async function runInWorkspace(
    claimed: ClaimedDeployment,
    log: LogKeeper,
    stopRequest: Promise<Parameters<Run['stop']>[0]>,
  ): Promise<{ outcome: RunOutcome; outputs: Record<string, string> }> {
    let workspace: Workspace;
    try {
      workspace = await makeWorkspace(temporaryDirectory);
    } catch (error) {
      return {
        outcome: { kind: 'notStarted', cause: `no directory for this run: ${messageOf(error)}` },
        outputs: {},
      };
    }
    try {
      const running = start(claimed, workspace, log);
      void stopRequest.then(running.stop);
      const outcome = await running.outcome;
      const { outputs, notes } = readOutputs(workspace.outputFile);
      for (const note of notes) await log.append(Buffer.from(`davit: ${note}\n`));
      return { outcome, outputs: masked(outputs, Object.values(claimed.variables)) };
    } finally {
      await workspace
        .remove()
        .catch((error) => logger.warn({ err: error }, 'a directory of a run is left behind'));
    }
  }

  function start(claimed: ClaimedDeployment, workspace: Workspace, log: LogKeeper): Run {
    return run(
      {
        deploymentId: claimed.id,
        command: claimed.command,
        directory: claimed.directory ?? workspace.directory,
        environment: commandEnvironment(baseEnvironment(temporaryDirectory), claimed.variables, {
          deploymentId: claimed.id,
          ref: claimed.ref,
          projectId: claimed.project_id,
          projectName: claimed.project_name,
          previousRef: claimed.previous_ref,
          outputFile: workspace.outputFile,
        }),
        timeoutMs: claimed.timeout_ms,
        idleTimeoutMs: claimed.idle_timeout_ms,
        killGraceMs,
      },
      {
        spawner,
        effects,
        onStarted: (identity) =>
          writePersistently(writer, 'deployments.setProcess', { id: claimed.id, ...identity }, effects),
        onOutput: (bytes) => log.append(bytes),
        onStuck: (processIds) =>
          logger.error(
            { deployment_id: claimed.id, process_ids: processIds },
            'processes of a deployment cannot be ended',
          ),
      },
    );
  }
}

/** Whoever may read outputs need not be allowed to read logs, and neither shows a secret. */
function masked(outputs: Outputs['outputs'], secrets: string[]): Outputs['outputs'] {
  return Object.fromEntries(Object.entries(outputs).map(([name, value]) => [name, maskText(value, secrets)]));
}

function baseEnvironment(temporaryDirectory: string): BaseEnvironment {
  return { PATH: COMMAND_PATH, HOME: homeDirectory(), LANG: 'C.UTF-8', TMPDIR: temporaryDirectory };
}

/** From the password database: the service's own HOME may be anybody's. */
function homeDirectory(): string {
  try {
    return userInfo().homedir || '/';
  } catch {
    return '/'; // a user without an entry, in a container as a rule
  }
}

function endOf(id: DeploymentId, outcome: RunOutcome, outputs: Outputs['outputs']): DeploymentEnd {
  const none = { id, message: null, exitCode: null, signal: null, outputs };
  switch (outcome.kind) {
    case 'exited':
      return outcome.exitCode === 0
        ? { ...none, status: 'succeeded', reason: null, exitCode: 0 }
        : { ...none, status: 'failed', reason: 'exit_code', exitCode: outcome.exitCode };
    case 'signalled':
      return { ...none, status: 'failed', reason: 'signal', signal: outcome.signal };
    case 'timedOut':
      return { ...none, status: 'failed', reason: 'timeout' };
    case 'idleTimedOut':
      return { ...none, status: 'failed', reason: 'idle_timeout' };
    case 'notStarted':
      return { ...none, status: 'failed', reason: 'spawn_failed', message: outcome.cause };
    case 'interrupted':
      return {
        ...none,
        status: 'failed',
        reason: 'interrupted',
        message: 'davit stopped while this ran; it may have done a part of its work',
      };
    case 'canceled':
      return { ...none, status: 'canceled', reason: 'user' };
    default:
      return outcome satisfies never;
  }
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
