import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Effects } from '../effects.ts';
import { isUnavailable } from '../errors.ts';
import type { OpenReplay } from '../store/replays.ts';
import type { Reads } from '../store/store.ts';
import type { Writer } from '../store/writer.ts';

export interface Replayer {
  /** One step of each replay whose receiver keeps up. Resolves to when to call it again; null: after the next change. */
  tick(): Promise<number | null>;
}

/** How many deliveries a step sends again at most. It is one transaction, and occupies the writer for about 4 ms. */
const STEP_ROWS = 500;

/**
 * While so many deliveries of a webhook are due, its replay waits (backpressure): its receiver sets the pace, new events
 * never queue behind more than this and one step, and a million deliveries do not become due at once.
 */
const BUSY_ROWS = 500;

/**
 * Carries out replays. The progress of each is stored in its row, in the same transaction as the deliveries of a step: a
 * restart continues there, and no delivery is sent again twice by the same replay.
 */
export function createReplayer(reads: Reads, writer: Writer, effects: Effects): Replayer {
  return { tick };

  async function tick(): Promise<number | null> {
    let stepped = false;
    for (const replay of reads.replays.open()) {
      if (reads.replays.isBusy(replay.webhookId, effects.now(), BUSY_ROWS)) continue;
      if (!(await step(replay))) return null;
      stepped = true;
    }
    return stepped ? effects.now() : null;
  }

  /** Makes the next matching deliveries due, however far apart they are. False: nothing can be written at the moment. */
  async function step(replay: OpenReplay): Promise<boolean> {
    const seqs: number[] = [];
    for (let afterSeq = replay.doneSeq; ; ) {
      const slice = reads.replays.slice(replay, afterSeq, STEP_ROWS - seqs.length);
      seqs.push(...slice.seqs);
      if (slice.endSeq === null || seqs.length === STEP_ROWS) {
        return await written({ seq: replay.seq, seqs, doneSeq: slice.endSeq });
      }
      afterSeq = slice.endSeq;
      await nextTurn();
    }
  }

  /** False, for a full disk for instance: the replay's row is unchanged, and the next tick tries the same step again. */
  async function written(done: { seq: number; seqs: number[]; doneSeq: number | null }): Promise<boolean> {
    try {
      await writer.write('replays.step', done);
      return true;
    } catch (error) {
      if (isUnavailable(error)) return false;
      throw error;
    }
  }
}
