import type { Worker } from 'node:worker_threads';
import { startThread } from '../assets.ts';
import type { Effects } from '../effects.ts';
import type { CheckpointThreadData, ToCheckpointThread } from './checkpoint-thread.ts';
import { checkpoint, type Database } from './database.ts';
import { identifyFiles } from './place.ts';
import { walUseOf } from './wal.ts';
import type { CheckpointKind, WriterMetrics } from './writer-metrics.ts';

/** Decides when to checkpoint the WAL. */
interface Checkpoints {
  /** Requests a checkpoint if the WAL has become large. Returns whether anything was written since the last call. */
  poll(): boolean;
  /** Ends the thread. What it has not copied is left to the caller. */
  end(): Promise<void>;
}

/** A checkpoint begins at this much uncopied: it fits the page cache, and pages written often are copied once. */
export const CHECKPOINT_AT_BYTES = 4 * 1024 * 1024;
/** When more of the WAL is in use, the writer copies the rest itself, so that the next write starts the WAL over. */
const CATCH_UP_AT_BYTES = 32 * 1024 * 1024;
/**
 * With more than this left, the thread copies again before the writer does, for which all writes wait: 10 ms for a MiB.
 */
const CATCH_UP_REST_BYTES = 256 * 1024;
const CATCH_UP_ROUNDS = 3;
/** After the start: the thread takes 70 ms of CPU time to start, as much as 100 short commands of a first burst. */
const START_AFTER_MS = 500;

/**
 * Checkpoints for the writer's connection, which must have read from the file already. A thread copies and fsyncs, so
 * that no commit waits for it.
 */
export function createCheckpoints(
  path: string,
  database: Database,
  effects: Effects,
  metrics?: WriterMetrics,
): Checkpoints {
  database.pragma('wal_autocheckpoint = 0');
  // Keeps this much of the WAL file: overwriting takes half the time of extending a file, and truncating 40 MB took 20
  // ms.
  database.pragma(`journal_size_limit = ${CATCH_UP_AT_BYTES}`);
  const walUse = walUseOf(database);
  const files = identifyFiles(path);
  let checkpointer: Worker | undefined;
  let checkpointing = false;
  let catchUpRounds = 0;
  let requestedAtMs = 0;
  let lastUsedBytes = 0;
  const cancelStart = effects.after(START_AFTER_MS, () => void runningCheckpointer());

  return {
    poll() {
      const { usedBytes, uncopiedBytes } = walUse();
      if (!checkpointing && uncopiedBytes >= CHECKPOINT_AT_BYTES) requestCheckpoint();
      const wasWritten = usedBytes !== lastUsedBytes;
      lastUsedBytes = usedBytes;
      return wasWritten;
    },
    /**
     * Unsets `checkpointer` first: the exit of the current one is taken for a failure, after which the writer copies.
     */
    async end() {
      cancelStart();
      const thread = checkpointer;
      checkpointer = undefined;
      if (thread === undefined) return;
      // Not `terminate`: in a thread that is just loading SQLite, it aborts the whole process.
      const ended = new Promise((resolve) => thread.once('exit', resolve));
      thread.postMessage('end' satisfies ToCheckpointThread);
      await ended;
    },
  };

  function requestCheckpoint(): void {
    requestedAtMs = effects.monotonicMs();
    const thread = runningCheckpointer();
    if (thread === undefined) {
      checkpointInWriter();
      return;
    }
    checkpointing = true;
    thread.postMessage('checkpoint' satisfies ToCheckpointThread);
  }

  /** Starts the thread if it does not run; undefined if it cannot be started. */
  function runningCheckpointer(): Worker | undefined {
    try {
      checkpointer ??= startCheckpointer();
    } catch {
      return undefined;
    }
    return checkpointer;
  }

  /**
   * The thread may exit at once or later, for want of threads or file descriptors, or because the file is not in its
   * place any more. Then the writer checkpoints instead, which needs neither.
   */
  function startCheckpointer(): Worker {
    const thread = startThread('store/checkpoint-thread', {
      workerData: { path, files } satisfies CheckpointThreadData,
    });
    thread.on('error', () => undefined); // an exit follows
    thread.on('exit', () => {
      if (checkpointer !== thread) return;
      checkpointer = undefined;
      checkpointing = false;
      checkpointInWriter();
    });
    thread.on('message', () => {
      if (checkpointer !== thread) return; // sent before `end`, received after
      checkpointing = false;
      record('background', requestedAtMs);
      catchUp();
    });
    return thread;
  }

  /** Under steady load the thread never reaches the end of the WAL, as writes go on: the writer must copy the rest. */
  function catchUp(): void {
    const { usedBytes, uncopiedBytes } = walUse();
    if (usedBytes <= CATCH_UP_AT_BYTES) {
      catchUpRounds = 0;
    } else if (uncopiedBytes > CATCH_UP_REST_BYTES && catchUpRounds < CATCH_UP_ROUNDS) {
      catchUpRounds += 1;
      requestCheckpoint();
    } else {
      catchUpRounds = 0;
      checkpointInWriter();
    }
  }

  function checkpointInWriter(): void {
    const startedAtMs = effects.monotonicMs();
    checkpoint(database);
    record('catch_up', startedAtMs);
  }

  function record(kind: CheckpointKind, sinceMs: number): void {
    metrics?.checkpointed(kind, effects.monotonicMs() - sinceMs);
  }
}
