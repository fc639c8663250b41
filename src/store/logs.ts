import type { DeploymentId } from '../domain.ts';
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';

/** A piece of a log; `start` counts the bytes that were printed before it. */
export interface LogChunk {
  start: number;
  bytes: Uint8Array;
}

export interface LogAppend {
  id: DeploymentId;
  chunks: LogChunk[];
  /** All that was printed so far. */
  logBytes: number;
  /** Whether anything was left out. */
  truncated: boolean;
  /** Of the tail, pieces that end at or before this are not kept any longer; null: all are. */
  dropTailBefore: number | null;
  /** Where the head ends: what starts before it is always kept. */
  headBytes: number;
}

/** Logs, piece by piece. */
export function logReads(database: Database) {
  const chunksFrom = database.prepare<
    { id: string; from: number; limit: number },
    { start: number; bytes: Buffer }
  >(`
    SELECT start, bytes FROM log_chunks
     WHERE deployment_id = :id
       AND start >= coalesce((SELECT max(start) FROM log_chunks WHERE deployment_id = :id AND start <= :from), 0)
     ORDER BY start LIMIT :limit`);

  return {
    /** Up to `limit` pieces, beginning with the one that holds byte `from` or is the last before it. */
    chunksFrom: (id: string, from: number, limit: number): LogChunk[] => chunksFrom.all({ id, from, limit }),
  };
}

/** Logs grow at the end, and lose the oldest of their tail. */
export function logWrites({ database, changed }: WriteContext) {
  const insert = database.prepare(
    'INSERT INTO log_chunks (deployment_id, start, bytes) VALUES (:id, :start, :bytes)',
  );
  const drop = database.prepare(`
    DELETE FROM log_chunks
     WHERE deployment_id = :id AND start >= :headBytes AND start + length(bytes) <= :dropTailBefore`);
  const count = database.prepare(
    'UPDATE deployments SET log_bytes = :logBytes, log_truncated = :truncated WHERE id = :id',
  );

  return {
    append({ id, chunks, logBytes, truncated, dropTailBefore, headBytes }: LogAppend): void {
      for (const { start, bytes } of chunks) insert.run({ id, start, bytes });
      if (dropTailBefore !== null) drop.run({ id, headBytes, dropTailBefore });
      count.run({ id, logBytes, truncated: truncated ? 1 : 0 });
      changed(id);
    },
  };
}
