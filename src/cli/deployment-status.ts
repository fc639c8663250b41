import type { Deployment, DeploymentStatus, Project } from '../domain.ts';
import { printable } from '../printable.ts';
import type { Colour } from './table.ts';

type Standing = Pick<Deployment, 'status' | 'reason' | 'exit_code' | 'signal' | 'queue_position'>;

/** The status of a deployment, with its reason: `failed: exit code 3`. */
export function statusText({ status, reason, exit_code, signal, queue_position }: Standing): string {
  if (queue_position !== null) return `${status}, number ${queue_position}`;
  switch (reason) {
    case null:
    case 'user': // the status says that it was canceled
      return status;
    case 'exit_code':
      return `${status}: exit code ${exit_code}`;
    case 'signal':
      return `${status}: ${signal}`;
    default:
      return `${status}: ${reason.replaceAll('_', ' ')}`;
  }
}

/** A deployment and its status in one line, without control characters, as it may come from another service. */
export function deploymentLine(
  deployment: Standing & Pick<Deployment, 'id' | 'ref'>,
  how = statusText(deployment),
): string {
  return printable(`deployment ${deployment.id} of ${deployment.ref}: ${how}`);
}

/** The colours in which they are shown. */
export const STATUS_COLOURS: Record<DeploymentStatus, Colour | undefined> = {
  queued: undefined,
  running: 'yellow',
  canceling: 'yellow',
  succeeded: 'green',
  failed: 'red',
  canceled: 'gray',
};

/** Said of a deployment whose project has no command. */
export const REPORTED_ELSEWHERE = 'another system carries it out, and reports how it went';

/**
 * Why a queued deployment does not start when it is its turn; undefined if it does. `served`: whether a service serves
 * the file.
 */
export function obstacleOf(
  { queue_position }: Pick<Deployment, 'queue_position'>,
  { status }: Pick<Project, 'status'>,
  served: boolean,
): string | undefined {
  if (status !== 'active') return `the project is ${status}: it waits for 'davit admin project resume'`;
  if (queue_position === null) return REPORTED_ELSEWHERE;
  return served ? undefined : "no service is running: it waits for 'davit serve'";
}
