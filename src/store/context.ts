import type { DeploymentId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Database } from './database.ts';

/**
 * What a commit may have changed for somebody who waits: the queue of deployments, the outbox, one deployment's
 * state, or its log, of which there may be a hundred in a second. `everything`: nobody knows what.
 */
export type Change = 'queue' | 'outbox' | 'everything' | DeploymentId | LogChange;
export type LogChange = `log:${DeploymentId}`;

/** What every store that writes is made with. Its functions run inside the writer's transaction. */
export interface WriteContext {
  database: Database;
  effects: Effects;
  /** Reported to whoever waits once the transaction is committed, and never if it is not. */
  changed(change: Change): void;
}
