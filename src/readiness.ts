import type { Effects } from './effects.ts';
import type { Loop } from './loop.ts';

interface Readiness {
  /** Why davit cannot do its work; null: it can. A result is reused for a second. */
  check(): Promise<string | null>;
  /** From now on `check` includes this loop, the executor's. */
  watch(executorLoop: Pick<Loop, 'quietMs'>): void;
}

/** A loop without a successful tick for so long counts as hanging. */
const HANGING_AFTER_MS = 10_000;
const CHECK_EVERY_MS = 1_000;

/** Checks whether the database takes writes and the loops turn. */
export function createReadiness({
  isInPlace,
  probe,
  problem,
  dispatcherQuietMs,
  stopping,
  effects,
}: {
  /** Whether the open database file still has its path. */
  isInPlace: () => boolean;
  /** Resolves once a write is on the disk. */
  probe: () => Promise<unknown>;
  /** Any other reason why no deployment starts; null: none. */
  problem: () => string | null;
  /** How long ago the dispatcher's last successful tick began; does not resolve while its thread hangs. */
  dispatcherQuietMs: () => Promise<number>;
  /** Aborted when davit begins to stop. */
  stopping: AbortSignal;
  effects: Effects;
}): Readiness {
  let executorLoop: Pick<Loop, 'quietMs'> | undefined;
  let last: { atMs: number; problem: Promise<string | null> } | undefined;
  const probed = joined(probe);
  const dispatcherAsked = joined(dispatcherQuietMs);

  return {
    check() {
      if (stopping.aborted) return Promise.resolve('the service is stopping');
      const nowMs = effects.monotonicMs();
      if (last === undefined || nowMs - last.atMs > CHECK_EVERY_MS) {
        last = { atMs: nowMs, problem: findProblem() };
      }
      return last.problem;
    },
    watch(loop) {
      executorLoop = loop;
    },
  };

  async function findProblem(): Promise<string | null> {
    const timedOut = new Promise<'hangs'>((resolve) =>
      effects.after(HANGING_AFTER_MS, () => resolve('hangs')),
    );
    const wrote = probed().then(
      () => true,
      () => false,
    );
    if (!isInPlace()) return 'the database was moved, removed or replaced, or is out of reach';
    if ((await Promise.race([wrote, timedOut])) !== true) return 'the database takes no writes';
    const found = problem();
    if (found !== null) return found;
    if ((executorLoop?.quietMs() ?? 0) > HANGING_AFTER_MS) return 'the executor hangs';
    const quietMs = await Promise.race([dispatcherAsked(), timedOut]);
    return quietMs === 'hangs' || quietMs > HANGING_AFTER_MS ? 'the dispatcher hangs' : null;
  }
}

/**
 * `ask`, but one call at a time, which all callers share: a disk that hangs for hours must not have thousands of probes
 * waiting for it.
 */
function joined<Result>(ask: () => Promise<Result>): () => Promise<Result> {
  let underWay: Promise<Result> | undefined;
  return () => {
    underWay ??= ask().finally(() => {
      underWay = undefined;
    });
    return underWay;
  };
}
