import type { Database } from './database.ts';

/** Gives what `read` gave the last time it was asked for `key`, unless somebody has committed since. */
export type ReadCache<Value> = (key: string, read: () => Value) => Value;

/** Each may be some 20 KB. */
const ENTRIES_MAX = 200;

/**
 * For what is asked over and over and seldom changes. That nobody has committed, in this process or another, is known
 * in some µs; a key takes 20 to read, fifty projects and their text 150. What `read` throws is not remembered.
 */
export function createReadCache<Value>(database: Database): ReadCache<Value> {
  // Of all other connections, and of this one.
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();
  const ownChanges = database.prepare<[], number>('SELECT total_changes()').pluck();
  const remembered = new Map<string, Value>();
  let seenVersion: number | undefined;
  let seenChanges: number | undefined;

  return (key, read) => {
    // Before the read: what is committed in between is read anew the next time.
    const version = dataVersion.get();
    const changes = ownChanges.get();
    if (version !== seenVersion || changes !== seenChanges || remembered.size >= ENTRIES_MAX) {
      remembered.clear();
    }
    seenVersion = version;
    seenChanges = changes;
    const known = remembered.get(key);
    if (known !== undefined) return known;
    const value = read();
    remembered.set(key, value);
    return value;
  };
}
