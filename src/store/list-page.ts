/** A page of a list that may look at no more than so many rows. */
export interface ListPage<Item> {
  /** Newest first. May be fewer than asked for, even none, and the list goes on all the same. */
  items: Item[];
  /** `beforeSeq` of the next page; null when there is none. */
  goOnBefore: number | null;
}
