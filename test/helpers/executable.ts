import { closeSync, existsSync, openSync, readFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';

/** The path of the executable that `npm run package` made; throws when there is none. */
export function executablePath(): string {
  const path = join(import.meta.dirname, '../../build/davit');
  if (!existsSync(path)) throw new Error('build/davit is missing: run npm run package first');
  return path;
}

/** The beginning of what makes Node a single executable application: kMagic in its src/node_sea.cc. */
const SEA_MAGIC = Buffer.from('20da4301', 'hex');

/** Makes a copy of the executable heed NODE_OPTIONS, as davit does not: to load a module into it. */
export function heedNodeOptions(copy: string): void {
  const bytes = readFileSync(copy);
  const magicAt = bytes.lastIndexOf(SEA_MAGIC);
  // Behind that and four bytes of flags: SeaExecArgvExtension, where 0 is kNone and 1 is kEnv.
  const at = magicAt + 8;
  if (magicAt === -1 || bytes[at] !== 0)
    throw new Error('the executable heeds NODE_OPTIONS, or has another form');
  const file = openSync(copy, 'r+');
  writeSync(file, Buffer.of(1), 0, 1, at);
  closeSync(file);
}
