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
  const bytes = Buffer.alloc(maxBytes + 1);
  let length = 0;
  while (length < bytes.length) {
    const read = readSync(descriptor, bytes, length, bytes.length - length, null);
    if (read === 0) break;
    length += read;
  }
  return bytes.subarray(0, length);
}
