import {
  closeSync,
  existsSync,
  fsyncSync,
  lchownSync,
  linkSync,
  lstatSync,
  openSync,
  readdirSync,
  renameSync,
  rmSync,
  type Stats,
  statSync,
} from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { DAY_MS } from '../durations.ts';
import { AppError, codeOf } from '../errors.ts';
import type { ProcessIdentity } from './deployments.ts';

/** A file that is being made beside the place where it will be. */
export interface PartialFile {
  path: string;
  /** Gives it its name, once its bytes are on the disk. Throws AppError `conflict` if the name is taken. */
  publishAs(path: string): void;
  /** Removes it, unless it got its name. */
  discard(): void;
}

/** Who makes it: so that what a killed process left is found by the next one. */
export interface Maker {
  self: ProcessIdentity;
  /** Where its id is its own: a number, pid_namespaces(7). */
  namespace: string;
  isAlive(maker: ProcessIdentity): boolean;
  nowMs: number;
}

/** Of a file whose maker belongs to another boot, or container, perhaps of another machine that uses the directory too. */
const ABANDONED_AFTER_MS = DAY_MS;

const NAME_FORM = /^\.davit-partial-(\d+)-(\d+)-([\da-f-]{36})(?:-(\d+))?/;

const SIDES = ['', '-wal', '-shm', '-journal'] as const;

/**
 * An empty file in the directory, for this user alone; removes those that killed processes left there. Throws
 * AppError `conflict` where no file can be made.
 */
export function startPartial(directory: string, maker: Maker): PartialFile {
  const { processId, processStartedAt, bootId } = maker.self;
  const name = `.davit-partial-${processId}-${processStartedAt}-${bootId}-${maker.namespace}`;
  const path = join(directory, name);
  try {
    removeAbandoned(directory, maker);
    closeSync(openSync(path, 'wx', 0o600));
  } catch (error) {
    throw new AppError(
      'conflict',
      `cannot write in ${directory} (${codeOf(error)}): choose another place, or mend that one`,
      { cause: error },
    );
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

/** Removes it with all that SQLite may have put beside it. */
export function removePartial(path: string): void {
  for (const side of SIDES) rmSync(path + side, { force: true });
}

/** So that what was linked, renamed or removed in it is so after a power cut, too. */
export function syncDirectory(path: string): void {
  syncFile(path, 'r');
}

/** So that all that was written to it is there after a power cut. */
export function syncFile(path: string, flags = 'r+'): void {
  const descriptor = openSync(path, flags);
  try {
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
}

/**
 * Gives a file its name, in place of the one that it has. Throws AppError `conflict` if the name is taken: a link fails
 * then, which no renaming in Node does.
 */
export function giveName(path: string, finalPath: string): void {
  try {
    linkSync(path, finalPath);
    rmSync(path);
  } catch (error) {
    if (codeOf(error) === 'EEXIST' || existsSync(finalPath)) throw nameTaken(finalPath, error);
    // The look just now has to do.
    if (!isLinkless(error)) throw error;
    renameSync(path, finalPath);
  }
}

/** Whether a link failed since the file system knows none, as those of sticks and of some networks. */
export function isLinkless(error: unknown): boolean {
  return ['EPERM', 'ENOTSUP', 'ENOSYS', 'EOPNOTSUPP'].includes(codeOf(error));
}

/** For who looks before the work begins: throws AppError `conflict` for a name that no file can get; `shown` is how it was given. */
export function refuseName(path: string, shown: string): void {
  try {
    if (lstatSync(path, { throwIfNoEntry: false }) === undefined) return;
  } catch (error) {
    // What else keeps a file from being made there is said by whoever makes it.
    if (codeOf(error) !== 'ENAMETOOLONG') return;
    throw new AppError('conflict', `${shown} is too long for a name: choose another one`, { cause: error });
  }
  throw nameTaken(shown);
}

function nameTaken(path: string, cause?: unknown): AppError {
  return new AppError('conflict', `${path} is there already: choose another name, nothing is overwritten`, {
    cause,
  });
}

function removeAbandoned(directory: string, { isAlive, self, namespace, nowMs }: Maker): void {
  for (const name of readdirSync(directory)) {
    const [, processId, processStartedAt, bootId, madeIn] = NAME_FORM.exec(basename(name)) ?? [];
    if (bootId === undefined) continue;
    const maker = { processId: Number(processId), processStartedAt: Number(processStartedAt), bootId };
    const path = join(directory, name);
    const ageMs = nowMs - (statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? nowMs);
    const isKnown = bootId === self.bootId && madeIn === namespace;
    const isAbandoned = isKnown ? !isAlive(maker) : ageMs > ABANDONED_AFTER_MS;
    if (isAbandoned) rmSync(path, { force: true });
  }
}

/** What root makes beside a file must be the service's own. */
export function giveToOwner(paths: string[], { uid, gid }: Stats): void {
  if (process.getuid?.() !== 0) return;
  // A link is not followed: whoever owns the directory would choose what root gives away.
  for (const path of paths) lchownSync(path, uid, gid);
}
