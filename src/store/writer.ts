import { delay, type Effects } from '../effects.ts';
import { isUnavailable } from '../errors.ts';
import type { Change } from './changes.ts';
import type { InputOf, OperationName, OutputOf } from './operations.ts';

export type CommitListener = (changes: ReadonlySet<Change>) => void;

/** All writes go through it. Inputs and outputs are plain values, so that the writer may run in another thread. */
export interface Writer {
  /**
   * Resolves once the operation's transaction is on the disk. Rejects with the operation's AppError, in which case only
   * this operation is rolled back; with `unavailable` when the disk is full, the file is not in its place, or too many
   * writes wait for another thread.
   */
  write<Name extends OperationName>(name: Name, input: InputOf<Name>): Promise<OutputOf<Name>>;
  /** Calls `listener` after every commit that announced changes. */
  onCommit(listener: CommitListener): void;
  /** Commits the writes that were accepted, then closes the connection. */
  close(): Promise<void>;
}

/**
 * Records what has already happened, such as the end of a command or an attempt: retries for as long as the database
 * takes no writes, on a full disk for instance, and calls `onRefused` once. Rejects with any other error.
 */
export async function writePersistently<Name extends OperationName>(
  writer: Writer,
  name: Name,
  input: InputOf<Name>,
  effects: Effects,
  onRefused?: (error: unknown) => void,
): Promise<OutputOf<Name>> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await writer.write(name, input);
    } catch (error) {
      if (!isUnavailable(error)) throw error;
      if (attempt === 1) onRefused?.(error);
      await delay(RETRY_AFTER_MS, effects);
    }
  }
}

export const RETRY_AFTER_MS = 1_000;
