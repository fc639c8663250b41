import type { Deployment, DeploymentStatus, Project } from '../domain.ts';
import { formatDuration } from '../durations.ts';
import { printable } from '../printable.ts';
import type { Colour } from './table.ts';

type Standing = Pick<Deployment, 'status' | 'reason' | 'exit_code' | 'signal' | 'queue_position'>;

/** How a deployment stands, in a few words: `failed: exit code 3`. */
export function statusText({ status, reason, exit_code, signal, queue_position }: Standing): string {
  if (queue_position !== null) return `${status}, number ${queue_position}`;
  switch (reason) {
    case null:
    case 'user': // that somebody canceled it is what the status says
      return status;
    case 'exit_code':
      return `${status}: exit code ${exit_code}`;
    case 'signal':
      return `${status}: ${signal}`;
    default:
      return `${status}: ${reason.replaceAll('_', ' ')}`;
  }
}

/** Which deployment stands how, in one line that no terminal obeys, whoever told of it. */
export function deploymentText(
  deployment: Standing & Pick<Deployment, 'id' | 'ref'>,
  how = statusText(deployment),
): string {
  return printable(`deployment ${deployment.id} of ${deployment.ref}: ${how}`);
}

/** The colour of a status, wherever it stands. */
export function statusColour(status: DeploymentStatus): Colour | undefined {
  switch (status) {
    case 'succeeded':
      return 'green';
    case 'failed':
      return 'red';
    case 'running':
    case 'canceling':
      return 'yellow';
    case 'canceled':
      return 'gray';
    case 'queued':
      return undefined;
    default:
      return status satisfies never;
  }
}

/** How long something took: `1m30s`, `250ms`. */
export function tookText(durationMs: number): string {
  return durationMs < 1_000 ? `${durationMs}ms` : formatDuration(durationMs);
}

/**
 * Why one that is queued does not start as soon as it is its turn; undefined if it does. `served`: whether a service
 * has the file.
 */
export function obstacleOf(
  { queue_position }: Pick<Deployment, 'queue_position'>,
  { status }: Pick<Project, 'status'>,
  served: boolean,
): string | undefined {
  if (queue_position === null) return 'another system carries it out, and reports how it went';
  if (status === 'paused') return "the project is paused: it waits until 'davit admin project resume'";
  return served ? undefined : "no service is running: it waits until 'davit serve' does";
}
