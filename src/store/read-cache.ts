import type { Database } from './database.ts';

/** Stays the same until somebody commits. */
export type Moment = number;

/**
 * Which moment it is. A commit counts once what runs now has ended, whichever process made it:
 * whoever heard of it and then sends a request is read later than that. One for each connection, that all its caches
 * share: it is looked for once for requests that go on side by side, as that takes 8 µs beside a busy writer.
 */
export function createMoments(database: Database): () => Moment {
  // Of all other connections, and of this one.
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();
  const ownChanges = database.prepare<[], number>('SELECT total_changes()').pluck();
  let moment = 0;
  let seenVersion: number | undefined;
  let seenChanges: number | undefined;
  let isKnown = false;
  const forget = () => {
    isKnown = false;
  };

  return () => {
    if (isKnown) return moment;
    const version = dataVersion.get();
    const changes = ownChanges.get();
    isKnown = true;
    process.nextTick(forget);
    if (version !== seenVersion || changes !== seenChanges) moment += 1;
    seenVersion = version;
    seenChanges = changes;
    return moment;
  };
}

/** Gives what `read` gave for `key` before, if that was at this moment. */
type ReadCache<Value> = (key: string, read: () => Value) => Value;

/** Each may be some 20 KB. */
const ENTRIES_MAX = 200;

/**
 * For what is asked over and over and seldom changes: a key takes 20 µs to read, fifty projects and their text 150. What
 * `read` throws is not remembered.
 */
export function createReadCache<Value>(moment: () => Moment): ReadCache<Value> {
  const remembered = new Map<string, Value>();
  let seen: Moment | undefined;

  return (key, read) => {
    // Before the read: what is committed in between is read anew the next time.
    const now = moment();
    if (now !== seen || remembered.size >= ENTRIES_MAX) remembered.clear();
    seen = now;
    const known = remembered.get(key);
    if (known !== undefined) return known;
    const value = read();
    remembered.set(key, value);
    return value;
  };
}
