import type { Effects } from '../effects.ts';
import type { ProcessIdentity } from '../process-identity.ts';
import type { SpawnRequest } from './command-path.ts';
import { DEPLOYMENT_MARKER, type MarkedEnvironment } from './environment.ts';
import type { ProcessEnd } from './posix.ts';
import { stopTree } from './process-tree.ts';
import type { TerminationDisposition } from './processes.ts';
import type { NotStarted, Shortage, Spawner, StartedProcess } from './spawner.ts';

/** A command to run. */
export interface RunRequest extends SpawnRequest {
  environment: MarkedEnvironment;
  /** Counted from the start of the command; null: no limit. */
  timeoutMs: number | null;
  /** How long the command may print nothing; null: no limit. */
  idleTimeoutMs: number | null;
  /** From SIGTERM to SIGKILL. */
  killGraceMs: number;
}

interface RunContext {
  spawner: Spawner;
  effects: Effects;
  /** Called once, when the command has started. */
  onStarted(identity: ProcessIdentity): void;
  /** Called with what the command prints. Until it resolves no more is read: the pipe fills, and the command blocks. */
  onOutput(bytes: Uint8Array): Promise<void>;
  /** Called when output is still being handed on a second after the end: what follows is at most what a pipe holds. */
  onFinish?(): void;
  /** Called with the processes that SIGKILL does not end, for which the run goes on waiting. */
  onStuck?(processIds: number[]): void;
}

export interface Run {
  /**
   * Resolves when the run is over: all output is handed on, and, if it was stopped, none of its processes lives. If
   * `onOutput` rejects, the command is stopped, as no more of it can be recorded, and this rejects likewise once it is
   * over.
   */
  outcome: Promise<RunOutcome>;
  /** Ends the run, whether or not the command has started; only the first cause counts. */
  stop(cause: StopRequest): void;
}

/** Why a caller stops a run. */
export type StopRequest = 'user' | 'shutdown';

export type RunOutcome =
  | { kind: 'exited'; exitCode: number }
  | { kind: 'signalled'; signal: string }
  | { kind: 'timedOut' }
  | { kind: 'idleTimedOut' }
  | { kind: 'canceled' }
  /** The service stopped, or could record no more of it: whether it did its work is not known. */
  | { kind: 'interrupted' }
  | NotStarted
  | Shortage;

type StopCause = StopRequest | 'timeout' | 'idleTimeout' | 'failure';

/**
 * Runs one command until it is over. Processes that a command leaves running when it exits by itself are not stopped:
 * they may be daemons that are meant to stay. If a signal ends it, they are stopped, too.
 */
export function run(request: RunRequest, context: RunContext): Run {
  const stopping = createStopping(context.effects);
  return { outcome: runToEnd(request, context, stopping), stop: stopping.stop };
}

async function runToEnd(request: RunRequest, context: RunContext, stopping: Stopping): Promise<RunOutcome> {
  const isWanted = () => stopping.cause() === undefined;
  const spawned = await context.spawner.spawn(request, isWanted);
  if (spawned.kind === 'started') return await supervise(spawned, request, context, stopping);
  const cause = stopping.cause();
  return cause === undefined ? spawned : stoppedOutcome(cause);
}

async function supervise(
  started: StartedProcess,
  request: RunRequest,
  context: RunContext,
  stopping: Stopping,
): Promise<RunOutcome> {
  const { effects } = context;
  context.onStarted(started.identity);
  const watch = watchClock(request, effects, stopping);
  const output = started.readOutput((bytes) => watch.during(() => context.onOutput(bytes)));
  output.ended.catch(() => stopping.stop('failure'));

  const outcome = await untilEnd();
  watch.end();
  output.handOnNow();
  // Children may still write their last lines after the command has ended, as `tee` in `exec > >(tee file)` does. A
  // daemon would hold the pipe open for ever, so they have a limited time.
  const cancelFinish = effects.after(LAST_OUTPUT_MS, () => {
    context.onFinish?.();
    output.finish();
  });
  await output.ended.finally(cancelFinish);
  return outcome;

  async function untilEnd(): Promise<RunOutcome> {
    const first = await Promise.race([started.ended, stopping.stopped]);
    const outcome = typeof first === 'object' ? first : await endStopped(first);
    // What a killed command had under way works on, and the project's next deployment would begin beside it.
    if (outcome.kind === 'signalled') await endTree(false);
    return outcome;
  }

  async function endStopped(cause: StopCause): Promise<RunOutcome> {
    // The command may have exited already, its SIGCHLD not handled yet: then the stop comes too late.
    const disposition = await endTree(true);
    if (disposition === 'gone') await endTracer();
    return outcomeOfStopped(cause, disposition, await started.ended);
  }

  function endTree(spareWhenExited: boolean): Promise<TerminationDisposition> {
    const { environment, killGraceMs } = request;
    const startedAtMs = effects.monotonicMs();
    // Asked again and again, as the service may begin to stop meanwhile.
    const graceMs = () =>
      Math.min(
        killGraceMs,
        (stopping.shutdownAtMs() ?? Number.POSITIVE_INFINITY) + SHUTDOWN_KILL_GRACE_MS - startedAtMs,
      );
    return stopTree(
      { deploymentId: environment[DEPLOYMENT_MARKER], leader: started.identity, ownsId: true },
      { graceMs, effects, spareWhenExited, onStuck: context.onStuck },
    );
  }

  /**
   * A tracer of the command learns of its end first, ptrace(2), and may withhold it for ever: then it is ended as well.
   */
  async function endTracer(): Promise<void> {
    const startedAtMs = effects.monotonicMs();
    const { promise: isWithheld, resolve } = Promise.withResolvers<boolean>();
    const cancelCheck = whenOver(WITHHELD_MAX_MS, effects, {
      passedMs: () => effects.monotonicMs() - startedAtMs,
      onOver: () => resolve(true),
    });
    void started.ended.then(() => resolve(false));
    if (await isWithheld) await endTree(false);
    cancelCheck();
  }
}

const LAST_OUTPUT_MS = 1_000;
/**
 * From SIGTERM to SIGKILL once the grace of a clean stop is over. The stop takes 30 s at most, and with many processes
 * finding them in /proc takes the rest of that.
 */
const SHUTDOWN_KILL_GRACE_MS = 2_000;
const WITHHELD_MAX_MS = 1_000;

/**
 * A command that had exited before SIGTERM was sent ended by itself. One that exits with 0 although it ignores SIGTERM,
 * or although SIGTERM would have killed it (it exited just before), did its work. One that catches SIGTERM and exits
 * with 0 has only cleaned up. Any other end counts as stopped, as the children of the command were stopped too.
 */
function outcomeOfStopped(
  cause: StopCause,
  disposition: TerminationDisposition,
  end: ProcessEnd,
): RunOutcome {
  const succeeded = end.kind === 'exited' && end.exitCode === 0;
  switch (disposition) {
    case 'gone':
      return end;
    case 'ignored':
    case 'default':
      return succeeded ? end : stoppedOutcome(cause);
    case 'caught':
      return stoppedOutcome(cause);
    default:
      return disposition satisfies never;
  }
}

function stoppedOutcome(cause: StopCause): RunOutcome {
  switch (cause) {
    case 'user':
      return { kind: 'canceled' };
    case 'timeout':
      return { kind: 'timedOut' };
    case 'idleTimeout':
      return { kind: 'idleTimedOut' };
    case 'shutdown':
    case 'failure':
      return { kind: 'interrupted' };
    default:
      return cause satisfies never;
  }
}

interface Watch {
  /** While `handleOutput` runs, however long, the command does not count as idle. */
  during<Result>(handleOutput: () => Promise<Result>): Promise<Result>;
  end(): void;
}

function watchClock({ timeoutMs, idleTimeoutMs }: RunRequest, effects: Effects, stopping: Stopping): Watch {
  const startedAtMs = effects.monotonicMs();
  let quietSinceMs = startedAtMs;
  let handling = 0;
  const cancelTimeout = whenOver(timeoutMs, effects, {
    passedMs: () => effects.monotonicMs() - startedAtMs,
    onOver: () => stopping.stop('timeout'),
  });
  const cancelIdleTimeout = whenOver(idleTimeoutMs, effects, {
    passedMs: () => (handling > 0 ? 0 : effects.monotonicMs() - quietSinceMs),
    onOver: () => stopping.stop('idleTimeout'),
  });
  return {
    async during(handleOutput) {
      handling += 1;
      try {
        return await handleOutput();
      } finally {
        handling -= 1;
        quietSinceMs = effects.monotonicMs();
      }
    },
    end() {
      cancelTimeout();
      cancelIdleTimeout();
    },
  };
}

/**
 * Calls `onOver` once `passedMs` has reached the limit. Each timer only leads to a check, as timers fire early and are
 * capped at 25 days. A second check follows one turn of the event loop later: if davit itself was held up, there may be
 * output that it has not read and an exit that it has not noticed.
 */
function whenOver(
  limitMs: number | null,
  effects: Effects,
  { passedMs, onOver }: { passedMs: () => number; onOver: () => void },
): () => void {
  if (limitMs === null) return () => undefined;
  let wasOver = false;
  let cancel = effects.after(limitMs, check);
  return () => cancel();

  function check(): void {
    const restMs = (limitMs ?? 0) - passedMs();
    if (restMs <= 0 && wasOver) {
      onOver();
      return;
    }
    wasOver = restMs <= 0;
    cancel = effects.after(Math.max(0, restMs), check);
  }
}

/** Why a run is stopped, and since when the whole service stops. */
interface Stopping {
  /** Only the first cause counts. */
  stop(cause: StopCause): void;
  cause(): StopCause | undefined;
  /** Resolves to the cause. */
  stopped: Promise<StopCause>;
  /** On the monotonic clock. */
  shutdownAtMs(): number | undefined;
}

function createStopping(effects: Effects): Stopping {
  const { promise: stopped, resolve } = Promise.withResolvers<StopCause>();
  let first: StopCause | undefined;
  let shutdownAtMs: number | undefined;
  return {
    stop(cause) {
      if (cause === 'shutdown') shutdownAtMs ??= effects.monotonicMs();
      first ??= cause;
      resolve(first);
    },
    cause: () => first,
    stopped,
    shutdownAtMs: () => shutdownAtMs,
  };
}
