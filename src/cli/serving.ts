import type { Command } from 'commander';
import { processIdentity } from '../process-identity.ts';
import type { RunningDeployment } from '../store/deployments.ts';
import type { Serving } from '../store/holder.ts';
import type { Reads } from '../store/store.ts';
import type { CommandContext } from './command.ts';
import { dbPathOf } from './database-file.ts';
import { exactMoment } from './moments.ts';

/** The service that serves the file now, and takes up what is written to it within a second; null: there is none. */
export async function serviceOf(command: Command): Promise<Serving | null> {
  const { servedBy } = await import('../store/holder.ts');
  return servedBy(dbPathOf(command));
}

/** Whether there is such a service. */
export async function isServed(command: Command): Promise<boolean> {
  return (await serviceOf(command)) !== null;
}

/** Null if that process is not the service, usually as the service is in another PID namespace, where ids differ. */
export async function visibleProcess({ process_id }: Serving, dbPath: string): Promise<number | null> {
  const { isServedByProcess } = await import('../store/holder.ts');
  return process_id !== null && isServedByProcess(process_id, dbPath) ? process_id : null;
}

/**
 * Whether an earlier run of the service left this deployment running: until it has ended, no other one starts. False if
 * that cannot be told, as the clock was set back since the service started. `serviceProcessId`: as `visibleProcess`.
 */
export function isLeft(
  { started_at, process }: Pick<RunningDeployment, 'started_at' | 'process'>,
  { since }: Pick<Serving, 'since'>,
  serviceProcessId: number | null,
  nowMs: number,
): boolean {
  if (since === null || started_at >= since || Date.parse(since) > nowMs) return false;
  const service = serviceProcessId === null ? undefined : processIdentity(serviceProcessId);
  // The clock may have been set back, and be beyond that time again.
  const isOfService =
    process !== null &&
    process.bootId === service?.bootId &&
    process.processStartedAt >= service.processStartedAt;
  return !isOfService;
}

/** Whether this deployment, which waits to start, does so as its project is paused: it takes no slot then. */
export function waitsForResume(reads: Reads, { id, process }: RunningDeployment): boolean {
  if (process !== null) return false;
  return reads.projects.existing(reads.deployments.existing(id).project_id).status === 'paused';
}

/** Its process id and start, as far as its lock tells. */
export function serviceText({ process_id, since }: Serving, context: CommandContext): string {
  const who = process_id === null ? 'runs' : `process ${process_id}`;
  return since === null ? who : `${who}, since ${exactMoment(context, since)}`;
}
