import type { Command } from 'commander';
import type { Serving } from '../store/lock.ts';
import { dbPathOf } from './command.ts';

/** The service that has the file now, and so takes up what is written within a second; null: there is none. */
export async function serviceOf(command: Command): Promise<Serving | null> {
  const { servedBy } = await import('../store/lock.ts');
  return servedBy(dbPathOf(command));
}

/** Whether there is such a service. */
export async function isServed(command: Command): Promise<boolean> {
  return (await serviceOf(command)) !== null;
}
