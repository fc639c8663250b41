import {
  chmodSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import type { ProjectId } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import { codeOf, SHORTAGES } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { removeTree } from './remove-tree.ts';
import {
  isAsNew,
  isUntouched,
  makeFiles,
  type RunFiles,
  removeEmpty,
  removeFiles,
  renameFiles,
} from './run-files.ts';

/** The directory and the output file of one run. */
export interface Workspace {
  /** Where the command runs: its project's directory, or an empty one of its own. */
  directory: string;
  /** Where the command may write `name=value` lines. */
  outputFile: string;
  /**
   * To be called when the run is over and the output file was read: removes the files, or keeps them for the next run.
   */
  release(): void;
}

export interface Workspaces {
  /** Where they are made; also the TMPDIR of commands. */
  parent: string;
  /**
   * `directory` null: the run gets an empty one of its own. Throws the system's error, as a rule because the disk is
   * full.
   */
  make(projectId: ProjectId, directory: string | null): Workspace;
  /** Removes what an earlier service for the same database left. To be called before the first workspace is made. */
  removeLeft(): Promise<void>;
  /**
   * Removes released workspaces and the directory around them, but for that of a run that is not over. Does not wait
   * longer than `waitMs` for that: the next start goes on with it.
   */
  close(waitMs: number): Promise<void>;
}

export interface WorkspacesOptions {
  parent: string;
  lockPath: string;
  /**
   * Whether a process may live that a run left: it may have a directory or a file open, whatever that is called now.
   */
  hasOrphans: () => boolean;
  effects: Effects;
  logger: Logger;
}

/** Why no command can have its files. */
interface ParentProblem {
  message: string;
  advice: string;
  /** Whether it may be over without an administrator: a full disk may have room again. */
  mayPass: boolean;
}

/** Why the files of a command cannot be made in `parent`, so that each one would fail; undefined: they can. */
export function parentProblem(parent: string): ParentProblem | undefined {
  try {
    tryFiles(parent);
    return undefined;
  } catch (error) {
    const code = codeOf(error);
    const mayPass = SHORTAGES.has(code);
    return {
      message: `no files for commands can be made in ${parent} (${code})`,
      advice: mayPass
        ? 'make room there, and for further files (df -i), or set TMPDIR to another directory'
        : 'set TMPDIR to a directory where this user can write',
      mayPass,
    };
  }
}

/** What a first run makes; and a few bytes, as some full disks take a file only while it is empty. */
function tryFiles(parent: string): void {
  const directory = mkdtempSync(join(parent, 'davit-runs-'));
  try {
    mkdirSync(join(directory, 'own'));
    writeFileSync(join(directory, 'output'), 'tried\n');
  } finally {
    rmSync(directory, { recursive: true, force: true });
  }
}

/** A project with more deployments in its queue begins the next one within milliseconds. */
const SPARE_MS = 1_000;

/**
 * Makes the workspaces of all runs, in a directory of this service's own below `parent` (mode 0700, random name): in
 * /tmp itself, root (a command that uses sudo) may not write to another user's file (fs.protected_regular). The name of
 * that directory also holds the identity of `lockPath`, so that the next service with that lock file can remove it.
 *
 * Files that a run did not touch are given to the next run of its project, if that begins soon and no run has left a
 * process. To make and remove them each time takes 115 µs, a sixth of what a short command costs davit; after many
 * removals, ext4 without a journal takes 390 to make them.
 */
export function createWorkspaces({
  parent,
  lockPath,
  hasOrphans,
  effects,
  logger,
}: WorkspacesOptions): Workspaces {
  const spares = new Map<ProjectId, { files: RunFiles; cancelRemoval: () => void }>();
  const removals = new Set<Promise<void>>();
  // Asked once: whoever removes the lock file, which is all that lies there after a stop, must not end all deployments.
  const { dev, ino } = statSync(lockPath);
  const namePrefix = `davit-runs-${dev.toString(36)}-${ino.toString(36)}-`;
  let root: string | undefined;
  let count = 0;

  return { parent, make, removeLeft, close };

  function make(projectId: ProjectId, directory: string | null): Workspace {
    const files = takeSpare(projectId, directory) ?? makeNew(directory);
    const { outputFile } = files;
    return { directory: files.directory, outputFile, release: () => release(projectId, files) };
  }

  /** The files of this project's last run. */
  function takeSpare(projectId: ProjectId, directory: string | null): RunFiles | undefined {
    const spare = spares.get(projectId);
    if (spare === undefined) return undefined;
    spare.cancelRemoval();
    spares.delete(projectId);
    const { files } = spare;
    try {
      if (files.isOwn === (directory === null) && !hasOrphans() && isAsNew(files)) {
        return renameFiles(files, nextName(), directory);
      }
    } catch {
      // They are gone, or cannot be checked.
    }
    remove(files);
    return undefined;
  }

  function release(projectId: ProjectId, files: RunFiles): void {
    if (spares.has(projectId) || !isUntouched(files)) {
      remove(files);
      return;
    }
    const cancelRemoval = effects.after(SPARE_MS, () => {
      spares.delete(projectId);
      remove(files);
    });
    spares.set(projectId, { files, cancelRemoval });
  }

  function remove(files: RunFiles): void {
    const path = files.isOwn ? files.directory : files.outputFile;
    const removal = removeFiles(files)
      .catch((error) => logger.warn({ err: error, path }, 'files of a run are left behind'))
      .finally(() => removals.delete(removal));
    removals.add(removal);
  }

  function makeNew(directory: string | null): RunFiles {
    if (root !== undefined) {
      try {
        return makeFiles(root, nextName(), directory);
      } catch {
        // What cleans /tmp by age removes `root` when nothing has run for days, and a command may do so too.
      }
    }
    const fresh = mkdtempSync(join(parent, namePrefix));
    try {
      const made = makeFiles(fresh, nextName(), directory);
      root = fresh;
      return made;
    } catch (error) {
      void removeEmpty(fresh); // if it is not, the next start removes it
      throw error;
    }
  }

  function nextName(): string {
    count += 1;
    return String(count);
  }

  async function removeLeft(): Promise<void> {
    if (!existsSync(parent)) return;
    const left = readdirSync(parent).filter((name) => name.startsWith(namePrefix));
    const places = left.map((name) => join(parent, name)).filter(isPrivate);
    for (const place of places) chmodSync(place, 0o700); // a command may have changed its mode
    const entries = places.flatMap((place) => readdirSync(place).map((name) => join(place, name)));
    // One after the other, as nothing waits for it.
    const failures: unknown[] = [];
    for (const entry of entries) await removeTree(entry).catch((error) => failures.push(error));
    await Promise.all(places.map(removeEmpty));
    if (failures.length > 0) throw failures[0];
  }

  async function close(waitMs: number): Promise<void> {
    for (const { files, cancelRemoval } of spares.values()) {
      cancelRemoval();
      remove(files);
    }
    spares.clear();
    const all = Promise.all(removals).then(() => root !== undefined && removeEmpty(root));
    await Promise.race([all, delay(waitMs, effects)]);
  }
}

/**
 * Whether it is a directory of this user that is closed to all others. In /tmp anybody can make a directory of that
 * name, and whoever can change its entries could make a removal hit other files.
 */
function isPrivate(path: string): boolean {
  const stats = lstatSync(path, { throwIfNoEntry: false });
  return stats?.isDirectory() === true && stats.uid === process.geteuid?.() && (stats.mode & 0o077) === 0;
}
