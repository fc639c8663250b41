import type { Effects } from '../effects.ts';
import type { Change } from './changes.ts';
import type { Database } from './database.ts';

/** What every store that writes depends on. Its functions run inside the writer's transaction. */
export interface WriteContext {
  database: Database;
  effects: Effects;
  /** Announces a change to the listeners once the transaction is committed, and not at all if it is rolled back. */
  changed(change: Change): void;
}
