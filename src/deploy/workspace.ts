import {
  chmodSync,
  constants,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  renameSync,
  rmdir,
  rmdirSync,
  type Stats,
  statSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import type { ProjectId } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { removeTree } from './remove-tree.ts';

/** The files of one run. */
export interface Workspace {
  /** Where it runs: its project's, or an empty one of its own. */
  directory: string;
  /** Where it may write `name=value` lines. */
  outputFile: string;
  /** Its run is over, and all that was wanted of them is known. */
  leave(): void;
}

export interface Workspaces {
  /** Where they are made; also where commands have their temporary files. */
  parent: string;
  /** Gives a run its files, in `directory`; null: in one of its own. Throws the system's error, a full disk as a rule. */
  make(projectId: ProjectId, directory: string | null): Workspace;
  /** Removes what an earlier service for the same file left. To be called before the first is made. */
  removeLeft(): Promise<void>;
  /** Removes what was left, and what holds it. Whatever is still in one stays, and so do those. */
  close(): Promise<void>;
}

/** What a person must mend; a full disk may have room again. */
const NO_PARENT = new Set(['ENOENT', 'ENOTDIR', 'EACCES', 'EPERM', 'EROFS', 'ELOOP']);

/** That no directory can be made in `parent`, so that every command would fail, and what to do about it; undefined: one can. */
export function parentProblem(parent: string): string | undefined {
  try {
    rmdirSync(mkdtempSync(join(parent, 'davit-runs-')));
    return undefined;
  } catch (error) {
    const code = codeOf(error);
    return NO_PARENT.has(code)
      ? `no directory can be made in ${parent} (${code}), where commands have their files: set TMPDIR to one where this ` +
          'user may write'
      : undefined;
  }
}

interface Files {
  directory: string;
  /** Whether the directory was made for a run. */
  isOwn: boolean;
  outputFile: string;
}

/** A project that has more to do begins it within milliseconds. */
const SPARE_MS = 1_000;

/** What takes longer than that to remove keeps no stop waiting: the next start goes on with it. */
const LAST_REMOVALS_MS = 1_000;

/**
 * The files of all runs, in a directory below `parent` (mode 0700, random name) of this service's own: in /tmp itself
 * root may not write to another user's file (fs.protected_regular), as a command with sudo would. Its name also
 * tells whose it is: the service's that has `lockPath`, of which there is one at a time.
 *
 * What a run left as it was given goes to the next of its project, if that comes soon and no run left anybody alive. A
 * file and a directory take 40 µs to make and 75 to remove, and on ext4 without a journal, as virtual machines have it, 390
 * to make within a few minutes after a thousand of each were removed.
 */
export function createWorkspaces({
  parent,
  lockPath,
  hasOrphans,
  effects,
  logger,
}: {
  parent: string;
  lockPath: string;
  /** Whether somebody may live whom a run left: it may be in a directory, or have a file open, whatever that is called. */
  hasOrphans: () => boolean;
  effects: Effects;
  logger: Logger;
}): Workspaces {
  const spares = new Map<ProjectId, { files: Files; cancelRemoval: () => void }>();
  const removals = new Set<Promise<void>>();
  let root: string | undefined;
  let count = 0;

  return { parent, make, removeLeft, close };

  function make(projectId: ProjectId, directory: string | null): Workspace {
    const files = takeSpare(projectId, directory) ?? makeFiles(directory);
    const { outputFile } = files;
    return { directory: files.directory, outputFile, leave: () => leave(projectId, files) };
  }

  /** What the last run of this project left, the file by another name: who was told the old one writes to it in vain. */
  function takeSpare(projectId: ProjectId, directory: string | null): Files | undefined {
    const spare = spares.get(projectId);
    if (spare === undefined) return undefined;
    spare.cancelRemoval();
    spares.delete(projectId);
    count += 1;
    const { files } = spare;
    const outputFile = join(dirname(files.outputFile), `${count}.output`);
    try {
      if (files.isOwn === (directory === null) && !hasOrphans() && isAsNew(files)) {
        renameSync(files.outputFile, outputFile);
        return { directory: directory ?? files.directory, isOwn: files.isOwn, outputFile };
      }
    } catch {
      // Something of it is not there any more, or cannot be looked at.
    }
    remove(files);
    return undefined;
  }

  function leave(projectId: ProjectId, files: Files): void {
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

  function remove(files: Files): void {
    const path = files.isOwn ? files.directory : files.outputFile;
    const removal = removeFiles(files)
      .catch((error) => logger.warn({ err: error, path }, 'files of a run are left behind'))
      .finally(() => removals.delete(removal));
    removals.add(removal);
  }

  function makeFiles(directory: string | null): Files {
    if (root !== undefined) {
      try {
        return makeFilesIn(root, directory);
      } catch {
        // Those who tidy /tmp by age take it away when nothing ran for days, and so may a command.
      }
    }
    const fresh = mkdtempSync(join(parent, namePrefix()));
    try {
      const made = makeFilesIn(fresh, directory);
      root = fresh;
      return made;
    } catch (error) {
      removeEmptyNow(fresh);
      throw error;
    }
  }

  /** At once, as trips to libuv's threads take longer than the calls. */
  function makeFilesIn(root: string, directory: string | null): Files {
    count += 1;
    const outputFile = join(root, `${count}.output`);
    writeFileSync(outputFile, '', { mode: 0o600, flag: 'wx' });
    if (directory !== null) return { directory, isOwn: false, outputFile };
    const own = join(root, String(count));
    try {
      mkdirSync(own, { mode: 0o700 });
    } catch (error) {
      unlinkSync(outputFile); // a full disk takes a file without bytes, and no directory
      throw error;
    }
    return { directory: own, isOwn: true, outputFile };
  }

  async function removeLeft(): Promise<void> {
    const left = readdirSync(parent).filter((name) => name.startsWith(namePrefix()));
    const places = left.map((name) => join(parent, name)).filter(isPrivate);
    for (const place of places) chmodSync(place, 0o700); // a command may have closed it
    const entries = places.flatMap((place) => readdirSync(place).map((name) => join(place, name)));
    // One after the other: it is nothing that anybody waits for.
    const failures: unknown[] = [];
    for (const entry of entries) await removeTree(entry).catch((error) => failures.push(error));
    await Promise.all(places.map(removeEmpty));
    if (failures.length > 0) throw failures[0];
  }

  async function close(): Promise<void> {
    for (const { files, cancelRemoval } of spares.values()) {
      cancelRemoval();
      remove(files);
    }
    spares.clear();
    const all = Promise.all(removals).then(() => root !== undefined && removeEmpty(root));
    await Promise.race([all, delay(LAST_REMOVALS_MS, effects)]);
  }

  function namePrefix(): string {
    const { dev, ino } = statSync(lockPath);
    return `davit-runs-${dev.toString(36)}-${ino.toString(36)}-`;
  }
}

/** Whether a run seems to have left its files as they were given to it. */
function isUntouched({ directory, isOwn, outputFile }: Files): boolean {
  try {
    return lstatSync(outputFile).size === 0 && (!isOwn || isUnchanged(lstatSync(directory)));
  } catch {
    return false;
  }
}

/** Whether nothing tells these files from such as are made now. Throws the system's error. */
function isAsNew({ directory, isOwn, outputFile }: Files): boolean {
  const { mode, uid, nlink, size, dev } = lstatSync(outputFile);
  const isNewFile =
    mode === (constants.S_IFREG | 0o600) && uid === process.geteuid?.() && nlink === 1 && size === 0;
  if (!isNewFile || !isOwn) return isNewFile;
  const own = lstatSync(directory);
  const isMountedOver = own.dev !== dev;
  return isUnchanged(own) && !isMountedOver && readdirSync(directory).length === 0;
}

/** Whether nothing was ever put there, taken away or allowed, as far as the file system's clock ticks finely enough. */
function isUnchanged({ mode, uid, ctimeMs, birthtimeMs }: Stats): boolean {
  return mode === (constants.S_IFDIR | 0o700) && uid === process.geteuid?.() && ctimeMs === birthtimeMs;
}

function removeFiles({ directory, isOwn, outputFile }: Files): Promise<void> {
  return whenAllEnded([removeFile(outputFile), ...(isOwn ? [removeDirectory(directory)] : [])]);
}

/** What cannot go, by whichever fault of a command, keeps nothing else from going. Rejects as the first that did not. */
async function whenAllEnded(removals: readonly Promise<void>[]): Promise<void> {
  const failed = (await Promise.allSettled(removals)).find((removal) => removal.status === 'rejected');
  if (failed !== undefined) throw failed.reason;
}

/** As a rule it is empty, and looking for what is in it takes twice as long. */
async function removeDirectory(path: string): Promise<void> {
  if (!(await removeEmpty(path))) await removeTree(path);
}

/** For what could not be filled, as a rule, so that it is empty. What is not, the next start removes. */
function removeEmptyNow(directory: string): void {
  try {
    rmdirSync(directory);
  } catch {
    // Why it could not be filled says more.
  }
}

async function removeFile(path: string): Promise<void> {
  try {
    unlinkSync(path);
  } catch {
    await removeTree(path); // the command made something else of it
  }
}

/**
 * Whether it could be removed. In libuv's threads: it may wait for the disk, which takes 300 µs while another thread
 * syncs.
 */
function removeEmpty(directory: string): Promise<boolean> {
  return new Promise((resolve) => {
    rmdir(directory, (error) => resolve(error === null));
  });
}

/**
 * Whether this user made it, for nobody else. Of a name that anybody can give a directory, whoever may change what is
 * in it could lead a removal astray.
 */
function isPrivate(path: string): boolean {
  const stats = lstatSync(path, { throwIfNoEntry: false });
  return stats?.isDirectory() === true && stats.uid === process.geteuid?.() && (stats.mode & 0o077) === 0;
}
