import {
  closeSync,
  type Dirent,
  existsSync,
  lstatSync,
  openSync,
  readdirSync,
  readlinkSync,
  rmSync,
  statfsSync,
  statSync,
  unlinkSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { bootId, hasBootId } from '../boot-id.ts';
import { DAY_MS } from '../durations.ts';
import { AppError, codeOf } from '../errors.ts';
import { isAlive, processIdentity } from '../process-identity.ts';
import { writableBytes } from './place.ts';
import { giveName, nameTaken, syncDirectory, syncFile } from './publish.ts';

/** A file that is written under a temporary name, in the directory where it will get its final name. */
export interface PartialFile {
  path: string;
  /** Syncs the file, then gives it its final name. Throws AppError `conflict` if the name is taken. */
  publishAs(path: string): void;
  /** Removes the file, unless it was published. */
  discard(): void;
}

/** The age of an abandoned file whose maker cannot be checked: one of another boot, container or machine. */
const ABANDONED_AFTER_MS = DAY_MS;

const NAME_FORM = /^\.davit-partial-(\d+)-(\d+)-([\da-f-]{36})(?:-(\d+))?/;

/** What SQLite may create beside a file. */
const SIDES = ['-wal', '-shm', '-journal'] as const;

/**
 * Creates an empty file of mode 0600 in the directory, and removes the partial files that killed processes left there:
 * its name tells which process makes it. Throws AppError `conflict` where no file can be created.
 */
export function startPartial(directory: string, nowMs: number): PartialFile {
  const self = processIdentity(process.pid);
  if (self === undefined) throw new Error('/proc does not show this very process');
  const name = `.davit-partial-${self.processId}-${self.processStartedAt}-${self.bootId}-${ownNamespace()}`;
  const path = join(directory, name);
  try {
    for (const abandoned of abandonedIn(directory, nowMs)) removeIfAllowed(join(directory, abandoned.name));
    closeSync(openSync(path, 'wx', 0o600));
  } catch (error) {
    throw new AppError('conflict', `cannot write in ${whatToDo(directory, codeOf(error))}`, { cause: error });
  }
  return {
    path,
    publishAs(finalPath) {
      syncFile(path);
      giveName(path, finalPath);
      syncDirectory(dirname(finalPath));
    },
    discard: () => removePartial(path),
  };
}

function whatToDo(directory: string, code: string): string {
  if (code === 'ENOENT')
    return `${directory}, which is not there: choose another directory, or create that one`;
  if (code === 'ENOTDIR') return `${directory}, which is no directory: choose one`;
  const advice = ['ENOSPC', 'EDQUOT'].includes(code) ? 'make room in that one' : 'make that one writable';
  return `${directory} (${code}): choose another directory, or ${advice}`;
}

/** How much this user can write in the directory, see `writableBytes`; undefined: the file system does not tell. */
export function freeBytesIn(directory: string): number | undefined {
  const stats = statfsSync(directory);
  return stats.blocks === 0 ? undefined : writableBytes(stats);
}

/** Removes a file and what SQLite may have created beside it. */
export function removePartial(path: string): void {
  for (const side of ['', ...SIDES]) rmSync(path + side, { force: true });
}

/**
 * Checks a name before the work begins. Throws AppError `conflict` if it is taken or too long, or if SQLite or davit
 * would take a file of that name for a part of the one beside it; `shown`: as it was given.
 */
export function refuseName(path: string, shown: string): void {
  const ending = [...SIDES, '-lock'].find((one) => path.endsWith(one)) ?? '';
  if (
    ending !== '' &&
    statSync(path.slice(0, -ending.length), { throwIfNoEntry: false })?.isFile() === true
  ) {
    throw new AppError(
      'conflict',
      `${shown} would be taken for a part of ${shown.slice(0, -ending.length)}, and be lost: choose another name`,
    );
  }
  const side = SIDES.find((one) => existsSync(path + one));
  if (side !== undefined) {
    throw new AppError(
      'conflict',
      `${shown}${side} is there already, and would be taken for a part of ${shown}: choose another name`,
    );
  }
  try {
    if (lstatSync(path, { throwIfNoEntry: false }) === undefined) return;
  } catch (error) {
    // Any other problem is reported when the file is created.
    if (codeOf(error) !== 'ENAMETOOLONG') return;
    throw new AppError('conflict', `${shown} is too long for a name: choose another one`, { cause: error });
  }
  throw nameTaken(shown);
}

/**
 * The partial files in the directory whose makers were killed. Where others may write in it, they may be of any kind.
 */
export function abandonedIn(directory: string, nowMs: number): Dirent[] {
  return readdirSync(directory, { withFileTypes: true }).filter(({ name }) => {
    if (!NAME_FORM.test(name)) return false;
    const stats = lstatSync(join(directory, name), { throwIfNoEntry: false });
    const ageMs = nowMs - (stats?.mtimeMs ?? nowMs);
    return !(isBeingMade(name) ?? ageMs <= ABANDONED_AFTER_MS);
  });
}

/** Whether the process that makes the partial file `name` runs; undefined: that cannot be checked from here. */
function isBeingMade(name: string): boolean | undefined {
  const [, processId, processStartedAt, madeInBootId, namespace] = NAME_FORM.exec(name) ?? [];
  if (!hasBootId() || madeInBootId !== bootId() || namespace !== ownNamespace()) return undefined;
  return isAlive({
    processId: Number(processId),
    processStartedAt: Number(processStartedAt),
    bootId: madeInBootId,
  });
}

/** In a directory that others may write in, it may be another user's, or no file at all. */
function removeIfAllowed(path: string): void {
  try {
    unlinkSync(path);
  } catch {
    // It is left to whoever may.
  }
}

/** The number of the PID namespace of this process, pid_namespaces(7). */
function ownNamespace(): string {
  return /\d+/.exec(readlinkSync('/proc/self/ns/pid'))?.[0] ?? '0';
}
