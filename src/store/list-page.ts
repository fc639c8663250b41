import type { KeyId } from '../domain.ts';
import { realEffects } from '../effects.ts';
import { inSpareTurn as inSpareTurnOfThread, inTurn as inTurnOfThread } from '../turns.ts';

/** A page of a list. */
export interface ListPage<Item> {
  /** A list that is searched only for a limited time may have fewer than requested, even none, although it continues. */
  items: Item[];
  /** The seq at which the next page goes on, which is not in it; null: there is none. */
  goOnAt: number | null;
}

/** A page of the first `limit` of these rows, which are more if the list continues. */
export function pageOf<Row extends { seq: number }, Item>(
  rows: readonly Row[],
  limit: number,
  toItem: (row: Row) => Item,
): ListPage<Item> {
  const shown = rows.slice(0, limit);
  const last = rows.length > limit ? shown.at(-1) : undefined;
  return { items: shown.map(toItem), goOnAt: last?.seq ?? null };
}

/** A slice of a long list has at most this many rows, which take about 1 ms; then other tasks have their turn. */
export const SLICE_ROWS = 2_000;

/**
 * How long a page is searched for rare rows among many: an idle machine scans two million in this time, so that a client
 * that reads only one page gets what it asked for. All searches share the time: of 600 requests at once, for rows that
 * half a million do not have, all were answered after 1.6 s. With 50,000 rows for each it took 11 s.
 */
const SEARCH_MAX_MS = 1_000;

/** What a search found of a list. */
export interface Found<Row> {
  rows: Row[];
  /** The seq down to which the list was read; null: to its end. */
  endSeq: number | null;
}

/** In which turns a search reads, and by which clock. */
export interface Searching {
  /** For the first slice, in which most pages find all. */
  inTurn?: typeof inTurnOfThread;
  /** For the others. */
  inSpareTurn?: typeof inSpareTurnOfThread;
  monotonicMs?: () => number;
}

/**
 * Reads a list for `keyId`, from `beforeSeq` down until `limit` rows are found, it ends or the time is over: slice by
 * slice, at least one. `slice` finds at most `limit + 1` of the rows in a slice.
 */
export async function search<Row>(
  slice: (beforeSeq: number, limit: number) => Found<Row>,
  keyId: KeyId,
  beforeSeq: number,
  limit: number,
  {
    inTurn = inTurnOfThread,
    inSpareTurn = inSpareTurnOfThread,
    monotonicMs = realEffects.monotonicMs,
  }: Searching = {},
): Promise<Found<Row>> {
  const untilMs = monotonicMs() + SEARCH_MAX_MS;
  const rows: Row[] = [];
  let found = await inTurn(() => slice(beforeSeq, limit), keyId);
  for (;;) {
    rows.push(...found.rows);
    const { endSeq } = found;
    if (endSeq === null || rows.length >= limit) return { rows, endSeq };
    // The time is looked at when the turn has come, for which one of many searches may wait long.
    const next = await inSpareTurn(
      () => (monotonicMs() < untilMs ? slice(endSeq, limit - rows.length) : undefined),
      keyId,
    );
    if (next === undefined) return { rows, endSeq };
    found = next;
  }
}
