import { statusOf } from '../paths.ts';
import type { Database } from './database.ts';
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

/** A frame: its header and a page, https://sqlite.org/fileformat.html#the_write_ahead_log */
const FRAME_BYTES = 24 + 4096;

/** Returns a function that reads the use of the WAL, in 5 µs. Not to be called inside a transaction. */
export function walUseOf(database: Database): () => WalUse {
  const read = database.prepare<[], { log: number; checkpointed: number }>('PRAGMA wal_checkpoint(NOOP)');
  return () => {
    const { log = 0, checkpointed = 0 } = read.get() ?? {};
    return { usedBytes: log * FRAME_BYTES, uncopiedBytes: (log - checkpointed) * FRAME_BYTES };
  };
}
