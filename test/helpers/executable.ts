import { existsSync } from 'node:fs';
import { join } from 'node:path';

/** The path of the executable that `npm run package` made; throws when there is none. */
export function executablePath(): string {
  const path = join(import.meta.dirname, '../../build/davit');
  if (!existsSync(path)) throw new Error('build/davit is missing: run npm run package first');
  return path;
}
