import { readFileSync } from 'node:fs';
import { AppError, codeOf } from './errors.ts';

/** Reads the file that an option names. Throws AppError `invalid_request` with the option's name. */
export function readOptionFile(optionName: string, path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    throw new AppError(
      'invalid_request',
      `${optionName}: ${path} cannot be read (${codeOf(error)}): check that it is there and that this user may read it`,
      { cause: error },
    );
  }
}
