import type { Database } from './database.ts';

/** Stays the same until somebody commits. */
export type Moment = number;

/** Which moment it is. Somebody else's commit counts as soon as it could be read, whichever process made it. */
export function createMoments(database: Database): () => Moment {
  // Of all other connections, and of this one.
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();
  const ownChanges = database.prepare<[], number>('SELECT total_changes()').pluck();
  let moment = 0;
  let seenVersion: number | undefined;
  let seenChanges: number | undefined;

  return () => {
    const version = dataVersion.get();
    const changes = ownChanges.get();
    if (version !== seenVersion || changes !== seenChanges) moment += 1;
    seenVersion = version;
    seenChanges = changes;
    return moment;
  };
}

/** Gives what `read` gave for `key` before, if that was read at this moment. */
export type ReadCache<Value> = (moment: Moment, key: string, read: () => Value) => Value;

/** Each may be some 20 KB. */
const ENTRIES_MAX = 200;

/**
 * For what is asked over and over and seldom changes: which moment it is costs some µs, a key takes 20 to read, fifty
 * projects and their text 150. To be asked for with the moment that a request began with, so that it is found out
 * once. What `read` throws is not remembered.
 */
export function createReadCache<Value>(): ReadCache<Value> {
  const remembered = new Map<string, Value>();
  let seen: Moment | undefined;

  return (moment, key, read) => {
    if (moment !== seen || remembered.size >= ENTRIES_MAX) remembered.clear();
    seen = moment;
    const known = remembered.get(key);
    if (known !== undefined) return known;
    const value = read();
    remembered.set(key, value);
    return value;
  };
}
