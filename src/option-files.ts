import { closeSync, openSync } from 'node:fs';
import { AppError, codeOf } from './errors.ts';
import { INPUT_MAX_BYTES, readBounded, tooLarge } from './read-bounded.ts';

/** Reads the file, or the pipe, that an option names. Throws AppError `invalid_request` with the option's name. */
export function readOptionFile(optionName: string, path: string): Buffer {
  const bytes = readStart(optionName, path);
  if (bytes.length > INPUT_MAX_BYTES) throw tooLarge(`${optionName}: ${path}`);
  return bytes;
}

function readStart(optionName: string, path: string): Buffer {
  try {
    const descriptor = openSync(path, 'r');
    try {
      return readBounded(descriptor, INPUT_MAX_BYTES);
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
