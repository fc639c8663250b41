import type { DeploymentId, ProjectId, ProjectStatus } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { codeOf, isUnavailable, messageOf } from '../errors.ts';
import type { Logger } from '../logger.ts';
import type { ProcessIdentity } from '../process-identity.ts';
import type { InputOf, OutputOf } from '../store/operations.ts';
import type { ClaimedDeployment } from '../store/queue.ts';
import type { Store } from '../store/store.ts';
import { writePersistently } from '../store/writer.ts';
import { baseEnvironment, commandEnvironment } from './environment.ts';
import { createLogKeeper, type LogKeeper } from './log.ts';
import { endOf, type Outcome } from './outcome.ts';
import { readOutputs } from './outputs.ts';
import { type Run, type RunOutcome, run, type StopRequest } from './run.ts';
import { notStarted, type Spawner } from './spawner.ts';
import type { Workspace, Workspaces } from './workspace.ts';

export interface ExecutorOptions {
  store: Store;
  spawner: Spawner;
  effects: Effects;
  logger: Logger;
  /** How many commands run at a time, over all projects. */
  maxConcurrent: number;
  /** From SIGTERM to SIGKILL when a command is stopped. */
  killGraceMs: number;
  workspaces: Workspaces;
}

export interface Executor {
  /** Starts every deployment that may start now, and stops those that were canceled. */
  tick(): Promise<null>;
  /** Resolves when no command runs. */
  settled(): Promise<void>;
  /** Starts no more deployments; gives running commands `graceMs` to end, then stops them as `interrupted`. */
  stop(graceMs: number): Promise<void>;
}

/**
 * A command that ends sooner gets no commit that records its process: that commit would be half of what the command
 * costs. After a crash, recovery finds an unrecorded process by its marker.
 */
const RECORD_PROCESS_AFTER_MS = 20;

/**
 * How many deployments a tick claims at a time. Each tick claims for all free slots, though nothing may be queued: with
 * 100,000 slots these claims filled the writer's queue.
 */
const CLAIMS_MAX = 64;

const TRY_AGAIN_EVERY_MS = 1_000;

interface RunResult<End = Outcome> {
  outcome: End;
  outputs: Record<string, string>;
}

/**
 * Carries deployments out: claim, run, finish. The end of one and the claim of the next are handed to the writer
 * together, so that they share one commit: with 1,000 deployments of /bin/true, commits take most of the time.
 */
export function createExecutor(options: ExecutorOptions): Executor {
  const { store, spawner, effects, logger, maxConcurrent, killGraceMs, workspaces } = options;
  const { reads, writer } = store;
  const base = baseEnvironment(workspaces.parent);
  const underWay = new Map<DeploymentId, Run['stop']>();
  /** All that must be over before the database may be closed: runs, claims, records. */
  const pending = new Set<Promise<unknown>>();
  let claiming = 0;
  let stopping = false;
  let isGraceOver = false;
  /** Runs that wait until a shortage is over, or for a slot after that: until they have begun, no other one begins. */
  const waiting = new Set<DeploymentId>();
  /** Of runs that waited, those that wait on as their project is paused: they take no slot. */
  const setAside = new Set<DeploymentId>();

  return { tick, settled, stop };

  async function tick(): Promise<null> {
    for (const { id, status } of reads.deployments.running()) {
      if (status === 'canceling') underWay.get(id)?.('user');
    }
    await claimAll();
    return null;
  }

  async function settled(): Promise<void> {
    while (pending.size > 0) await Promise.allSettled(pending);
  }

  async function stop(graceMs: number): Promise<void> {
    stopping = true;
    logger.info({ running_deployments: underWay.size, grace_ms: graceMs }, 'stopping');
    const cancelStop = effects.after(graceMs, () => {
      isGraceOver = true;
      for (const stopRun of underWay.values()) stopRun('shutdown');
    });
    await settled();
    cancelStop();
  }

  /** One claim for each free slot, all in one commit; batch after batch of them, if every claim found a deployment. */
  async function claimAll(): Promise<void> {
    if (waiting.size > 0) return;
    const claims: Promise<boolean>[] = [];
    while (!stopping && claims.length < CLAIMS_MAX && hasFreeSlot()) {
      claims.push(claim());
    }
    const found = await Promise.all(claims);
    if (found.length === CLAIMS_MAX && found.every(Boolean)) await claimAll();
  }

  function hasFreeSlot(): boolean {
    return underWay.size - setAside.size + claiming < maxConcurrent;
  }

  /** Claims and begins the next deployment; false: there is none. */
  async function claim(): Promise<boolean> {
    claiming += 1;
    try {
      const claimed = await track(writer.write('deployments.claim', undefined));
      if (claimed !== null) begin(claimed);
      return claimed !== null;
    } finally {
      claiming -= 1;
    }
  }

  function begin(claimed: ClaimedDeployment): void {
    underWay.set(claimed.id, () => undefined);
    logger.info(
      { deployment_id: claimed.id, project_id: claimed.project_id, ref: claimed.ref },
      'deployment started',
    );
    track(carryOut(claimed)).catch((error) => {
      underWay.delete(claimed.id); // the command has ended, though its end is not recorded: the slot is free
      logger.fatal(
        { err: error, deployment_id: claimed.id },
        'the end of a deployment could not be recorded',
      );
    });
  }

  async function carryOut(claimed: ClaimedDeployment): Promise<void> {
    const log = createLogKeeper({
      secrets: Object.values(claimed.variables),
      effects,
      write: (append) => record('logs.append', { id: claimed.id, ...append }),
    });
    const { outcome, outputs } = await runWhenPossible(claimed, log).finally(() => {
      waiting.delete(claimed.id);
      setAside.delete(claimed.id);
    });
    const end = { ...endOf(claimed.id, outcome, outputs), endedAtMs: effects.now() };
    await log.end();
    const recorded = record('deployments.finish', end);
    underWay.delete(claimed.id);
    // If this fails, on a full disk for instance, the next tick tries again.
    claimAll().catch((error) => logger.warn({ err: error }, 'the next deployment could not be claimed'));
    await recorded;
    logger.info({ deployment_id: claimed.id, status: end.status, reason: end.reason }, 'deployment ended');
  }

  /**
   * Runs the command, once a shortage that keeps it from starting is over, a full disk for instance. Without the wait,
   * each deployment of a queue would fail within milliseconds; with a limit to it, each would fail after that time. The
   * timeouts of the command count from its start.
   */
  async function runWhenPossible(claimed: ClaimedDeployment, log: LogKeeper): Promise<RunResult> {
    // It was still being claimed, so stop() could not reach it.
    if (isGraceOver) return { outcome: { kind: 'neverStarted' }, outputs: {} };
    let { outcome, outputs } = await runInWorkspace(claimed, log);
    if (outcome.kind === 'shortage') await beginWait(claimed.id, outcome.cause, log);
    while (outcome.kind === 'shortage') {
      waiting.add(claimed.id);
      const end = await untilNextTry(claimed, log);
      if (end !== undefined) return { outcome: end, outputs: {} };
      // A try that takes longer hangs on something else, the directory of its project for instance: others may start.
      const cancelLongTry = effects.after(TRY_AGAIN_EVERY_MS, () => waiting.delete(claimed.id));
      ({ outcome, outputs } = await runInWorkspace(claimed, log).finally(cancelLongTry));
    }
    return { outcome, outputs };
  }

  async function beginWait(id: DeploymentId, cause: string, log: LogKeeper): Promise<void> {
    if (waiting.size === 0) logger.warn({ reason: cause }, 'no command starts until a shortage is over');
    waiting.add(id);
    await log.appendLine(`davit: waiting to start: ${cause}`);
  }

  /** Resolves when it is time for the next try; to how the deployment ends instead, if there is to be none. */
  async function untilNextTry(
    { id, project_id: projectId }: ClaimedDeployment,
    log: LogKeeper,
  ): Promise<Outcome | undefined> {
    for (;;) {
      const cause = await sleep(id);
      if (cause === 'user') return { kind: 'canceled' };
      if (stopping) return { kind: 'neverStarted' };
      const status = statusOf(projectId);
      if (status === 'archived') return { kind: 'archived' };
      if (status === 'paused') await putAside(id, log);
      if (status === 'active' && takeSlot(id)) return undefined;
    }
  }

  async function putAside(id: DeploymentId, log: LogKeeper): Promise<void> {
    waiting.delete(id);
    if (setAside.has(id)) return;
    setAside.add(id);
    await log.appendLine('davit: waiting to start: its project is paused');
  }

  /** Whether the run has a slot. If not, no other gets one before it. */
  function takeSlot(id: DeploymentId): boolean {
    waiting.add(id);
    if (setAside.has(id) && !hasFreeSlot()) return false;
    setAside.delete(id);
    return true;
  }

  /** Undefined: it cannot be read at the moment. */
  function statusOf(id: ProjectId): ProjectStatus | undefined {
    try {
      return reads.projects.existing(id).status;
    } catch (error) {
      if (!isUnavailable(error)) throw error;
      return undefined;
    }
  }

  /** Resolves after a moment, or at once to why the run is to be stopped. */
  function sleep(id: DeploymentId): Promise<StopRequest | undefined> {
    return new Promise((resolve) => {
      effects.after(TRY_AGAIN_EVERY_MS, () => resolve(undefined));
      underWay.set(id, resolve);
    });
  }

  async function runInWorkspace(claimed: ClaimedDeployment, log: LogKeeper): Promise<RunResult<RunOutcome>> {
    let workspace: Workspace;
    try {
      workspace = workspaces.make(claimed.project_id, claimed.directory);
    } catch (error) {
      const cause = `no directory for this run: ${messageOf(error)}`;
      return { outcome: notStarted(codeOf(error), cause), outputs: {} };
    }
    try {
      const running = start(claimed, workspace, log);
      underWay.set(claimed.id, running.stop);
      const outcome = await running.outcome;
      const { outputs, notes } = readOutputs(workspace.outputFile, Object.values(claimed.variables));
      for (const note of notes) await log.appendLine(`davit: ${note}`);
      return { outcome, outputs };
    } finally {
      // Before the end is recorded: that waits while the disk is full, perhaps of this very workspace.
      workspace.release();
    }
  }

  function track<Value>(promise: Promise<Value>): Promise<Value> {
    pending.add(promise);
    const forget = () => pending.delete(promise);
    promise.then(forget, forget);
    return promise;
  }

  function start(claimed: ClaimedDeployment, workspace: Workspace, log: LogKeeper): Run {
    let cancelRecord = () => {};
    const running = run(
      {
        command: claimed.command,
        directory: workspace.directory,
        environment: commandEnvironment(base, claimed, workspace.outputFile),
        timeoutMs: claimed.timeout_ms,
        idleTimeoutMs: claimed.idle_timeout_ms,
        killGraceMs,
      },
      {
        spawner,
        effects,
        onStarted: (identity) => {
          waiting.delete(claimed.id);
          cancelRecord = effects.after(RECORD_PROCESS_AFTER_MS, () => recordProcess(claimed.id, identity));
        },
        onOutput: (bytes) => log.append(bytes),
        onFinish: log.waitNoMore,
        onStuck: (processIds) =>
          logger.error(
            { deployment_id: claimed.id, process_ids: processIds },
            'processes of a deployment cannot be ended',
          ),
      },
    );
    return { ...running, outcome: running.outcome.finally(() => cancelRecord()) };
  }

  function record<Name extends 'logs.append' | 'deployments.setProcess' | 'deployments.finish'>(
    name: Name,
    input: InputOf<Name>,
  ): Promise<OutputOf<Name>> {
    return writePersistently(writer, name, input, effects, (error) =>
      logger.warn(
        { deployment_id: input.id, reason: messageOf(error) },
        'a deployment cannot be recorded yet: it waits, and davit tries again',
      ),
    );
  }

  function recordProcess(id: DeploymentId, identity: ProcessIdentity): void {
    track(record('deployments.setProcess', { id, ...identity })).catch((error) =>
      logger.error({ err: error, deployment_id: id }, 'the process of a deployment is not recorded'),
    );
  }
}
