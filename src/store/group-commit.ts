import type { Effects } from '../effects.ts';
import { AppError, isStorageProblem } from '../errors.ts';
import type { Change } from './changes.ts';
import { BUSY_TIMEOUT_MS, checkpoint, type Database, type Statement } from './database.ts';
import { makeOperations, type OperationName } from './operations.ts';
import { CUT_SHORT, MOVED, watchPlace } from './place.ts';
import { isDamaged, isFailureOfDisk, sqliteCode } from './sqlite-errors.ts';
import { watchWal } from './wal.ts';
import type { CommitListener, Writer } from './writer.ts';
import type { WriterMetrics } from './writer-metrics.ts';

export interface QueuedWrite {
  name: OperationName;
  input: unknown;
  /** Yields to other writes: it records what has happened, and no request waits for it. */
  lowPriority: boolean;
  settle(result: WriteResult): void;
}

export type WriteResult = { ok: true; value: unknown } | { ok: false; error: unknown };

/**
 * Group commit on one connection: all writes that arrived since the last commit share the next one and its fsync. With
 * 64 writes in a group the rate is 12 times that of separate commits.
 */
export interface GroupCommit {
  enqueue(write: QueuedWrite): void;
  onCommit(listener: CommitListener): void;
  /** Announces `everything` if another process has written since the last call. */
  pollOtherProcesses(): void;
  /** Commits what is queued, then closes the connection; calls `last` in between if the file is in its place. */
  close(last?: () => void): void;
}

/** In a larger group the first write would wait noticeably for the last. */
const LARGEST_GROUP = 256;

/**
 * How many writes of a group may be of low priority while others wait. In a common queue, 1,500 requests a second
 * waited for 12,000 results of deliveries: 40 ms each instead of 11. With 64 in place of 32, a tenth more is delivered
 * while deployments are created as fast as davit can, and the p99 of creating one is 3.2 times that without deliveries
 * instead of 2.8.
 */
const LOW_PRIORITY_SHARE = 32;

/**
 * How long a group waits for a transaction of another process that the group before has waited for in vain: with
 * `BUSY_TIMEOUT_MS` for each, 1,500 writes were refused only after 60 s.
 */
const STILL_BUSY_TIMEOUT_MS = 250;

/**
 * After a checkpoint that failed, as the file would have to grow for instance: each copies up to 4 MiB again, for 40
 * ms. Without the pause after others no write is refused twice; what a reader held up costs nothing to ask for again.
 */
const START_WAL_OVER_AGAIN_MS = 1_000;

/** Group commit in this thread. */
export function createWriter(database: Database, effects: Effects): Writer {
  const group = createGroupCommit(database, effects);
  return {
    write: (name, input) =>
      new Promise((resolve, reject) => {
        group.enqueue({
          name,
          input,
          lowPriority: false,
          settle: (result) => (result.ok ? resolve(result.value as never) : reject(result.error)),
        });
      }),
    onCommit: group.onCommit,
    close: async () => group.close(),
  };
}

/** Starts group commit. Nothing else may use `database` from now on; `metrics` count the commits. */
export function createGroupCommit(
  database: Database,
  effects: Effects,
  metrics?: WriterMetrics,
): GroupCommit {
  /** The changes of the operation that runs. */
  let ownChanges: Change[] = [];
  /** The changes of the operations of this transaction that have succeeded. */
  const changes = new Set<Change>();
  const operations = makeOperations({ database, effects, changed: (change) => void ownChanges.push(change) });
  database.pragma('busy_timeout = 0'); // see beginWithRetries
  // Keeps in memory what SQLite would write to a file beside the commit: the pages that a statement changes which can
  // fail half-way, as one with a trigger.
  database.pragma('temp_store = MEMORY');
  // Commits of other connections change it, this connection's own do not.
  const dataVersion = database.prepare<[], number>('PRAGMA data_version').pluck();
  let seenVersion = dataVersion.get();
  const isInPlace = watchPlace(database.name, effects);
  const wal = watchWal(database);
  const statements = {
    begin: database.prepare('BEGIN IMMEDIATE'),
    commit: database.prepare('COMMIT'),
    rollback: database.prepare('ROLLBACK'),
    savepoint: database.prepare('SAVEPOINT operation'),
    release: database.prepare('RELEASE operation'),
    rollbackTo: database.prepare('ROLLBACK TO operation'),
  };
  /** How many rows this connection has changed, including by triggers. */
  const totalChanges = database.prepare<[], number>('SELECT total_changes()').pluck();
  const listeners: CommitListener[] = [];
  let queue: QueuedWrite[] = [];
  let lowPriority: QueuedWrite[] = [];
  let scheduled = false;
  let closed = false;
  /** Whether the last transaction could not begin, as another process had one. */
  let wasBusy = false;
  /** On the monotonic clock. */
  let startOverFromMs = Number.NEGATIVE_INFINITY;

  return { enqueue, onCommit: (listener) => void listeners.push(listener), pollOtherProcesses, close };

  function enqueue(write: QueuedWrite): void {
    if (closed) {
      const refusal = new AppError('unavailable', 'the service is stopping', { retryAfterSeconds: 5 });
      write.settle(failure(refusal));
      return;
    }
    (write.lowPriority ? lowPriority : queue).push(write);
    schedule();
  }

  function pollOtherProcesses(): void {
    const version = dataVersion.get();
    if (version === seenVersion) return;
    seenVersion = version;
    announce(new Set(['everything']));
  }

  function announce(committed: ReadonlySet<Change>): void {
    for (const listener of listeners) listener(committed);
  }

  function close(last = () => {}): void {
    while (waiting() > 0) commitGroup();
    closed = true;
    if (isInPlace()) last();
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
    metrics?.queued(waiting());
    const committed = new Set(changes);
    changes.clear();
    group.forEach((write, index) => {
      write.settle(results[index] ?? failure(new Error('a write without a result')));
    });
    if (committed.size > 0) announce(committed);
  }

  function waiting(): number {
    return queue.length + lowPriority.length;
  }

  function nextGroup(): QueuedWrite[] {
    const first = queue.slice(
      0,
      lowPriority.length === 0 ? LARGEST_GROUP : LARGEST_GROUP - LOW_PRIORITY_SHARE,
    );
    const then = lowPriority.slice(0, first.length === 0 ? LARGEST_GROUP : LOW_PRIORITY_SHARE);
    queue = queue.slice(first.length);
    lowPriority = lowPriority.slice(then.length);
    return [...first, ...then];
  }

  function runInOneTransaction(group: QueuedWrite[]): WriteResult[] {
    const startedAtMs = effects.monotonicMs();
    try {
      begin(wasBusy ? STILL_BUSY_TIMEOUT_MS : BUSY_TIMEOUT_MS);
      wasBusy = false;
      const results = runWithoutSavepoints(group) ?? runWithSavepoints(group);
      if (!isInPlace() || !wal.isWhole()) refuse();
      statements.commit.run();
      metrics?.committed(group.length, effects.monotonicMs() - startedAtMs);
      return results;
    } catch (error) {
      metrics?.commitFailed();
      wasBusy = sqliteCode(error) === 'SQLITE_BUSY';
      changes.clear();
      if (database.inTransaction) statements.rollback.run();
      if (lacksRoom(error) && isInPlace()) startWalOver();
      if (isFailureOfDisk(error) && isInPlace() && wal.isWhole()) overwriteFailedCommit();
      const cause = failure(storageProblem(error));
      return group.map(() => cause);
    }
  }

  /** Begins again if another process has emptied the WAL meanwhile, as a checkpoint that this waited for may do. */
  function begin(timeoutMs: number): void {
    for (;;) {
      if (!wal.note()) refuse();
      beginWithRetries(statements.begin, effects, timeoutMs);
      if (wal.isWhole()) return;
      statements.rollback.run();
    }
  }

  function refuse(): never {
    throw new AppError('unavailable', isInPlace() ? CUT_SHORT : MOVED, { retryAfterSeconds: 5 });
  }

  /**
   * Copies the WAL into the file, so that the next commit overwrites the WAL from its beginning, which takes no room. A
   * WAL below the size at which checkpoints begin would stay as it is, and every write be refused, even if the file has
   * room inside. In this thread, as no write gets on meanwhile anyway.
   */
  function startWalOver(): void {
    if (effects.monotonicMs() < startOverFromMs || checkpoint(database)) return;
    startOverFromMs = effects.monotonicMs() + START_WAL_OVER_AGAIN_MS;
  }

  /**
   * When only the fsync of a commit fails, all of its frames are in the WAL, and recovery after a kill would take them
   * for committed. The next commit overwrites these frames, even if it fails too.
   */
  function overwriteFailedCommit(): void {
    try {
      statements.begin.run();
      operations['instance.probe']();
      statements.commit.run();
    } catch {
      if (database.inTransaction) statements.rollback.run();
    }
  }

  /**
   * Runs the writes without a savepoint for each, which would reduce the throughput by an eighth: an operation that
   * fails has usually written nothing, so there is nothing to undo. If one has, rolls back the whole group and returns
   * undefined.
   */
  function runWithoutSavepoints(group: QueuedWrite[]): WriteResult[] | undefined {
    const results: WriteResult[] = [];
    for (const write of group) {
      const changesBefore = totalChanges.get();
      const result = runOperation(write);
      if (!result.ok && totalChanges.get() !== changesBefore) {
        statements.rollback.run();
        changes.clear();
        begin(BUSY_TIMEOUT_MS);
        return undefined;
      }
      results.push(result);
    }
    return results;
  }

  /** Runs each write in a savepoint, so that it can be rolled back by itself. */
  function runWithSavepoints(group: QueuedWrite[]): WriteResult[] {
    return group.map((write) => {
      statements.savepoint.run();
      const result = runOperation(write);
      if (!result.ok) statements.rollbackTo.run();
      statements.release.run();
      return result;
    });
  }

  /** Returns an operation's own error as its result; throws errors that affect the whole transaction. */
  function runOperation(write: QueuedWrite): WriteResult {
    ownChanges = [];
    try {
      const value = operations[write.name](write.input as never);
      for (const change of ownChanges) changes.add(change);
      return { ok: true, value };
    } catch (error) {
      // A full disk makes SQLite roll back the transaction: then the whole group is lost.
      if (!database.inTransaction || isStorageProblem(error)) throw error;
      return failure(error);
    }
  }
}

/**
 * Begins a transaction, and retries every millisecond while another process has one. A process that commits without
 * pause leaves the file unlocked for microseconds only: with SQLite's busy timeout, which sleeps up to 100 ms between
 * attempts, 2 of 8 admin commands gave up after 5 s; like this none waits for half a second.
 */
function beginWithRetries(begin: Statement<[]>, effects: Effects, timeoutMs: number): void {
  const untilMs = effects.monotonicMs() + timeoutMs;
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

/** Whether the WAL could not be made longer: a used up quota and a limit on the size of files are IOERR_WRITE to SQLite. */
function lacksRoom(error: unknown): boolean {
  return ['SQLITE_FULL', 'SQLITE_IOERR_WRITE'].includes(sqliteCode(error) ?? '');
}

function failure(error: unknown): WriteResult {
  return { ok: false, error };
}

/** Turns SQLite's storage errors into AppErrors that say what to do; returns any other error, which is a bug, as is. */
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
