import { readSync } from 'node:fs';
import { AppError } from './errors.ts';

/** Far more than variables, certificates or a delivery have. Larger input is the wrong one, such as /dev/zero. */
export const INPUT_MAX_BYTES = 16 * 1024 * 1024;

/** For input of more than `INPUT_MAX_BYTES`. */
export function tooLarge(what: string): AppError {
  return new AppError(
    'invalid_request',
    `${what} holds more than ${INPUT_MAX_BYTES / 1024 / 1024} MiB: check that it is the right file`,
  );
}

/** What can be read from a descriptor, up to one byte more than `maxBytes`, by which a caller sees that it is longer. */
export function readBounded(descriptor: number, maxBytes: number): Buffer {
  const pieces: Buffer[] = [];
  // No more room than is needed: with all of it at once, twelve reloads of certificates within a minute held 80 MB.
  for (let left = maxBytes + 1; left > 0; ) {
    const piece = Buffer.allocUnsafe(Math.min(left, PIECE_BYTES));
    const length = readSync(descriptor, piece);
    if (length === 0) break;
    pieces.push(piece.subarray(0, length));
    left -= length;
  }
  return Buffer.concat(pieces);
}

const PIECE_BYTES = 64 * 1024;
