import { type ClockSetting, SETTINGS_MAX, STEP_MS } from '../clock.ts';
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';

/** Values of the file as a whole. */
export function instanceReads(database: Database) {
  const cursorSecret = database.prepare<[], Buffer>('SELECT cursor_secret FROM instance').pluck();
  const clockSettings = database.prepare<[], ClockSetting>(
    'SELECT at AS atMs, by_ms AS byMs FROM clock_settings ORDER BY seq',
  );
  // Two seeks: no index tells when attempts were made, and the one that was recorded last is a newest one.
  const newestAt = database
    .prepare<[], number>(`
      SELECT max(coalesce((SELECT max(created_at) FROM events), 0),
                 coalesce((SELECT at FROM attempts ORDER BY rowid DESC LIMIT 1), 0))`)
    .pluck();
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();

  return {
    /** Authenticates page cursors. Created with the file, so that cursors stay valid across restarts and restores. */
    cursorSecret(): Buffer {
      const secret = cursorSecret.get();
      if (secret === undefined) throw new Error('the file has no instance row');
      return secret;
    },

    /**
     * How the clock was set while davit ran, the oldest first, and at the end how it was set back since, as `setBackMs`
     * says.
     */
    clockSettings(nowMs: number): ClockSetting[] {
      const settings = clockSettings.all();
      const byMs = setBackMs(nowMs);
      return byMs > 0 ? [...settings, { atMs: nowMs, byMs: -byMs }] : settings;
    },

    setBackMs,

    /** Changes whenever another connection, of this process or another, has committed. */
    dataVersion: (): number => dataVersion.get() ?? 0,
  };

  /**
   * By how much at least the clock was set back without a record, which happens while davit does not run: so far is the
   * last recorded setting in the future, or the newest event or attempt. Those tell nothing if they are older than a
   * recorded setting back, which accounts for them.
   */
  function setBackMs(nowMs: number): number {
    const settings = clockSettings.all();
    const lastMs = settings.at(-1)?.atMs ?? 0;
    const newestMs = newestAt.get() ?? 0;
    const isRecorded = settings.some(({ atMs, byMs }) => byMs < 0 && newestMs <= atMs - byMs + STEP_MS);
    const aheadMs = (isRecorded ? lastMs : Math.max(lastMs, newestMs)) - nowMs;
    return aheadMs > STEP_MS ? aheadMs : 0;
  }
}

/** Writes to test the disk, and records of how the clock was set. */
export function instanceWrites({ database }: WriteContext) {
  const touch = database.prepare('UPDATE instance SET probes = probes + 1');
  const insertSetting = database.prepare('INSERT INTO clock_settings (at, by_ms) VALUES (:atMs, :byMs)');
  const forgetSettings = database.prepare(
    `DELETE FROM clock_settings WHERE seq <= (SELECT max(seq) FROM clock_settings) - ${SETTINGS_MAX}`,
  );

  return {
    /**
     * Commits a change to see whether the disk accepts it. It must change a value, as SQLite writes no unchanged page.
     */
    probe(): void {
      touch.run();
    },

    /** Records that the clock was set. The last hundred records are kept. */
    clockWasSet({ atMs, byMs }: ClockSetting): void {
      insertSetting.run({ atMs, byMs });
      forgetSettings.run();
    },
  };
}
