import { putLatest } from '../latest.ts';
import type { Database } from './database.ts';

/** A number that changes with every commit. */
export type Moment = number;

/**
 * Returns a function that tells the current moment: it detects commits of any connection, in any process. The result is
 * reused until the current JavaScript task ends, as detecting takes 8 µs beside a busy writer; a client that learned of
 * a commit sends its next request after that. All caches of a connection share one.
 */
export function createMoments(database: Database): () => Moment {
  // The first changes with commits of other connections, the second with this one's.
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

/** Returns the cached result for `key`, or that of `read` if there was a commit since. */
type ReadCache<Value> = (key: string, read: () => Value) => Value;

/**
 * A page of projects has some 20 KB, a piece of a log up to 115, a deployment up to 140, as its 64 KB of outputs may be
 * held in UTF-16: at most 28 MB.
 */
const ENTRIES_MAX = 200;

/**
 * A cache for reads that are frequent and seldom change: reading a key takes 20 µs, fifty projects with their JSON 150.
 * Errors that `read` throws are not cached.
 */
export function createReadCache<Value>(moment: () => Moment): ReadCache<Value> {
  const remembered = new Map<string, Value>();
  let seen: Moment | undefined;

  return (key, read) => {
    // Determined before the read, so that a commit in between invalidates the entry.
    const now = moment();
    if (now !== seen) remembered.clear();
    seen = now;
    const known = remembered.get(key);
    if (known !== undefined) return known;
    const value = read();
    putLatest(remembered, key, value, ENTRIES_MAX);
    return value;
  };
}
