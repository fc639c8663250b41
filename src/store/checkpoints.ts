import type { Worker } from 'node:worker_threads';
import { startThread } from '../assets.ts';
import type { Effects } from '../effects.ts';
import type { CheckpointThreadData } from './checkpoint-thread.ts';
import { checkpoint, type Database } from './database.ts';
import { whereaboutsOf } from './place.ts';
import { walUseOf } from './wal.ts';
import type { CheckpointKind, WriterFigures } from './writer-figures.ts';

/** When the WAL of a file is copied into it. */
interface Checkpoints {
  /** Has it copied where it has become large. Returns whether anything was written since the last look. */
  look(): boolean;
  /** Of the thread that copies; the last connection to close copies what is left. */
  end(): Promise<void>;
}

/** 4 MiB that are not in the file: small enough to stay in the page cache, large enough that hot pages are copied once. */
const CHECKPOINT_AT_BYTES = 4 * 1024 * 1024;
/** With more in use the writer itself copies the rest, so that the next write begins the WAL anew. */
const CATCH_UP_AT_BYTES = 32 * 1024 * 1024;
/** The checkpointer leaves the writer no more than this, as all writes wait while that copies: 10 ms for a MiB. */
const CATCH_UP_REST_BYTES = 256 * 1024;
const CATCH_UP_ROUNDS = 3;
/** When the service is up: in the midst of a first burst its start takes 70 ms of a processor, as much as 100 short commands. */
const START_AFTER_MS = 500;

/**
 * For the writer's connection, which has read from the file already: the copying and its fsyncs happen in a thread,
 * nobody's commit waits for them.
 */
export function createCheckpoints(
  path: string,
  database: Database,
  effects: Effects,
  figures?: WriterFigures,
): Checkpoints {
  database.pragma('wal_autocheckpoint = 0');
  // To write over what is there takes half the time of making a file longer, and to cut 40 MB off took 20 ms.
  database.pragma(`journal_size_limit = ${CATCH_UP_AT_BYTES}`);
  const walUse = walUseOf(database);
  const whereabouts = whereaboutsOf(path);
  let checkpointer: Worker | undefined;
  let checkpointing = false;
  let catchUpRounds = 0;
  let askedAtMs = 0;
  let lastUsedBytes = 0;
  const cancelStart = effects.after(START_AFTER_MS, () => void theCheckpointer());

  return {
    look() {
      const { usedBytes, uncopiedBytes } = walUse();
      if (!checkpointing && uncopiedBytes >= CHECKPOINT_AT_BYTES) askForCheckpoint();
      const grew = usedBytes !== lastUsedBytes;
      lastUsedBytes = usedBytes;
      return grew;
    },
    /** Forgets the thread first: else its exit would be taken for a failure, after which the writer copies. */
    async end() {
      cancelStart();
      const thread = checkpointer;
      checkpointer = undefined;
      await thread?.terminate();
    },
  };

  function askForCheckpoint(): void {
    askedAtMs = effects.monotonicMs();
    const thread = theCheckpointer();
    if (thread === undefined) {
      copyHere();
      return;
    }
    checkpointing = true;
    thread.postMessage('checkpoint');
  }

  /** Undefined where none can be started now. */
  function theCheckpointer(): Worker | undefined {
    try {
      checkpointer ??= startCheckpointer();
    } catch {
      return undefined;
    }
    return checkpointer;
  }

  /**
   * Where there can be no further thread or open file, which is said now or later, the writer, which needs neither, does
   * its work. So it does where the thread does not find the file in its place.
   */
  function startCheckpointer(): Worker {
    const thread = startThread('store/checkpoint-thread', {
      workerData: { path, whereabouts } satisfies CheckpointThreadData,
    });
    thread.on('error', () => undefined); // it exits then
    thread.on('exit', () => {
      if (checkpointer !== thread) return;
      checkpointer = undefined;
      checkpointing = false;
      copyHere();
    });
    thread.on('message', () => {
      if (checkpointer !== thread) return; // told before it was ended, and heard after
      checkpointing = false;
      note('background', askedAtMs);
      catchUp();
    });
    return thread;
  }

  /** Under steady load the checkpointer never meets the end of the WAL. */
  function catchUp(): void {
    const { usedBytes, uncopiedBytes } = walUse();
    if (usedBytes <= CATCH_UP_AT_BYTES) {
      catchUpRounds = 0;
    } else if (uncopiedBytes > CATCH_UP_REST_BYTES && catchUpRounds < CATCH_UP_ROUNDS) {
      catchUpRounds += 1;
      askForCheckpoint();
    } else {
      catchUpRounds = 0;
      copyHere();
    }
  }

  function copyHere(): void {
    const startedAtMs = effects.monotonicMs();
    checkpoint(database);
    note('catch_up', startedAtMs);
  }

  function note(kind: CheckpointKind, sinceMs: number): void {
    figures?.checkpointed(kind, effects.monotonicMs() - sinceMs);
  }
}
