import type { Database } from './database.ts';

export function instanceReads(database: Database) {
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
  };
}
