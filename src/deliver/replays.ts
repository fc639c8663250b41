import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Effects } from '../effects.ts';
import { isUnavailable } from '../errors.ts';
import type { OpenReplay } from '../store/replays.ts';
import type { Reads } from '../store/store.ts';
import type { Writer } from '../store/writer.ts';

export interface Replayer {
  /** One step of each replay whose receiver keeps up. Returns when to look again; null: when something changed. */
  tick(): Promise<number | null>;
}

/** One step is one transaction, and keeps the writer from others for about 4 ms. */
const STEP_ROWS = 500;

/**
 * While so many deliveries of a webhook are due, its replay waits: its receiver sets the pace, new events never
 * queue behind more than this and one step, and a million deliveries do not become due at once.
 */
const BUSY_ROWS = 500;

/**
 * Works replays off. How far each one is stands in its row, written with the deliveries of each step: a restart
 * goes on there, and none is begun anew twice by the same replay.
 */
export function createReplayer({
  reads,
  writer,
  effects,
}: {
  reads: Reads;
  writer: Writer;
  effects: Effects;
}): Replayer {
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

  /** The next deliveries that fit, however far apart they are. False: nothing can be written at the moment. */
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

  /** A full disk is no bug: the row is still there, and the next look begins at the same place. */
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
