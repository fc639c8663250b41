import { mkdirSync, mkdtempSync, writeFileSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';

/** The files of one run: gone when it has ended. */
export interface Workspace {
  /** Where the command runs if its project names no directory. */
  directory: string;
  /** Where it may write `name=value` lines. */
  outputFile: string;
  remove(): Promise<void>;
}

/**
 * Makes a directory (mode 0700, random name) below `parent` for one run. Throws the system's error, a full disk
 * as a rule. At once, as three trips to libuv's threads take longer than the calls; removing may meet a large
 * tree and is left to them.
 */
export function makeWorkspace(parent: string): Workspace {
  const root = mkdtempSync(join(parent, 'davit-run-'));
  const directory = join(root, 'work');
  const outputFile = join(root, 'output');
  mkdirSync(directory, { mode: 0o700 });
  writeFileSync(outputFile, '', { mode: 0o600 });
  return { directory, outputFile, remove: () => rm(root, { recursive: true, force: true }) };
}
