import { type ClockHistory, createWatchedClock } from '../clock.ts';
import { DAY_MS, HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { isUnavailable } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { PRUNED, type Pruned, type PrunePosition, type Removed, START } from './retention.ts';
import { WAL_LARGE_BYTES } from './wal.ts';
import type { Writer } from './writer.ts';

export interface Pruner {
  /** Does one step if it is due. Returns when the next one is due, milliseconds since 1970. */
  tick(): Promise<number>;
}

interface PrunerOptions {
  writer: Pick<Writer, 'write'>;
  effects: Effects;
  logger: Logger;
  /** How the clock was set before this start. */
  clockHistory: ClockHistory;
  /** Null: deployments, events and deliveries are kept for ever. */
  retentionMs: number | null;
}

/** The pause between passes is a part of the retention, within these bounds, so that a short one is respected, too. */
const PASS_EVERY_MAX_MS = HOUR_MS;
const PASS_EVERY_MIN_MS = 1_000;
const PASSES_IN_RETENTION = 24;

/**
 * The share of the writer's time that retention uses. How long the last step took, its wait for the writer included,
 * decides how much the next one removes, and how long the pause after it is. While a pass takes longer than the pause
 * between passes, less is removed than expires: then the share rises. Beside 200 creations a second three eighths
 * remove 7,100 deliveries a second, and their p50 is 5.9 ms in place of 5.5; five eighths remove 25,000, and it is 10 ms
 * in place of 7.
 */
const SHARE_AT_FIRST = 3 / 8;
const SHARE_MAX = 5 / 8;

/** A shorter step would remove less than its commit costs; a longer one would be noticed by whoever waits for it. */
const WORK_MIN_MS = 1;
const WORK_MAX_MS = 50;
const PAUSE_MIN_MS = 1;
const PAUSE_MAX_MS = 10_000;

/** A long read, most often a backup, prevents checkpoints: retention should not make the WAL grow quickly then. */
const PAUSE_WHILE_WAL_IS_LARGE_MS = 10_000;

const PAUSE_WHILE_UNAVAILABLE_MS = 60_000;

/**
 * After the clock was set ahead by this much, it may be wrong, and removed data cannot be recovered: retention pauses
 * for a day, in which somebody may notice. It also pauses, needlessly, after the machine was suspended for as long.
 */
const DOUBTED_FROM_MS = HOUR_MS;
const DOUBTED_FOR_MS = DAY_MS;

/** A pass through everything that may have expired. */
interface Pass {
  /** When the pass began: what expires later is left to the next pass. */
  untilMs: number;
  /** The same on the monotonic clock. */
  beganAtMs: number;
  /** The kinds that are not finished, and where each continues; the one whose turn it is first. */
  remaining: { what: Pruned; from: PrunePosition }[];
  removed: Removed;
}

/**
 * Removes what has expired, in periodic passes of small steps, between which the writer is free for others. Its progress
 * is kept in memory only: after a restart the first pass finds the rest.
 */
export function createPruner(options: PrunerOptions): Pruner {
  const { writer, effects, logger, clockHistory, retentionMs } = options;
  const passEveryMs = Math.min(
    PASS_EVERY_MAX_MS,
    Math.max(PASS_EVERY_MIN_MS, (retentionMs ?? Number.POSITIVE_INFINITY) / PASSES_IN_RETENTION),
  );
  const now = createWatchedClock(effects, (byMs) => {
    if (doubt(byMs)) warnOfPause(byMs);
  });
  /** By how much the clock may be ahead of the true time. */
  let doubtedMs = 0;
  let pass: Pass | undefined;
  /** How long the last step took, including its wait for the writer. */
  let tookMs = 0;
  /** When the next step is due, on the monotonic clock. */
  let dueAtMs = Number.NEGATIVE_INFINITY;

  // A restart does not end the pause: the rest of the day is waited for. The day begins with the first setting of the
  // last 24 hours, so that it ends even on a machine that is suspended each night and starts davit each morning.
  for (const { byMs, agoMs } of clockHistory.recent(DOUBTED_FOR_MS, effects.now())) doubt(byMs, agoMs);
  if (doubtedMs >= DOUBTED_FROM_MS) warnOfPause(doubtedMs);

  return {
    async tick() {
      // Read once: a clock that is set between two readings would begin a pass with its new time.
      const nowMs = now();
      if (effects.monotonicMs() >= dueAtMs) {
        doubtedMs = 0;
        const pauseMs = await stepAndPauseMs(nowMs);
        dueAtMs = effects.monotonicMs() + pauseMs;
      }
      return now() + dueAtMs - effects.monotonicMs();
    },
  };

  /**
   * The clock was set: begins a pause if it may be ahead of the true time, ends the pause if it was set back again.
   * Returns whether a pause has begun.
   */
  function doubt(setMs: number, agoMs = 0): boolean {
    if (setMs >= DOUBTED_FROM_MS) {
      const isInDoubt = doubtedMs >= DOUBTED_FROM_MS;
      doubtedMs += setMs;
      // A further setting of less than a day does not prolong the pause, which would never end on a machine that is
      // suspended each night.
      if (isInDoubt && setMs < DOUBTED_FOR_MS) return false;
      dueAtMs = effects.monotonicMs() + DOUBTED_FOR_MS - agoMs;
      return true;
    }
    if (doubtedMs > 0) {
      doubtedMs += setMs;
      if (doubtedMs < DOUBTED_FROM_MS) dueAtMs = effects.monotonicMs();
    }
    return false;
  }

  function warnOfPause(byMs: number): void {
    logger.warn({ by_ms: byMs }, 'the clock was set ahead: nothing is removed for a day from then on');
  }

  async function stepAndPauseMs(nowMs: number): Promise<number> {
    const beganAtMs = effects.monotonicMs();
    pass ??= beginPass(nowMs, beganAtMs);
    const turn = pass.remaining.shift();
    if (turn === undefined) return endPass();
    const share = Math.min(SHARE_MAX, SHARE_AT_FIRST * (1 + (beganAtMs - pass.beganAtMs) / passEveryMs));
    try {
      const workMs = Math.min(WORK_MAX_MS, Math.max(WORK_MIN_MS, share * tookMs));
      const step = { ...turn, untilMs: pass.untilMs, retentionMs, workMs };
      const { removed, next, walBytes } = await writer.write('retention.step', step);
      add(pass.removed, removed);
      if (next !== null) takeTurns(pass, { ...turn, from: next });
      if (pass.remaining.length === 0) return endPass();
      if (walBytes > WAL_LARGE_BYTES) return PAUSE_WHILE_WAL_IS_LARGE_MS;
    } catch (error) {
      // The disk is full, or the writer's queue is.
      if (isUnavailable(error)) {
        pass.remaining.unshift(turn);
        return PAUSE_WHILE_UNAVAILABLE_MS;
      }
      // A bug. Skips this kind, so that the others are still removed.
      dueAtMs = effects.monotonicMs() + PAUSE_MAX_MS;
      throw error;
    }
    tookMs = effects.monotonicMs() - beganAtMs;
    return Math.min(PAUSE_MAX_MS, Math.max(PAUSE_MIN_MS, tookMs / share - tookMs));
  }

  function endPass(): number {
    const removed = pass?.removed ?? {};
    if (Object.keys(removed).length > 0) logger.info(removed, 'removed what has expired');
    pass = undefined;
    return passEveryMs;
  }
}

function beginPass(untilMs: number, beganAtMs: number): Pass {
  return { untilMs, beganAtMs, remaining: PRUNED.map((what) => ({ what, from: START })), removed: {} };
}

function add(sum: Removed, removed: Removed): void {
  for (const [kind, count] of Object.entries(removed) as [keyof Removed, number][]) {
    sum[kind] = (sum[kind] ?? 0) + count;
  }
}

/**
 * Lets the other kinds have their turn first, so that none waits for all of another. Only the last kind, unused pages,
 * stays the last: there are none before rows are removed.
 */
function takeTurns(pass: Pass, turn: Pass['remaining'][number]): void {
  pass.remaining.splice(-1, 0, turn);
}
