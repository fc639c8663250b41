import { delay, type Effects } from '../effects.ts';
import { AppError, isStorageProblem, isUnavailable } from '../errors.ts';
import type { Change } from './context.ts';
import {
  BUSY_TIMEOUT_MS,
  type Database,
  isDamaged,
  isFailureOfDisk,
  type Statement,
  sqliteCode,
} from './database.ts';
import { type InputOf, makeOperations, type OperationName, type OutputOf } from './operations.ts';
import { MOVED, watchPlace } from './place.ts';
import type { WriterFigures } from './writer-figures.ts';

/** The one door for writes. Plain values in and out, so that a thread may stand between. */
export interface Writer {
  /**
   * Resolves once the operation's transaction is on the disk. Rejects with the operation's AppError, its
   * own work undone and nobody else's; with `unavailable` when the disk is full, the file is not where it was, or
   * the queue is full.
   */
  write<Name extends OperationName>(name: Name, input: InputOf<Name>): Promise<OutputOf<Name>>;
  /** Calls `listener` after every commit that changed something somebody may wait for. */
  onCommit(listener: (changes: ReadonlySet<Change>) => void): () => void;
  /** Lets what was handed in finish, then closes the connection. */
  close(): Promise<void>;
}

/**
 * For what has happened already and must be recorded, the end of a command or of an attempt: tries again
 * for as long as the database takes no writes (a full disk), of which `onRefused` hears once. Rejects with any other
 * error.
 */
export async function writePersistently<Name extends OperationName>(
  writer: Writer,
  name: Name,
  input: InputOf<Name>,
  effects: Effects,
  onRefused?: (error: unknown) => void,
): Promise<OutputOf<Name>> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await writer.write(name, input);
    } catch (error) {
      if (!isUnavailable(error)) throw error;
      if (attempt === 1) onRefused?.(error);
      await delay(RETRY_AFTER_MS, effects);
    }
  }
}

const RETRY_AFTER_MS = 1_000;

export interface QueuedWrite {
  name: OperationName;
  input: unknown;
  /** Lets the others go first: it records what has happened, and nobody waits for an answer. */
  patient: boolean;
  settle(result: WriteResult): void;
}

export type WriteResult = { ok: true; value: unknown } | { ok: false; error: unknown };

/**
 * Group commit on one connection: all writes that arrived since the last commit share the next one, and
 * its fsync. With 64 in a group that is 12 times the rate of one commit for each.
 */
export interface GroupCommit {
  enqueue(write: QueuedWrite): void;
  onCommit(listener: (changes: ReadonlySet<Change>) => void): () => void;
  /** Tells the listeners `everything` if another process wrote since the last time. */
  pollOtherProcesses(): void;
  /** Commits what is queued, then closes the connection. */
  close(): void;
}

/** Beyond this a commit takes so long that the first in the group waits noticeably for the last. */
const LARGEST_GROUP = 256;

/**
 * Of these, so many are for the patient while others wait. In one queue 1,500 requests a second waited for 12,000 results
 * of deliveries: 40 ms each, in place of 11.
 */
const PATIENT_SHARE = 64;

/** More than a small server can work off in the time a client waits. */
const LONGEST_QUEUE = 20_000;

/** Group commit in this thread. */
export function createWriter(database: Database, effects: Effects): Writer {
  const group = createGroupCommit(database, effects);
  return {
    write: (name, input) =>
      new Promise((resolve, reject) => {
        group.enqueue({
          name,
          input,
          patient: false,
          settle: (result) => (result.ok ? resolve(result.value as never) : reject(result.error)),
        });
      }),
    onCommit: group.onCommit,
    close: async () => group.close(),
  };
}

/** The loop that commits. `database` is its own from now on; `figures` are told what it does. */
export function createGroupCommit(
  database: Database,
  effects: Effects,
  figures?: WriterFigures,
): GroupCommit {
  /** Of the operation that runs, and of all in the transaction that succeeded before it. */
  let ownChanges: Change[] = [];
  const changes = new Set<Change>();
  const operations = makeOperations({ database, effects, changed: (change) => void ownChanges.push(change) });
  database.pragma('busy_timeout = 0'); // see beginPatiently
  // What SQLite keeps to undo a single statement. In a file, deployments for 50 projects had 250 pages of it written
  // beside the 98 of each commit.
  database.pragma('temp_store = MEMORY');
  // Other connections' commits change it, and this one's never do.
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();
  let seenVersion = dataVersion.get();
  const isInPlace = watchPlace(database.name, effects);
  const statements = {
    begin: database.prepare('BEGIN IMMEDIATE'),
    commit: database.prepare('COMMIT'),
    rollback: database.prepare('ROLLBACK'),
    savepoint: database.prepare('SAVEPOINT operation'),
    release: database.prepare('RELEASE operation'),
    rollbackTo: database.prepare('ROLLBACK TO operation'),
  };
  /** Rows written by this connection, triggers' too. */
  const totalChanges = database.prepare<[], number>('SELECT total_changes()').pluck();
  const listeners = new Set<(changes: ReadonlySet<Change>) => void>();
  let queue: QueuedWrite[] = [];
  let patient: QueuedWrite[] = [];
  let scheduled = false;
  let closed = false;

  return { enqueue, onCommit, pollOtherProcesses, close };

  function enqueue(write: QueuedWrite): void {
    const refusal = closed
      ? new AppError('unavailable', 'the service is stopping', { retryAfterSeconds: 5 })
      : waiting() >= LONGEST_QUEUE
        ? new AppError('unavailable', 'too many writes wait: try again shortly', { retryAfterSeconds: 1 })
        : undefined;
    if (refusal !== undefined) {
      write.settle(failure(refusal));
      return;
    }
    (write.patient ? patient : queue).push(write);
    schedule();
  }

  function onCommit(listener: (changes: ReadonlySet<Change>) => void): () => void {
    listeners.add(listener);
    return () => listeners.delete(listener);
  }

  function pollOtherProcesses(): void {
    const version = dataVersion.get();
    if (version === seenVersion) return;
    seenVersion = version;
    tell(new Set(['everything']));
  }

  function tell(committed: ReadonlySet<Change>): void {
    for (const listener of listeners) listener(committed);
  }

  function close(): void {
    while (waiting() > 0) commitGroup();
    closed = true;
    database.close();
  }

  function schedule(): void {
    if (scheduled || waiting() === 0) return;
    scheduled = true;
    setImmediate(() => {
      scheduled = false;
      if (closed) return;
      commitGroup();
      schedule();
    });
  }

  function commitGroup(): void {
    const group = nextGroup();
    const results = runInOneTransaction(group);
    figures?.queued(waiting());
    const committed = new Set(changes);
    changes.clear();
    group.forEach((write, index) => {
      write.settle(results[index] ?? failure(new Error('a write without a result')));
    });
    if (committed.size > 0) tell(committed);
  }

  function waiting(): number {
    return queue.length + patient.length;
  }

  function nextGroup(): QueuedWrite[] {
    const first = queue.slice(0, patient.length === 0 ? LARGEST_GROUP : LARGEST_GROUP - PATIENT_SHARE);
    const then = patient.slice(0, first.length === 0 ? LARGEST_GROUP : PATIENT_SHARE);
    queue = queue.slice(first.length);
    patient = patient.slice(then.length);
    return [...first, ...then];
  }

  function runInOneTransaction(group: QueuedWrite[]): WriteResult[] {
    const startedAtMs = effects.monotonicMs();
    try {
      beginPatiently(statements.begin, effects);
      const results = runTogether(group) ?? runApart(group);
      if (!isInPlace()) throw new AppError('unavailable', MOVED, { retryAfterSeconds: 5 });
      statements.commit.run();
      figures?.committed(group.length, effects.monotonicMs() - startedAtMs);
      return results;
    } catch (error) {
      figures?.commitFailed();
      changes.clear();
      if (database.inTransaction) statements.rollback.run();
      if (isFailureOfDisk(error) && isInPlace()) writeOver();
      const cause = failure(storageProblem(error));
      return group.map(() => cause);
    }
  }

  /**
   * Where a commit failed at its very end, as its fsync did, all of it is in the WAL, and whoever reads that after a kill
   * takes it for written. The next commit goes to the same place, even if that fails too.
   */
  function writeOver(): void {
    try {
      statements.begin.run();
      operations['instance.probe']();
      statements.commit.run();
    } catch {
      if (database.inTransaction) statements.rollback.run();
    }
  }

  /**
   * Whoever is refused has written nothing yet as a rule, so there is nothing to undo. Undefined if one has: then all
   * is undone. Savepoints for everybody would cost an eighth of all writes.
   */
  function runTogether(group: QueuedWrite[]): WriteResult[] | undefined {
    const results: WriteResult[] = [];
    for (const write of group) {
      const changesBefore = totalChanges.get();
      const result = runOperation(write);
      if (!result.ok && totalChanges.get() !== changesBefore) {
        statements.rollback.run();
        changes.clear();
        beginPatiently(statements.begin, effects);
        return undefined;
      }
      results.push(result);
    }
    return results;
  }

  /** Each in a savepoint, so that it can be undone by itself. */
  function runApart(group: QueuedWrite[]): WriteResult[] {
    return group.map((write) => {
      statements.savepoint.run();
      const result = runOperation(write);
      if (!result.ok) statements.rollbackTo.run();
      statements.release.run();
      return result;
    });
  }

  /** An operation's own error is its result; what concerns the whole transaction is thrown. */
  function runOperation(write: QueuedWrite): WriteResult {
    ownChanges = [];
    try {
      const value = operations[write.name](write.input as never);
      for (const change of ownChanges) changes.add(change);
      return { ok: true, value };
    } catch (error) {
      // A full disk ends the transaction by itself: then nothing of the group can be kept.
      if (!database.inTransaction || isStorageProblem(error)) throw error;
      return failure(error);
    }
  }
}

/**
 * Another process that commits without pause leaves the file free for microseconds only. SQLite's own patience
 * sleeps up to 100 ms between two looks, and 2 of 8 admin commands gave up after 5 s; with a look every
 * millisecond none waits for half a second.
 */
function beginPatiently(begin: Statement<[]>, effects: Effects): void {
  const untilMs = effects.monotonicMs() + BUSY_TIMEOUT_MS;
  for (;;) {
    try {
      begin.run();
      return;
    } catch (error) {
      if (sqliteCode(error) !== 'SQLITE_BUSY' || effects.monotonicMs() >= untilMs) throw error;
      effects.block(1);
    }
  }
}

function failure(error: unknown): WriteResult {
  return { ok: false, error };
}

/** What a person can do about it; a bug stays the error that it is. */
function storageProblem(error: unknown): unknown {
  if (!isStorageProblem(error)) return error;
  return new AppError('unavailable', storageMessage(error), { cause: error, retryAfterSeconds: 5 });
}

function storageMessage(error: unknown): string {
  const code = sqliteCode(error) ?? '';
  if (code.startsWith('SQLITE_FULL'))
    return 'the disk is full: nothing was written; try again once there is room';
  if (isFailureOfDisk(error))
    return `the disk takes no writes (${code}), for an error or a quota that is used up: nothing was written; try again later`;
  if (isDamaged(error))
    return `the file is damaged (${code}): nothing was written; 'davit doctor' tells more`;
  return 'the database takes no writes at the moment: nothing was written; try again shortly';
}
