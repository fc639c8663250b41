import type { Effects } from './effects.ts';
import type { Loop } from './loop.ts';

interface Readiness {
  /** What keeps davit from its work; null: nothing. One look serves all who ask within a second. */
  check(): Promise<string | null>;
  /** From now on this loop of the executor's has to turn. */
  watch(executorLoop: Pick<Loop, 'quietMs'>): void;
}

/** A loop that has not looked for so long hangs. */
const HANGING_AFTER_MS = 10_000;
const LOOK_EVERY_MS = 1_000;

/** Whether the database takes writes and the loops turn. */
export function createReadiness({
  isInPlace,
  probe,
  problem,
  dispatcherQuietMs,
  stopping,
  effects,
}: {
  /** Whether the file that is open is where it was. */
  isInPlace: () => boolean;
  /** Resolves once a write is on the disk. */
  probe: () => Promise<unknown>;
  /** What else keeps deployments from starting; null: nothing. */
  problem: () => string | null;
  /** How long ago the dispatcher last looked for work; does not resolve while it hangs. */
  dispatcherQuietMs: () => Promise<number>;
  /** Aborted once davit stops. */
  stopping: AbortSignal;
  effects: Effects;
}): Readiness {
  let executorLoop: Pick<Loop, 'quietMs'> | undefined;
  let last: { atMs: number; problem: Promise<string | null> } | undefined;

  return {
    check() {
      if (stopping.aborted) return Promise.resolve('the service is stopping');
      const nowMs = effects.monotonicMs();
      if (last === undefined || nowMs - last.atMs > LOOK_EVERY_MS) last = { atMs: nowMs, problem: look() };
      return last.problem;
    },
    watch(loop) {
      executorLoop = loop;
    },
  };

  async function look(): Promise<string | null> {
    const timedOut = new Promise<'hangs'>((resolve) =>
      effects.after(HANGING_AFTER_MS, () => resolve('hangs')),
    );
    const wrote = probe().then(
      () => true,
      () => false,
    );
    if (!isInPlace()) return 'the database was moved, removed or replaced, or is out of reach';
    if ((await Promise.race([wrote, timedOut])) !== true) return 'the database takes no writes';
    const found = problem();
    if (found !== null) return found;
    if ((executorLoop?.quietMs() ?? 0) > HANGING_AFTER_MS) return 'the executor hangs';
    const quietMs = await Promise.race([dispatcherQuietMs(), timedOut]);
    return quietMs === 'hangs' || quietMs > HANGING_AFTER_MS ? 'the dispatcher hangs' : null;
  }
}
