import type { DeploymentId } from '../domain.ts';
import { logChange } from './changes.ts';
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
  /** How many bytes were printed so far. */
  logBytes: number;
  /** Chunks of the tail that end at or before this offset are deleted, so that the log is truncated; null: none. */
  dropTailBefore: number | null;
  /** Where the head ends: chunks that start before it are always kept. */
  headBytes: number;
}

/** What a log has at some offset, up to the offset `end`. */
type LogPiece =
  | { kind: 'bytes'; end: number; bytes: Buffer }
  /** Not kept. `before`: the byte before the gap, or none if that is not kept either. */
  | { kind: 'leftOut'; end: number; before: Uint8Array };

/** The text in place of bytes that were left out, on a line of its own. Offsets do not count it. */
export function leftOutMarker(byteCount: number, midLine: boolean): string {
  return `${midLine ? '\n' : ''}[davit: ${byteCount} bytes left out]\n`;
}

/** How much of a log each reader holds in memory at a time. */
const PIECE_MAX_BYTES = 16 * 1024;

/** Reads logs, piece by piece. */
export function logReads(database: Database) {
  // SQLite loads a whole chunk, 64 KiB at most, and returns only the requested part of it.
  const chunkAt = database.prepare<
    { id: string; from: number; maxBytes: number },
    { end: number; bytes: Buffer; last: Buffer }
  >(`
    SELECT start + length(bytes) AS end, substr(bytes, :from - start + 1, :maxBytes) AS bytes,
           substr(bytes, -1) AS last
      FROM log_chunks
     WHERE deployment_id = +:id AND start <= +:from
     ORDER BY start DESC LIMIT 1`);
  const nextStart = database
    .prepare<{ id: string; from: number }, number | null>(
      'SELECT min(start) FROM log_chunks WHERE deployment_id = +:id AND start > +:from',
    )
    .pluck();

  return { pieceAt, text };

  /** The piece at offset `from`, which must be before `end`: at most 16 KiB, and not beyond `end`. */
  function pieceAt(id: string, from: number, end: number): LogPiece {
    const chunk = chunkAt.get({ id, from, maxBytes: Math.min(PIECE_MAX_BYTES, end - from) });
    if (chunk !== undefined && chunk.bytes.length > 0) {
      return { kind: 'bytes', end: from + chunk.bytes.length, bytes: chunk.bytes };
    }
    return {
      kind: 'leftOut',
      end: Math.min(end, nextStart.get({ id, from }) ?? end),
      before: chunk?.end === from ? chunk.last : Buffer.alloc(0),
    };
  }

  /**
   * The bytes as they were printed, from `from` up to `end`, with markers for those that were not kept. `afterMidLine`:
   * the reader's text before these bytes does not end with a line end.
   */
  function* text(
    id: string,
    from: number,
    end: number,
    afterMidLine = false,
  ): Generator<Buffer, void, undefined> {
    let midLine = afterMidLine;
    for (let at = from; at < end; ) {
      const piece = pieceAt(id, at, end);
      switch (piece.kind) {
        case 'bytes':
          yield piece.bytes;
          midLine = !endsLine(piece.bytes);
          break;
        case 'leftOut':
          midLine ||= piece.before.length > 0 && !endsLine(piece.before);
          yield Buffer.from(leftOutMarker(piece.end - at, midLine));
          midLine = false;
          break;
        default:
          piece satisfies never;
      }
      at = piece.end;
    }
  }
}

const LINE_FEED = 0x0a;

/** Whether the last of these bytes ends a line. A CR does not: on a terminal, what follows it overwrites the line. */
export function endsLine(bytes: Uint8Array): boolean {
  return bytes.at(-1) === LINE_FEED;
}

/** Appends to logs, and deletes the oldest chunks of their tails. */
export function logWrites({ database, changed }: WriteContext) {
  const insert = database.prepare(
    'INSERT INTO log_chunks (deployment_id, start, bytes) VALUES (:id, :start, :bytes)',
  );
  // `start < :dropTailBefore` is implied, but keeps SQLite from reading the chunks that stay: with the 100,000 chunks
  // of a command that prints 50 bytes at a time, each append took 9 ms.
  const drop = database.prepare(`
    DELETE FROM log_chunks
     WHERE deployment_id = +:id AND start >= +:headBytes AND start < +:dropTailBefore
       AND start + length(bytes) <= +:dropTailBefore`);
  const count = database.prepare(
    'UPDATE deployments SET log_bytes = :logBytes, log_truncated = log_truncated OR :isCut WHERE id = +:id',
  );

  return {
    append({ id, chunks, logBytes, dropTailBefore, headBytes }: LogAppend): void {
      for (const { start, bytes } of chunks) insert.run({ id, start, bytes });
      if (dropTailBefore !== null) drop.run({ id, headBytes, dropTailBefore });
      count.run({ id, logBytes, isCut: dropTailBefore === null ? 0 : 1 });
      changed(logChange(id));
    },
  };
}
