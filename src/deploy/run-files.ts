import {
  constants,
  lstatSync,
  mkdirSync,
  readdirSync,
  renameSync,
  rmdir,
  type Stats,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { removeTree } from './remove-tree.ts';

/** The files of one run. */
export interface RunFiles {
  directory: string;
  /** Whether the directory was made for the run; otherwise it is the project's. */
  isOwn: boolean;
  outputFile: string;
}

/**
 * Makes them in `root`; `directory` null: an empty one of their own too. Throws the system's error. Synchronous, as a
 * round trip to libuv's threads takes longer than the calls.
 */
export function makeFiles(root: string, name: string, directory: string | null): RunFiles {
  const outputFile = outputFileIn(root, name);
  writeFileSync(outputFile, '', { mode: 0o600, flag: 'wx' });
  if (directory !== null) return { directory, isOwn: false, outputFile };
  const own = join(root, name);
  try {
    mkdirSync(own, { mode: 0o700 });
  } catch (error) {
    unlinkSync(outputFile); // a full disk has room for an empty file, but for no directory
    throw error;
  }
  return { directory: own, isOwn: true, outputFile };
}

/**
 * The same files for the next run, which may be in another directory of its project. The output file is renamed, so that
 * a process that knows its old path misses it.
 */
export function renameFiles(files: RunFiles, name: string, directory: string | null): RunFiles {
  const outputFile = outputFileIn(dirname(files.outputFile), name);
  renameSync(files.outputFile, outputFile);
  return { directory: directory ?? files.directory, isOwn: files.isOwn, outputFile };
}

function outputFileIn(root: string, name: string): string {
  return join(root, `${name}.output`);
}

/** A first, cheap check whether a run left its files as it was given them. */
export function isUntouched({ directory, isOwn, outputFile }: RunFiles): boolean {
  try {
    return lstatSync(outputFile).size === 0 && (!isOwn || isUnchanged(lstatSync(directory)));
  } catch {
    return false;
  }
}

/** Whether these files are the same as newly made ones. Throws the system's error. */
export function isAsNew({ directory, isOwn, outputFile }: RunFiles): boolean {
  const { mode, uid, nlink, size, dev } = lstatSync(outputFile);
  const isNewFile =
    mode === (constants.S_IFREG | 0o600) && uid === process.geteuid?.() && nlink === 1 && size === 0;
  if (!isNewFile || !isOwn) return isNewFile;
  const own = lstatSync(directory);
  const isMountedOver = own.dev !== dev;
  return isUnchanged(own) && !isMountedOver && readdirSync(directory).length === 0;
}

/**
 * Whether its entries and its mode were never changed, as far as the resolution of the file system's clock can tell.
 */
function isUnchanged({ mode, uid, ctimeMs, birthtimeMs }: Stats): boolean {
  return mode === (constants.S_IFDIR | 0o700) && uid === process.geteuid?.() && ctimeMs === birthtimeMs;
}

/** Removes them all, whichever of them fail. Rejects with the first error. */
export async function removeFiles({ directory, isOwn, outputFile }: RunFiles): Promise<void> {
  const removals = [removeFile(outputFile), ...(isOwn ? [removeDirectory(directory)] : [])];
  const failed = (await Promise.allSettled(removals)).find((removal) => removal.status === 'rejected');
  if (failed !== undefined) throw failed.reason;
}

/** As a rule it is empty, and listing its entries takes twice as long as rmdir(2). */
async function removeDirectory(path: string): Promise<void> {
  if (!(await removeEmpty(path))) await removeTree(path);
}

async function removeFile(path: string): Promise<void> {
  try {
    unlinkSync(path);
  } catch {
    await removeTree(path); // the command may have put a directory in its place
  }
}

/**
 * Whether it could be removed. In libuv's threads, as it may have to wait for the disk, 300 µs while another thread
 * calls fsync.
 */
export function removeEmpty(directory: string): Promise<boolean> {
  return new Promise((resolve) => {
    rmdir(directory, (error) => resolve(error === null));
  });
}
