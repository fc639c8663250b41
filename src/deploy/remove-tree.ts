import { constants } from 'node:fs';
import { chmod, open, readdir, rename, rmdir, unlink } from 'node:fs/promises';
import { basename, dirname } from 'node:path';
import { codeOf } from '../errors.ts';
import { readProc } from '../proc.ts';

/**
 * Removes the file or the directory tree at `path`, and nothing else, even if other processes change it meanwhile:
 * links are removed and never followed, and what is mounted in it stays as it is. No other user may be able to change
 * the directory that holds `path`. Rejects with the first error, once all is removed that can be.
 */
export async function removeTree(path: string): Promise<void> {
  const parent = await openDirectory(Buffer.from(dirname(path)));
  try {
    const name = Buffer.from(basename(path));
    if (!(await isUnlinked(parent, name))) await removeDirectory(parent, name, undefined, 0);
  } finally {
    await parent.close();
  }
}

/** A flag of open(2) that Node does not name: the descriptor only refers to a directory, which need not be readable. */
const O_PATH = 0o10000000;

/** Each directory on the way down holds a descriptor. What is deeper is moved to the top, and removed from there. */
const DEPTH_MAX = 32;

/** A process that goes on making deep directories must not keep the removal going for ever. */
const MOVES_MAX = 10_000;

/** Each takes one of libuv's threads, which others need too. */
const FILES_AT_ONCE = 8;

/** An open directory. */
interface OpenDirectory {
  /** Leads to this directory, even if it is moved or another one takes its place. */
  path: string;
  /** The mount that it belongs to, proc_pid_fdinfo(5). */
  mountId: string | undefined;
  close(): Promise<void>;
}

/** The top of the tree, into which deep directories are moved. */
interface Top {
  directory: OpenDirectory;
  moves: number;
}

async function openDirectory(path: Buffer): Promise<OpenDirectory> {
  const handle = await open(path, O_PATH | constants.O_DIRECTORY | constants.O_NOFOLLOW);
  try {
    const about = readProc(`/proc/self/fdinfo/${handle.fd}`) ?? '';
    return {
      path: `/proc/self/fd/${handle.fd}`,
      mountId: /^mnt_id:\s*(\d+)$/m.exec(about)?.[1],
      close: () => handle.close(),
    };
  } catch (error) {
    await handle.close();
    throw error;
  }
}

/** Removes it unless it is a directory; false: it is one. */
async function isUnlinked(parent: OpenDirectory, name: Buffer): Promise<boolean> {
  try {
    await allowed(parent, () => unlink(pathIn(parent, name)));
    return true;
  } catch (error) {
    if (codeOf(error) === 'ENOENT') return true;
    if (codeOf(error) === 'EISDIR') return false;
    throw error;
  }
}

async function removeDirectory(
  parent: OpenDirectory,
  name: Buffer,
  top: Top | undefined,
  depth: number,
): Promise<void> {
  const path = pathIn(parent, name);
  const directory = await allowed(parent, () => openDirectory(path));
  try {
    if (directory.mountId !== parent.mountId)
      throw new Error(`something is mounted at ${name}: it stays as it is`);
    await empty(directory, top ?? { directory, moves: 0 }, depth);
  } finally {
    await directory.close();
  }
  await allowed(parent, () => rmdir(path));
}

async function empty(directory: OpenDirectory, top: Top, depth: number): Promise<void> {
  const failures: unknown[] = [];
  const directories: Buffer[] = [];
  const names = (await allowed(directory, () => readdir(directory.path, { encoding: 'buffer' }))).values();
  const removeFiles = async () => {
    for (const name of names) {
      const unlinked = await isUnlinked(directory, name).catch((error) => failures.push(error));
      if (unlinked === false) directories.push(name);
    }
  };
  await Promise.all(Array.from({ length: FILES_AT_ONCE }, removeFiles));

  const movesBefore = top.moves;
  for (const name of directories) {
    const removal =
      depth < DEPTH_MAX ? removeDirectory(directory, name, top, depth + 1) : moveUp(directory, name, top);
    await removal.catch((error) => failures.push(error));
  }
  if (directory === top.directory && top.moves > movesBefore) await empty(directory, top, depth);
  else if (failures.length > 0) throw failures[0];
}

/** In bytes: a name need not be UTF-8. */
function pathIn({ path }: OpenDirectory, name: Buffer): Buffer {
  return Buffer.concat([Buffer.from(`${path}/`), name]);
}

async function moveUp(parent: OpenDirectory, name: Buffer, top: Top): Promise<void> {
  if (top.moves === MOVES_MAX) throw new Error('it is deeper than can be removed at once');
  top.moves += 1;
  const path = pathIn(parent, name);
  const directory = await allowed(parent, () => openDirectory(path));
  await chmod(directory.path, 0o700).finally(directory.close); // rename(2) writes to it, as its `..` changes
  const free = Buffer.from(`deep-${top.moves}`);
  await allowed(parent, () => rename(path, pathIn(top.directory, free)));
}

/** Makes the directory writable if it must be: some programs make theirs read-only, as Go does with its modules. */
async function allowed<Result>(directory: OpenDirectory, act: () => Promise<Result>): Promise<Result> {
  try {
    return await act();
  } catch (error) {
    if (codeOf(error) !== 'EACCES') throw error;
    await chmod(directory.path, 0o700);
    return await act();
  }
}
