import { mkdirSync, mkdtempSync, readdirSync, rmdirSync, unlinkSync, writeFileSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { DeploymentId } from '../domain.ts';

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
export function makeWorkspace(parent: string, id: DeploymentId): Workspace {
  const root = mkdtempSync(join(parent, namePrefix(id)));
  const directory = join(root, 'work');
  const outputFile = join(root, 'output');
  mkdirSync(directory, { mode: 0o700 });
  writeFileSync(outputFile, '', { mode: 0o600 });
  return { directory, outputFile, remove };

  async function remove(): Promise<void> {
    try {
      // As a rule there is nothing else, and three calls take a tenth of looking for it.
      unlinkSync(outputFile);
      rmdirSync(directory);
      rmdirSync(root);
    } catch {
      await removeTree(root);
    }
  }
}

/** What a killed service left of a run. */
export async function removeWorkspaceOf(parent: string, id: DeploymentId): Promise<void> {
  const left = readdirSync(parent).filter((name) => name.startsWith(namePrefix(id)));
  await Promise.all(left.map((name) => removeTree(join(parent, name))));
}

function namePrefix(id: DeploymentId): string {
  return `davit-run-${id}-`;
}

/** Links in it are removed, not followed. */
function removeTree(path: string): Promise<void> {
  return rm(path, { recursive: true, force: true });
}
