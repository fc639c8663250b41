import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';
import { createReadCache, type Moment } from './read-cache.ts';

/** What belongs to the file as a whole. */
export function instanceReads(database: Database, moment: () => Moment) {
  const cursorSecret = database.prepare<[], Buffer>('SELECT cursor_secret FROM instance').pluck();
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();

  return {
    /** Authenticates page cursors; as old as the file, so a cursor outlives restarts and restores. */
    cursorSecret(): Buffer {
      const secret = cursorSecret.get();
      if (secret === undefined) throw new Error('the file has no instance row');
      return secret;
    },

    /** Changes whenever another connection, of this process or another, has committed. */
    dataVersion: (): number => dataVersion.get() ?? 0,

    /** Remembers reads until the next commit. */
    readCache: <Value>() => createReadCache<Value>(moment),
  };
}

/** The write of nothing. */
export function instanceWrites({ database }: WriteContext) {
  const touch = database.prepare('UPDATE instance SET probes = probes + 1');

  return {
    /** Whether the disk takes a commit is seen by doing one. SQLite writes no page that stays as it is. */
    probe(): void {
      touch.run();
    },
  };
}
