import { closeSync, openSync } from 'node:fs';
import { AppError, codeOf } from './errors.ts';
import { readBounded } from './read-bounded.ts';

/** Far more than variables or certificates need. A larger file is the wrong one, such as /dev/zero. */
const MAX_BYTES = 16 * 1024 * 1024;

/** Reads the file, or the pipe, that an option names. Throws AppError `invalid_request` with the option's name. */
export function readOptionFile(optionName: string, path: string): Buffer {
  const bytes = readStart(optionName, path);
  if (bytes.length <= MAX_BYTES) return bytes;
  throw new AppError(
    'invalid_request',
    `${optionName}: ${path} holds more than ${MAX_BYTES / 1024 / 1024} MiB: check that it is the right file`,
  );
}

function readStart(optionName: string, path: string): Buffer {
  try {
    const descriptor = openSync(path, 'r');
    try {
      return readBounded(descriptor, MAX_BYTES);
    } finally {
      closeSync(descriptor);
    }
  } catch (error) {
    throw new AppError(
      'invalid_request',
      `${optionName}: ${path} cannot be read (${codeOf(error)}): check that it is there and that this user may read it`,
      { cause: error },
    );
  }
}
