import {
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmdir,
  rmdirSync,
  statSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { chmod, readdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { codeOf } from '../errors.ts';

/** The files of one run: gone when it has ended. */
export interface Workspace {
  /** Where it runs: its project's, or an empty one of its own. */
  directory: string;
  /** Where it may write `name=value` lines. */
  outputFile: string;
  remove(): Promise<void>;
}

export interface Workspaces {
  /** Where they are made; also where commands have their temporary files. */
  parent: string;
  /** Makes the files of a run in `directory`; null: in one of its own. Throws the system's error, a full disk as a rule. */
  make(directory: string | null): Workspace;
  /** Removes what an earlier service for the same file left. To be called before the first is made. */
  removeLeft(): Promise<void>;
  /** Removes what holds them. Whatever is still in one stays, and so do those. */
  close(): Promise<void>;
}

/**
 * The files of all runs, in a directory below `parent` (mode 0700, random name) of this service's own: in /tmp itself
 * root may not write to another user's file (fs.protected_regular), as a command with sudo would. Its name also
 * tells whose it is: the service's that has `lockPath`, of which there is one at a time.
 */
export function createWorkspaces(parent: string, lockPath: string): Workspaces {
  let root: string | undefined;
  let count = 0;

  return { parent, make, removeLeft, close };

  function make(directory: string | null): Workspace {
    if (root !== undefined) {
      try {
        return makeIn(root, directory);
      } catch {
        // Those who tidy /tmp by age take it away when nothing ran for days, and so may a command.
      }
    }
    const fresh = mkdtempSync(join(parent, namePrefix()));
    try {
      const made = makeIn(fresh, directory);
      root = fresh;
      return made;
    } catch (error) {
      removeEmptyNow(fresh);
      throw error;
    }
  }

  /**
   * At once, as trips to libuv's threads take longer than the calls. On ext4 a directory costs 80 µs and a file 15,
   * so there are no more of them than needed.
   */
  function makeIn(root: string, directory: string | null): Workspace {
    count += 1;
    const outputFile = join(root, `${count}.output`);
    writeFileSync(outputFile, '', { mode: 0o600, flag: 'wx' });
    if (directory !== null) return { directory, outputFile, remove: () => removeFile(outputFile) };
    const own = join(root, String(count));
    mkdirSync(own, { mode: 0o700 });
    return {
      directory: own,
      outputFile,
      async remove() {
        await removeFile(outputFile);
        // As a rule it is empty, and looking for what is in it takes ten times as long.
        if (!(await removeEmpty(own))) await removeTree(own);
      },
    };
  }

  async function removeLeft(): Promise<void> {
    const left = readdirSync(parent).filter((name) => name.startsWith(namePrefix()));
    // What cannot go, by whichever fault of a command, keeps nothing else from going.
    const places = left.map((name) => join(parent, name)).filter(isOwn);
    const entries = places.flatMap((place) => readdirSync(place).map((name) => join(place, name)));
    const removals = await Promise.allSettled(entries.map(removeTree));
    await Promise.all(places.map(removeEmpty));
    const failed = removals.find((removal) => removal.status === 'rejected');
    if (failed !== undefined) throw failed.reason;
  }

  async function close(): Promise<void> {
    if (root !== undefined) await removeEmpty(root);
  }

  function namePrefix(): string {
    const { dev, ino } = statSync(lockPath);
    return `davit-runs-${dev.toString(36)}-${ino.toString(36)}-`;
  }
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
 * Whether it could be removed. In libuv's threads: on ext4 it waits for the journal, which takes 300 µs while
 * another thread syncs.
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
function isOwn(path: string): boolean {
  const stats = lstatSync(path, { throwIfNoEntry: false });
  return stats?.isDirectory() === true && stats.uid === process.geteuid?.() && (stats.mode & 0o077) === 0;
}

/** Links in it are removed, not followed. */
async function removeTree(path: string): Promise<void> {
  try {
    await rm(path, { recursive: true, force: true });
  } catch (error) {
    if (codeOf(error) !== 'EACCES') throw error;
    // Some programs take the right to write from directories that they fill, Go from its modules for one.
    await allowRemoval(Buffer.from(path));
    await rm(path, { recursive: true, force: true });
  }
}

/** In bytes: a name need not be UTF-8. */
async function allowRemoval(directory: Buffer): Promise<void> {
  await chmod(directory, 0o700);
  for (const entry of await readdir(directory, { withFileTypes: true, encoding: 'buffer' })) {
    if (entry.isDirectory()) await allowRemoval(Buffer.concat([directory, Buffer.from('/'), entry.name]));
  }
}
