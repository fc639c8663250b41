import { statusOf } from '../paths.ts';
import { type Database, pragmaNumber } from './database.ts';
import { walPath } from './place.ts';

/** Twice the size at which the writer itself checkpoints: a WAL larger than that is kept from it by a long read. */
export const WAL_LARGE_BYTES = 64 * 1024 * 1024;

/** The size of the WAL of the database at `path`; 0 if there is none. Not all of it need be in use. */
export function walBytesOf(path: string): number {
  return statusOf(walPath(path))?.size ?? 0;
}

/** How much of the WAL is in use, and how much of that is not copied into the file yet. */
interface WalUse {
  usedBytes: number;
  uncopiedBytes: number;
}

/** Before the first frame. */
const HEADER_BYTES = 32;

/** Before the page of each frame, https://sqlite.org/fileformat.html#the_write_ahead_log */
const FRAME_HEADER_BYTES = 24;

/** Returns a function that reads the use of the WAL, in 5 µs. Not to be called inside a transaction. */
export function walUseOf(database: Database): () => WalUse {
  const read = database.prepare<[], { log: number; checkpointed: number }>('PRAGMA wal_checkpoint(NOOP)');
  // Pages have 4,096 bytes, unless somebody gave them another size by VACUUM, which SQLite refuses while davit runs.
  const frameBytes = FRAME_HEADER_BYTES + pragmaNumber(database, 'page_size');
  return () => {
    const { log = 0, checkpointed = 0 } = read.get() ?? {};
    return { usedBytes: log * frameBytes, uncopiedBytes: (log - checkpointed) * frameBytes };
  };
}

/** Whether somebody has cut the -wal short. */
interface WalWatch {
  /** Notes what is in use of it; false: it has less. To be called before each transaction. */
  note(): boolean;
  /** Whether it still has what was noted. While this connection may write, no other process can use less of it. */
  isWhole(): boolean;
}

/**
 * Watches the length of the -wal, in 8 µs for each transaction. SQLite does not notice that somebody truncated it: it
 * would write the next commit behind what is gone, and a checkpoint would copy the gap into the database, which destroys
 * that. Without the gap, a checkpoint fails and changes nothing.
 */
export function watchWal(database: Database): WalWatch {
  const path = walPath(database.name);
  const walUse = walUseOf(database);
  let neededBytes = 0;

  // Again if it is not: between the two looks another process may have copied and emptied it, which is right.
  return { note: () => look() || look(), isWhole };

  function look(): boolean {
    const { usedBytes } = walUse();
    neededBytes = usedBytes === 0 ? 0 : HEADER_BYTES + usedBytes;
    return isWhole();
  }

  function isWhole(): boolean {
    const bytes = statusOf(path)?.size;
    return bytes === undefined || bytes >= neededBytes; // one that is gone is told of by `watchPlace`
  }
}
