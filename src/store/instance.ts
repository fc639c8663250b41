import { type ClockSetting, SETTINGS_MAX } from '../clock.ts';
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';
import { createReadCache, type Moment } from './read-cache.ts';

/** What belongs to the file as a whole. */
export function instanceReads(database: Database, moment: () => Moment) {
  const cursorSecret = database.prepare<[], Buffer>('SELECT cursor_secret FROM instance').pluck();
  const clockSettings = database.prepare<[], ClockSetting>(
    'SELECT at AS atMs, by_ms AS byMs FROM clock_settings ORDER BY seq',
  );
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();

  return {
    /** Authenticates page cursors; as old as the file, so a cursor outlives restarts and restores. */
    cursorSecret(): Buffer {
      const secret = cursorSecret.get();
      if (secret === undefined) throw new Error('the file has no instance row');
      return secret;
    },

    /**
     * How the clock was set while davit ran, the oldest first. None if the last time is still to come at `nowMs`: it was
     * set back since, nobody knows by how much.
     */
    clockSettings(nowMs: number): ClockSetting[] {
      const settings = clockSettings.all();
      return (settings.at(-1)?.atMs ?? 0) <= nowMs ? settings : [];
    },

    /** Changes whenever another connection, of this process or another, has committed. */
    dataVersion: (): number => dataVersion.get() ?? 0,

    /** Remembers reads until the next commit. */
    readCache: <Value>() => createReadCache<Value>(moment),
  };
}

/** The write of nothing, and of what befell the clock. */
export function instanceWrites({ database }: WriteContext) {
  const touch = database.prepare('UPDATE instance SET probes = probes + 1');
  const insertSetting = database.prepare('INSERT INTO clock_settings (at, by_ms) VALUES (:atMs, :byMs)');
  const forgetSettings = database.prepare(
    `DELETE FROM clock_settings WHERE seq <= (SELECT max(seq) FROM clock_settings) - ${SETTINGS_MAX}`,
  );

  return {
    /** Whether the disk takes a commit is seen by doing one. SQLite writes no page that stays as it is. */
    probe(): void {
      touch.run();
    },

    /** The clock was set; the latest hundred times are kept. */
    clockWasSet({ atMs, byMs }: ClockSetting): void {
      insertSetting.run({ atMs, byMs });
      forgetSettings.run();
    },
  };
}
