import type { Database } from './database.ts';
import { realPath, statusOf } from './place.ts';

/** At half of it the writer itself copies what is left over: more is held up by somebody who reads for long. */
export const WAL_LARGE_BYTES = 64 * 1024 * 1024;

/** How large the WAL of the file at `path` is, in bytes; 0 where there is none. Less of it may be in use. */
export function walBytesOf(path: string): number {
  return statusOf(`${realPath(path)}-wal`)?.size ?? 0;
}

/** How much of the WAL is in use, and how much of that is not in the file yet. */
interface WalUse {
  usedBytes: number;
  uncopiedBytes: number;
}

/** A header and a page, https://sqlite.org/fileformat.html#the_write_ahead_log */
const FRAME_BYTES = 24 + 4096;

/** Reads the use of the WAL: 5 µs. Not to be asked inside a transaction. */
export function walUseOf(database: Database): () => WalUse {
  const read = database.prepare<[], { log: number; checkpointed: number }>('PRAGMA wal_checkpoint(NOOP)');
  return () => {
    const { log = 0, checkpointed = 0 } = read.get() ?? {};
    return { usedBytes: log * FRAME_BYTES, uncopiedBytes: (log - checkpointed) * FRAME_BYTES };
  };
}
