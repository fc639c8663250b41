/** A page of a list that may scan only a limited number of rows. */
export interface ListPage<Item> {
  /** Newest first. There may be fewer than requested, even none, although the list continues. */
  items: Item[];
  /** `beforeSeq` of the next page; null when there is none. */
  goOnBefore: number | null;
}
