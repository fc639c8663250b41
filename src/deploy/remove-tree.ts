import { constants } from 'node:fs';
import { chmod, open, readdir, rename, rmdir, unlink } from 'node:fs/promises';
import { basename, dirname } from 'node:path';
import { codeOf } from '../errors.ts';
import { readProc } from './proc.ts';

/**
 * Removes what stands at `path`, a file or a directory with all that is in it, and nothing else, whoever changes that
 * meanwhile: links are removed and never followed, and what is mounted in it stays as it is. Nobody else may change the
 * directory around it. Rejects with the first error, once all is removed that can be.
 */
export async function removeTree(path: string): Promise<void> {
  const around = await enter(Buffer.from(dirname(path)));
  try {
    const name = Buffer.from(basename(path));
    if (!(await isUnlinked(around, name))) await removeDirectory(around, name, undefined, 0);
  } finally {
    await around.leave();
  }
}

/** Of open(2), where Node has no name for it: where a directory is, which need not be readable. */
const O_PATH = 0o10000000;

/** Each directory on the way down holds a descriptor. What is deeper is moved up, where its way is short. */
const DEPTH_MAX = 32;

/** Whoever goes on making directories keeps nobody busy for ever. */
const MOVES_MAX = 10_000;

/** Each takes one of libuv's threads, and those serve others too. */
const FILES_AT_ONCE = 8;

/** A directory that was entered. */
interface Place {
  /** Leads to it wherever it is moved, and whatever stands in its place then. */
  path: string;
  /** The mount that it belongs to, proc_pid_fdinfo(5). */
  mountId: string | undefined;
  leave(): Promise<void>;
}

/** The directory that is removed, into which the deep ones are moved. */
interface Top {
  place: Place;
  moves: number;
}

async function enter(path: Buffer): Promise<Place> {
  const handle = await open(path, O_PATH | constants.O_DIRECTORY | constants.O_NOFOLLOW);
  try {
    const about = readProc(`/proc/self/fdinfo/${handle.fd}`) ?? '';
    return {
      path: `/proc/self/fd/${handle.fd}`,
      mountId: /^mnt_id:\s*(\d+)$/m.exec(about)?.[1],
      leave: () => handle.close(),
    };
  } catch (error) {
    await handle.close();
    throw error;
  }
}

/** False: it is a directory. */
async function isUnlinked(around: Place, name: Buffer): Promise<boolean> {
  try {
    await allowed(around, () => unlink(pathIn(around, name)));
    return true;
  } catch (error) {
    if (codeOf(error) === 'ENOENT') return true;
    if (codeOf(error) === 'EISDIR') return false;
    throw error;
  }
}

async function removeDirectory(
  around: Place,
  name: Buffer,
  top: Top | undefined,
  depth: number,
): Promise<void> {
  const path = pathIn(around, name);
  const place = await allowed(around, () => enter(path));
  try {
    if (place.mountId !== around.mountId)
      throw new Error(`something is mounted at ${name}: it stays as it is`);
    await empty(place, top ?? { place, moves: 0 }, depth);
  } finally {
    await place.leave();
  }
  await allowed(around, () => rmdir(path));
}

async function empty(place: Place, top: Top, depth: number): Promise<void> {
  const failures: unknown[] = [];
  const directories: Buffer[] = [];
  const names = (await allowed(place, () => readdir(place.path, { encoding: 'buffer' }))).values();
  const removeFiles = async () => {
    for (const name of names) {
      const unlinked = await isUnlinked(place, name).catch((error) => failures.push(error));
      if (unlinked === false) directories.push(name);
    }
  };
  await Promise.all(Array.from({ length: FILES_AT_ONCE }, removeFiles));

  const movesBefore = top.moves;
  for (const name of directories) {
    const removal =
      depth < DEPTH_MAX ? removeDirectory(place, name, top, depth + 1) : moveUp(place, name, top);
    await removal.catch((error) => failures.push(error));
  }
  if (place === top.place && top.moves > movesBefore) await empty(place, top, depth);
  else if (failures.length > 0) throw failures[0];
}

/** In bytes: a name need not be UTF-8. */
function pathIn({ path }: Place, name: Buffer): Buffer {
  return Buffer.concat([Buffer.from(`${path}/`), name]);
}

async function moveUp(around: Place, name: Buffer, top: Top): Promise<void> {
  if (top.moves === MOVES_MAX) throw new Error('it is deeper than can be removed at once');
  top.moves += 1;
  const path = pathIn(around, name);
  const place = await allowed(around, () => enter(path));
  await chmod(place.path, 0o700).finally(place.leave); // rename(2) writes into it: it has another parent then
  const free = Buffer.from(`deep-${top.moves}`);
  await allowed(around, () => rename(path, pathIn(top.place, free)));
}

/** Some programs take the right to write from directories that they fill, Go from its modules for one. */
async function allowed<Result>(place: Place, act: () => Promise<Result>): Promise<Result> {
  try {
    return await act();
  } catch (error) {
    if (codeOf(error) !== 'EACCES') throw error;
    await chmod(place.path, 0o700);
    return await act();
  }
}
