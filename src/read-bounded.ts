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
  // It grows as needed: with all of it at once, twelve reloads of certificates within a minute held 80 MB.
  let bytes = Buffer.allocUnsafe(Math.min(maxBytes + 1, FIRST_BYTES));
  let length = 0;
  for (;;) {
    const readBytes = readSync(descriptor, bytes, { offset: length });
    length += readBytes;
    if (readBytes === 0 || length > maxBytes) return bytes.subarray(0, length);
    if (length === bytes.length) bytes = Buffer.concat([bytes], Math.min(maxBytes + 1, 2 * length));
  }
}

const FIRST_BYTES = 64 * 1024;
