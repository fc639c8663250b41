import type { DeploymentId } from '../domain.ts';
import { type DeploymentEnd, PROJECT_ARCHIVED } from '../store/transitions.ts';
import type { RunOutcome } from './run.ts';
import type { Shortage } from './spawner.ts';

/** How a deployment ends. */
export type Outcome =
  | Exclude<RunOutcome, Shortage>
  /** The service stopped, or the project was archived, while it waited to start. */
  | { kind: 'neverStarted' | 'archived' };

/** The end that is recorded for the outcome of a deployment. */
export function endOf(id: DeploymentId, outcome: Outcome, outputs: Record<string, string>): DeploymentEnd {
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
    case 'neverStarted':
      return {
        ...none,
        status: 'failed',
        reason: 'interrupted',
        message: 'davit stopped before this could start: nothing was run',
      };
    case 'canceled':
      return { ...none, status: 'canceled', reason: 'user' };
    case 'archived':
      return { ...none, status: 'canceled', reason: 'user', message: PROJECT_ARCHIVED };
    default:
      return outcome satisfies never;
  }
}
