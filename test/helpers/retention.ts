import { DAY_MS } from '../../src/durations.ts';
import {
  PRUNED,
  type Pruned,
  type PruneResult,
  type PruneStep,
  type Removed,
  START,
} from '../../src/store/retention.ts';
import type { TestStore } from './store.ts';

export const RETENTION_MS = 90 * DAY_MS;

/** More than any test has work for. */
const STEPS_MAX = 10_000;

/** The steps of one kind, as short as they can be, to the last; what each removed. */
export async function stepsOf(
  store: TestStore,
  what: Pruned,
  retentionMs: number | null = RETENTION_MS,
): Promise<PruneResult[]> {
  const results: PruneResult[] = [];
  for (let from: PruneStep['from'] | null = START; from !== null; from = results.at(-1)?.next ?? null) {
    results.push(
      await store.writer.write('retention.step', {
        what,
        from,
        untilMs: Number.POSITIVE_INFINITY,
        retentionMs,
        workMs: 0,
      }),
    );
    if (results.length > STEPS_MAX) throw new Error(`${what} has no end: ${JSON.stringify(results.at(-1))}`);
  }
  return results;
}

/** A whole pass; what all its steps removed. */
export async function pruneAll(
  store: TestStore,
  retentionMs: number | null = RETENTION_MS,
): Promise<Removed> {
  const removed: Removed = {};
  for (const what of PRUNED) {
    for (const result of await stepsOf(store, what, retentionMs)) {
      for (const [kind, count] of Object.entries(result.removed) as [keyof Removed, number][]) {
        removed[kind] = (removed[kind] ?? 0) + count;
      }
    }
  }
  return removed;
}

/** How many rows a step removed, of whatever kind. */
export function rowsOf({ removed }: PruneResult): number {
  const { logBytes: _, fileBytes: __, ...rows } = removed;
  return Object.values(rows).reduce((sum, count) => sum + count, 0);
}
