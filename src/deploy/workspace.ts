import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';

/** The files of one run: gone when it has ended. */
export interface Workspace {
  /** Where the command runs if its project names no directory. */
  directory: string;
  /** Where it may write `name=value` lines. */
  outputFile: string;
  remove(): Promise<void>;
}

/** Makes a directory (mode 0700, random name) below `parent` for one run. Rejects with the system's error, a full disk as a rule. */
export async function makeWorkspace(parent: string): Promise<Workspace> {
  const root = await mkdtemp(join(parent, 'davit-run-'));
  const directory = join(root, 'work');
  const outputFile = join(root, 'output');
  await mkdir(directory, { mode: 0o700 });
  await writeFile(outputFile, '', { mode: 0o600 });
  return { directory, outputFile, remove: () => rm(root, { recursive: true, force: true }) };
}
