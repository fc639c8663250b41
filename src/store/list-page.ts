/** A page of a list. */
export interface ListPage<Item> {
  /** A list that scans only a limited number of rows may have fewer than requested, even none, although it continues. */
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
