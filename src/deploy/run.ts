import type { Effects } from '../effects.ts';
import type { ProcessIdentity } from '../store/deployments.ts';
import type { SpawnRequest } from './command-file.ts';
import type { ProcessEnd } from './posix.ts';
import { DEPLOYMENT_MARKER, stopTree, type TerminationDisposition } from './processes.ts';
import type { Spawner, StartedProcess } from './spawner.ts';

/** A command to be run; its deployment's marker is added to its environment. */
export interface RunRequest extends SpawnRequest {
  deploymentId: string;
  /** From its start; null: it may run for ever. */
  timeoutMs: number | null;
  /** Without output; null: it may be silent for ever. */
  idleTimeoutMs: number | null;
  /** From SIGTERM to SIGKILL. */
  killGraceMs: number;
}

interface RunContext {
  spawner: Spawner;
  effects: Effects;
  /** Hears once, when it was started, which process it is. */
  onStarted(identity: ProcessIdentity): void;
  /** Hears what it prints; until it resolves no more is read, and in the end the command waits. */
  onOutput(bytes: Uint8Array): Promise<void>;
  /** Hears of processes that cannot be ended, while the run waits for them. */
  onStuck?(processIds: number[]): void;
}

export interface Run {
  /**
   * Resolves when it is over: all output handed on, and, if it was stopped, nothing of it alive. Rejects, not
   * sooner, with what `onOutput` rejected with; the command is stopped then, as nothing of it can be recorded.
   */
  outcome: Promise<RunOutcome>;
  /** Ends it, at any time, started or not; the first cause counts. */
  stop(cause: StopRequest): void;
}

/** Why somebody wants a run to end. */
export type StopRequest = 'user' | 'shutdown';

export type RunOutcome =
  | { kind: 'exited'; exitCode: number }
  | { kind: 'signalled'; signal: string }
  | { kind: 'timedOut' }
  | { kind: 'idleTimedOut' }
  | { kind: 'canceled' }
  /** The service stopped, or could record no more of it: whether it did its work is not known. */
  | { kind: 'interrupted' }
  /** `cause` is a sentence for whoever configured the command. */
  | { kind: 'notStarted'; cause: string };

type StopCause = StopRequest | 'timeout' | 'idleTimeout' | 'failure';

/**
 * Runs one command, from its start until it is over. What it leaves running after an end of its own is left
 * alone: a daemon that was meant to stay.
 */
export function run(request: RunRequest, context: RunContext): Run {
  const stopping = firstOf<StopCause>();
  const shutdown = firstOf<number>();
  return {
    outcome: carryOut(request, context, { ...stopping, shutdownAtMs: shutdown.value }),
    stop(cause) {
      if (cause === 'shutdown') shutdown.settle(context.effects.monotonicMs());
      stopping.settle(cause);
    },
  };
}

/** Why it is to end, and since when all are. */
interface Stopping extends First<StopCause> {
  /** On the clock that never jumps. */
  shutdownAtMs(): number | undefined;
}

async function carryOut(request: RunRequest, context: RunContext, stopping: Stopping): Promise<RunOutcome> {
  const { deploymentId, command, directory, environment } = request;
  const { spawner } = context;
  const marked = { ...environment, [DEPLOYMENT_MARKER]: deploymentId };
  const isWanted = () => stopping.value() === undefined;
  const spawned = await spawner.spawn({ command, directory, environment: marked }, isWanted);
  switch (spawned.kind) {
    case 'started':
      return await supervise(spawned, request, context, stopping);
    case 'notStarted':
      return isWanted() ? spawned : stoppedOutcome(stopping.value());
    case 'unwanted':
      return stoppedOutcome(stopping.value());
    default:
      return spawned satisfies never;
  }
}

async function supervise(
  started: StartedProcess,
  request: RunRequest,
  context: RunContext,
  stopping: Stopping,
): Promise<RunOutcome> {
  const { identity } = started;
  const failures: unknown[] = [];
  const fail = (error: unknown) => {
    failures.push(error);
    stopping.settle('failure');
  };
  context.onStarted(identity);
  const watch = watchClock(request, context.effects, stopping);
  const output = started.readOutput((bytes) => watch.during(() => context.onOutput(bytes)));
  const outputEnded = output.ended.catch(fail);

  const outcome = await untilEnd(started, request, context, stopping);
  watch.end();
  output.hurry();
  // What is in the pipe when the command ends is its own; writers that outlive it may take a moment to
  // say their last, as `tee` in `exec > >(tee file)` does, but a daemon holds the pipe for ever.
  const cancelFinish = context.effects.after(LAST_OUTPUT_MS, output.finish);
  await outputEnded;
  cancelFinish();
  if (failures.length > 0) throw failures[0];
  return outcome;
}

const LAST_OUTPUT_MS = 1_000;

async function untilEnd(
  started: StartedProcess,
  request: RunRequest,
  context: RunContext,
  stopping: Stopping,
): Promise<RunOutcome> {
  const first = await Promise.race([started.ended, stopping.settled]);
  if (typeof first === 'object') return first;
  // It may have exited without its end being told yet: then what would stop it comes too late.
  const disposition = await endTree(started.identity, request, context, stopping, true);
  if (disposition === 'gone') await endWhoHoldsIt(started, request, context, stopping);
  return outcomeOfStopped(first, disposition, await started.ended);
}

/** After the grace of a clean stop, so that all of it is over within 30 s: with many, looking for them takes the rest. */
const SHUTDOWN_KILL_GRACE_MS = 2_000;

function endTree(
  leader: ProcessIdentity,
  { deploymentId, killGraceMs }: RunRequest,
  { effects, onStuck }: RunContext,
  { shutdownAtMs }: Stopping,
  spareWhenExited: boolean,
): Promise<TerminationDisposition> {
  const startedAtMs = effects.monotonicMs();
  // The service may be stopped while this goes on.
  const graceMs = () =>
    Math.min(
      killGraceMs,
      (shutdownAtMs() ?? Number.POSITIVE_INFINITY) + SHUTDOWN_KILL_GRACE_MS - startedAtMs,
    );
  return stopTree({ deploymentId, leader }, { graceMs, effects, spareWhenExited, onStuck });
}

/** A process that traces the command hears of its end first, ptrace(2), and may keep it for ever: then it is ended as well. */
async function endWhoHoldsIt(
  started: StartedProcess,
  request: RunRequest,
  context: RunContext,
  stopping: Stopping,
): Promise<void> {
  const { effects } = context;
  const startedAtMs = effects.monotonicMs();
  const { promise: isHeld, resolve } = Promise.withResolvers<boolean>();
  const cancelLook = whenOver(HELD_MAX_MS, effects, {
    passedMs: () => effects.monotonicMs() - startedAtMs,
    over: () => resolve(true),
  });
  void started.ended.then(() => resolve(false));
  if (await isHeld) await endTree(started.identity, request, context, stopping, false);
  cancelLook();
}

const HELD_MAX_MS = 1_000;

/**
 * Whoever had exited before SIGTERM was sent ended by itself. Of the others, a command that came to a good end
 * did its work: it ignored SIGTERM, or SIGTERM would have ended it and did not, as it had just exited. One that
 * caught it and exits with 0 has tidied up, and one that fails was stopped, as its children were with it.
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

function stoppedOutcome(cause: StopCause | undefined): RunOutcome {
  switch (cause) {
    case 'user':
      return { kind: 'canceled' };
    case 'timeout':
      return { kind: 'timedOut' };
    case 'idleTimeout':
      return { kind: 'idleTimedOut' };
    case 'shutdown':
    case 'failure':
    case undefined:
      return { kind: 'interrupted' };
    default:
      return cause satisfies never;
  }
}

interface Watch {
  /** Its output is being taken: it is not idle, even if that takes long. */
  during<Result>(take: () => Promise<Result>): Promise<Result>;
  end(): void;
}

function watchClock(
  { timeoutMs, idleTimeoutMs }: RunRequest,
  effects: Effects,
  stopping: First<StopCause>,
): Watch {
  const startedAtMs = effects.monotonicMs();
  let quietSinceMs = startedAtMs;
  let taking = 0;
  const cancelTimeout = whenOver(timeoutMs, effects, {
    passedMs: () => effects.monotonicMs() - startedAtMs,
    over: () => stopping.settle('timeout'),
  });
  const cancelIdleTimeout = whenOver(idleTimeoutMs, effects, {
    passedMs: () => (taking > 0 ? 0 : effects.monotonicMs() - quietSinceMs),
    over: () => stopping.settle('idleTimeout'),
  });
  return {
    async during(take) {
      taking += 1;
      try {
        return await take();
      } finally {
        taking -= 1;
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
 * Looks when the limit could be reached, and again as long as it is not: timers come early, and are cut at 25 days. Then
 * once more, a turn of the event loop later: if davit itself was held up, what is in the pipe was not read yet, and of an
 * end it has not heard.
 */
function whenOver(
  limitMs: number | null,
  effects: Effects,
  { passedMs, over }: { passedMs: () => number; over: () => void },
): () => void {
  if (limitMs === null) return () => undefined;
  let looksOver = false;
  let cancel = effects.after(limitMs, look);
  return () => cancel();

  function look(): void {
    const restMs = (limitMs ?? 0) - passedMs();
    if (restMs <= 0 && looksOver) {
      over();
      return;
    }
    looksOver = restMs <= 0;
    cancel = effects.after(Math.max(0, restMs), look);
  }
}

/** A value that is settled once; later ones are ignored. */
interface First<Value> {
  settle(value: Value): void;
  settled: Promise<Value>;
  value(): Value | undefined;
}

function firstOf<Value>(): First<Value> {
  const { promise, resolve } = Promise.withResolvers<Value>();
  let first: Value | undefined;
  return {
    settle(value) {
      if (first !== undefined) return;
      first = value;
      resolve(value);
    },
    settled: promise,
    value: () => first,
  };
}
