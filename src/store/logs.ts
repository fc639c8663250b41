import type { DeploymentId } from '../domain.ts';
import { logChange, type WriteContext } from './context.ts';
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

/** What a log has at some place. Both reach to `end`, counted in bytes that were printed. */
type LogPiece =
  | { kind: 'bytes'; end: number; bytes: Buffer }
  /** Not kept. `midLine`: the byte before it is kept, and no line ends with it. */
  | { kind: 'leftOut'; end: number; midLine: boolean };

/** What stands where bytes were left out, on a line of its own. Counted in no offset. */
export function leftOutMarker(byteCount: number, midLine: boolean): string {
  return `${midLine ? '\n' : ''}[davit: ${byteCount} bytes left out]\n`;
}

/** How much of a log is held in memory at a time for each who reads it. */
const PIECE_MAX_BYTES = 16 * 1024;

/** Logs, piece by piece. */
export function logReads(database: Database) {
  // A chunk is loaded whole, 64 KiB at most, and only what is asked for leaves SQLite.
  const chunkAt = database.prepare<
    { id: string; from: number; maxBytes: number },
    { end: number; bytes: Buffer; endsLine: number }
  >(`
    SELECT start + length(bytes) AS end, substr(bytes, :from - start + 1, :maxBytes) AS bytes,
           substr(bytes, -1) = x'0a' AS endsLine
      FROM log_chunks
     WHERE deployment_id = +:id AND start <= +:from
     ORDER BY start DESC LIMIT 1`);
  const nextStart = database
    .prepare<{ id: string; from: number }, number | null>(
      'SELECT min(start) FROM log_chunks WHERE deployment_id = +:id AND start > +:from',
    )
    .pluck();

  return { pieceAt, text };

  /** What is at byte `from`, which must be before `end`: 16 KiB at most, and nothing from `end` on. */
  function pieceAt(id: string, from: number, end: number): LogPiece {
    const chunk = chunkAt.get({ id, from, maxBytes: Math.min(PIECE_MAX_BYTES, end - from) });
    if (chunk !== undefined && chunk.bytes.length > 0) {
      return { kind: 'bytes', end: from + chunk.bytes.length, bytes: chunk.bytes };
    }
    return {
      kind: 'leftOut',
      end: Math.min(end, nextStart.get({ id, from }) ?? end),
      midLine: chunk !== undefined && chunk.end === from && chunk.endsLine === 0,
    };
  }

  /**
   * The bytes as they were printed, from `from` up to `end`, with a marker for those that were not kept. `afterMidLine`:
   * what stands before the first of them, wherever it is by now, ends no line.
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
          yield Buffer.from(leftOutMarker(piece.end - at, midLine || piece.midLine));
          break;
        default:
          piece satisfies never;
      }
      at = piece.end;
    }
  }
}

const LINE_FEED = 0x0a;

/** Whether a line ends with the last of these bytes. */
export function endsLine(bytes: Uint8Array): boolean {
  return bytes.at(-1) === LINE_FEED;
}

/** Logs grow at the end, and lose the oldest of their tail. */
export function logWrites({ database, changed }: WriteContext) {
  const insert = database.prepare(
    'INSERT INTO log_chunks (deployment_id, start, bytes) VALUES (:id, :start, :bytes)',
  );
  // What ends before, begins before: only with that said no row is read that stays. The 100,000 pieces of a command that
  // prints 50 bytes at a time took 9 ms at each append.
  const drop = database.prepare(`
    DELETE FROM log_chunks
     WHERE deployment_id = +:id AND start >= +:headBytes AND start < +:dropTailBefore
       AND start + length(bytes) <= +:dropTailBefore`);
  const count = database.prepare(
    'UPDATE deployments SET log_bytes = :logBytes, log_truncated = :truncated WHERE id = +:id',
  );

  return {
    append({ id, chunks, logBytes, truncated, dropTailBefore, headBytes }: LogAppend): void {
      for (const { start, bytes } of chunks) insert.run({ id, start, bytes });
      if (dropTailBefore !== null) drop.run({ id, headBytes, dropTailBefore });
      count.run({ id, logBytes, truncated: truncated ? 1 : 0 });
      changed(logChange(id));
    },
  };
}
