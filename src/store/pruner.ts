import { type ClockSettings, createWatchedClock } from '../clock.ts';
import { DAY_MS, HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { isUnavailable } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { PRUNED, type Pruned, type PrunePlace, type Removed, START } from './retention.ts';
import { WAL_LARGE_BYTES } from './wal.ts';
import type { Writer } from './writer.ts';

export interface Pruner {
  /** One step, if its time has come. Returns when the next one is due, milliseconds since 1970. */
  tick(): Promise<number>;
}

interface PrunerOptions {
  writer: Pick<Writer, 'write'>;
  effects: Effects;
  logger: Logger;
  /** How the clock was set before. */
  clockSettings: ClockSettings;
  /** Null: deployments, events and deliveries are kept for ever. */
  retentionMs: number | null;
}

/** Between two passes: what is over is removed soon after its time, also where that is short. */
const PASS_EVERY_MAX_MS = HOUR_MS;
const PASS_EVERY_MIN_MS = 1_000;
const PASSES_IN_RETENTION = 24;

/**
 * Between two steps: 19 times as long as the last one took, waiting included, so that it has a twentieth of the
 * writer at most, and less when others need it. In a file of 7 GB that is 110 deliveries a second with their events
 * and attempts, or 11 MB of logs; the p99 of 200 creations a second beside it, in turns of a second with it and without,
 * was 5.9 and 7.9 ms, 14.3 and 15.1, 20.1 and 23.5.
 */
const PAUSE_FACTOR = 19;
const PAUSE_MIN_MS = 20;
const PAUSE_MAX_MS = 10_000;

/** Somebody reads for long, a backup as a rule, and nothing of the WAL can be copied: it should grow slowly then. */
const PAUSE_WHILE_WAL_IS_LARGE_MS = 10_000;

const PAUSE_WHILE_UNAVAILABLE_MS = 60_000;

/**
 * A clock that was set ahead by so much may be wrong, and what is removed does not come back: there is a day to notice
 * it. A machine that slept for as long waits for nothing but that.
 */
const DOUBTED_FROM_MS = HOUR_MS;
const DOUBTED_FOR_MS = DAY_MS;

/** A pass through everything that may be over. */
interface Pass {
  /** When it began. */
  untilMs: number;
  left: Pruned[];
  from: PrunePlace;
  removed: Removed;
}

/**
 * Removes what is over: a pass through all of it now and then, in steps that leave the writer to others. Where it is
 * is memory: after a restart the first pass finds what is left.
 */
export function createPruner(options: PrunerOptions): Pruner {
  const { writer, effects, logger, clockSettings, retentionMs } = options;
  const passEveryMs = Math.min(
    PASS_EVERY_MAX_MS,
    Math.max(PASS_EVERY_MIN_MS, (retentionMs ?? Number.POSITIVE_INFINITY) / PASSES_IN_RETENTION),
  );
  const now = createWatchedClock(effects, doubt);
  /** By so much the clock may be ahead of the truth. */
  let doubtedMs = 0;
  let pass: Pass | undefined;
  /** On the clock that never jumps. */
  let dueAtMs = Number.NEGATIVE_INFINITY;

  // Whoever starts davit anew has not looked at the clock: what is left of the day is waited for. The first setting of the
  // last 24 hours began it, so that it ends also on a machine that sleeps each night and starts davit each morning.
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

  /** Whoever sets it back again has seen to it. */
  function doubt(setMs: number, agoMs = 0): void {
    if (setMs >= DOUBTED_FROM_MS) {
      const isInDoubt = doubtedMs >= DOUBTED_FROM_MS;
      doubtedMs += setMs;
      // One day for all of less than a day: a machine that sleeps each night would never come to its end.
      if (isInDoubt && setMs < DOUBTED_FOR_MS) return;
      dueAtMs = effects.monotonicMs() + DOUBTED_FOR_MS - agoMs;
      logger.warn({ by_ms: setMs }, 'the clock was set ahead: nothing is removed for a day from then on');
    } else if (doubtedMs > 0) {
      doubtedMs += setMs;
      if (doubtedMs < DOUBTED_FROM_MS) dueAtMs = effects.monotonicMs();
    }
  }

  async function stepAndPauseMs(): Promise<number> {
    pass ??= { untilMs: now(), left: [...PRUNED], from: START, removed: {} };
    const [what] = pass.left;
    if (what === undefined) return endPass();
    const beganAtMs = effects.monotonicMs();
    try {
      const { from, untilMs } = pass;
      const step = { what, from, untilMs, retentionMs };
      const { removed, next, walBytes } = await writer.write('retention.step', step);
      add(pass.removed, removed);
      goOnAt(pass, next);
      if (pass.left.length === 0) return endPass();
      if (walBytes > WAL_LARGE_BYTES) return PAUSE_WHILE_WAL_IS_LARGE_MS;
    } catch (error) {
      // A full disk, or more to do than can be done.
      if (isUnavailable(error)) return PAUSE_WHILE_UNAVAILABLE_MS;
      // A bug, which is to keep nothing else in the file.
      goOnAt(pass, null);
      dueAtMs = effects.monotonicMs() + PAUSE_MAX_MS;
      throw error;
    }
    const tookMs = effects.monotonicMs() - beganAtMs;
    return Math.min(PAUSE_MAX_MS, Math.max(PAUSE_MIN_MS, PAUSE_FACTOR * tookMs));
  }

  function endPass(): number {
    const removed = pass?.removed ?? {};
    if (Object.keys(removed).length > 0) logger.info(removed, 'what was over is removed');
    pass = undefined;
    return passEveryMs;
  }
}

function add(sum: Removed, removed: Removed): void {
  for (const [kind, count] of Object.entries(removed) as [keyof Removed, number][]) {
    sum[kind] = (sum[kind] ?? 0) + count;
  }
}

/** Null: with the next kind. */
function goOnAt(pass: Pass, place: PrunePlace | null): void {
  pass.from = place ?? START;
  if (place === null) pass.left.shift();
}
