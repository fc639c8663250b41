import { type ClockSettings, createWatchedClock } from '../clock.ts';
import { DAY_MS, HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { isUnavailable } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { PRUNED, type Pruned, type PrunePlace, type Removed, START } from './retention.ts';
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
  clockSettings: ClockSettings;
  /** Null: deployments, events and deliveries are kept for ever. */
  retentionMs: number | null;
}

/** The pause between passes is a part of the retention, within these bounds, so that a short one is respected, too. */
const PASS_EVERY_MAX_MS = HOUR_MS;
const PASS_EVERY_MIN_MS = 1_000;
const PASSES_IN_RETENTION = 24;

/**
 * The pause after a step is 19 times as long as the step took, including its wait for the writer: retention uses at
 * most a twentieth of the writer's time, and less under load. In a file of 7 GB it removes 110 deliveries a second with
 * their events and attempts, or 11 MB of logs. The p99 of 200 creations a second, measured in alternate seconds with it
 * and without, was 5.9 and 7.9 ms, 14.3 and 15.1, 20.1 and 23.5.
 */
const PAUSE_FACTOR = 19;
const PAUSE_MIN_MS = 20;
const PAUSE_MAX_MS = 10_000;

/** A step lengthens a commit by no more than this. */
const WORK_MS = 1;

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
  /** The kinds that are not finished, and where each continues; the one whose turn it is first. */
  remaining: { what: Pruned; from: PrunePlace }[];
  removed: Removed;
}

/**
 * Removes what has expired, in periodic passes of small steps that leave the writer to others. Its progress is kept in
 * memory only: after a restart the first pass finds the rest.
 */
export function createPruner(options: PrunerOptions): Pruner {
  const { writer, effects, logger, clockSettings, retentionMs } = options;
  const passEveryMs = Math.min(
    PASS_EVERY_MAX_MS,
    Math.max(PASS_EVERY_MIN_MS, (retentionMs ?? Number.POSITIVE_INFINITY) / PASSES_IN_RETENTION),
  );
  const now = createWatchedClock(effects, doubt);
  /** By how much the clock may be ahead of the true time. */
  let doubtedMs = 0;
  let pass: Pass | undefined;
  /** When the next step is due, on the monotonic clock. */
  let dueAtMs = Number.NEGATIVE_INFINITY;

  // A restart does not end the pause: the rest of the day is waited for. The day begins with the first setting of the
  // last 24 hours, so that it ends even on a machine that is suspended each night and starts davit each morning.
  for (const { byMs, agoMs } of clockSettings.recent(DOUBTED_FOR_MS, effects.now())) doubt(byMs, agoMs);

  return {
    async tick() {
      now();
      if (effects.monotonicMs() >= dueAtMs) {
        doubtedMs = 0;
        const pauseMs = await stepAndPauseMs();
        dueAtMs = effects.monotonicMs() + pauseMs;
      }
      return now() + dueAtMs - effects.monotonicMs();
    },
  };

  /** The clock was set: begins a pause if it may be ahead of the true time, ends the pause if it was set back again. */
  function doubt(setMs: number, agoMs = 0): void {
    if (setMs >= DOUBTED_FROM_MS) {
      const isInDoubt = doubtedMs >= DOUBTED_FROM_MS;
      doubtedMs += setMs;
      // A further setting of less than a day does not prolong the pause, which would never end on a machine that is
      // suspended each night.
      if (isInDoubt && setMs < DOUBTED_FOR_MS) return;
      dueAtMs = effects.monotonicMs() + DOUBTED_FOR_MS - agoMs;
      logger.warn({ by_ms: setMs }, 'the clock was set ahead: nothing is removed for a day from then on');
    } else if (doubtedMs > 0) {
      doubtedMs += setMs;
      if (doubtedMs < DOUBTED_FROM_MS) dueAtMs = effects.monotonicMs();
    }
  }

  async function stepAndPauseMs(): Promise<number> {
    pass ??= { untilMs: now(), remaining: PRUNED.map((what) => ({ what, from: START })), removed: {} };
    const turn = pass.remaining.shift();
    if (turn === undefined) return endPass();
    const beganAtMs = effects.monotonicMs();
    try {
      const step = { ...turn, untilMs: pass.untilMs, retentionMs, workMs: WORK_MS };
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
    const tookMs = effects.monotonicMs() - beganAtMs;
    return Math.min(PAUSE_MAX_MS, Math.max(PAUSE_MIN_MS, PAUSE_FACTOR * tookMs));
  }

  function endPass(): number {
    const removed = pass?.removed ?? {};
    if (Object.keys(removed).length > 0) logger.info(removed, 'removed what has expired');
    pass = undefined;
    return passEveryMs;
  }
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
