import { existsSync } from 'node:fs';
import { delimiter, join } from 'node:path';

/** For tests that drive programs of the machine: without one of these they are skipped, and say which is missing. */
export function ifHas(...programs: string[]): { skip?: string } {
  const directories = (process.env['PATH'] ?? '').split(delimiter);
  const missing = programs.find(
    (program) => !directories.some((directory) => existsSync(join(directory, program))),
  );
  return missing === undefined ? {} : { skip: `there is no ${missing}` };
}
