import { closeSync, openSync, readSync } from 'node:fs';
import { AppError, codeOf } from './errors.ts';

/** Far more than variables or certificates need. A larger file is the wrong one, such as /dev/zero. */
const MAX_BYTES = 16 * 1024 * 1024;
const CHUNK_BYTES = 64 * 1024;

/** Reads the file, or the pipe, that an option names. Throws AppError `invalid_request` with the option's name. */
export function readOptionFile(optionName: string, path: string): Buffer {
  let bytes: Buffer | undefined;
  try {
    bytes = readSmall(path);
  } catch (error) {
    throw new AppError(
      'invalid_request',
      `${optionName}: ${path} cannot be read (${codeOf(error)}): check that it is there and that this user may read it`,
      { cause: error },
    );
  }
  if (bytes !== undefined) return bytes;
  throw new AppError(
    'invalid_request',
    `${optionName}: ${path} holds more than ${MAX_BYTES / 1024 / 1024} MiB: check that it is the right file`,
  );
}

/** Undefined: it is too large. */
function readSmall(path: string): Buffer | undefined {
  const chunks: Buffer[] = [];
  const descriptor = openSync(path, 'r');
  try {
    for (let length = 0; length <= MAX_BYTES; ) {
      const chunk = Buffer.alloc(CHUNK_BYTES);
      const read = readSync(descriptor, chunk);
      if (read === 0) return Buffer.concat(chunks);
      chunks.push(chunk.subarray(0, read));
      length += read;
    }
    return undefined;
  } finally {
    closeSync(descriptor);
  }
}
