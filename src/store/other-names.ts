import { existsSync, readFileSync, type Stats, statSync } from 'node:fs';
import { AppError } from '../errors.ts';
import { connect, kindOf, openingProblem, sqliteCode } from './database.ts';
import { beginExclusive } from './exclusive.ts';
import { LOOKS_TIMEOUT_MS, locksOn, servedBy } from './lock.ts';
import { realPath } from './place.ts';

/**
 * By another name of the file there is another lock, and SQLite keeps another WAL: who writes by both damages it. Throws
 * AppError `conflict` for a file that is mounted by itself, and so is elsewhere too with all that is beside it; and while
 * somebody has open a file with several names, hard links, that is not served by this one.
 */
export function refuseOtherNames(path: string): void {
  if (isMountPoint(realPath(path))) {
    throw new AppError(
      'conflict',
      `${path} is mounted by itself, and what belongs to it (-wal, -lock) would be beside the mount and not beside the ` +
        'file: mount the directory that it is in',
    );
  }
  const stats = statSync(path, { throwIfNoEntry: false });
  if (stats === undefined || stats.nlink === 1 || servedBy(path) !== null) return;
  const database = connect(path, { timeoutMs: LOOKS_TIMEOUT_MS });
  try {
    kindOf(database, path); // somebody else's stays as it was
    beginExclusive(database, path);
  } catch (error) {
    if (!(error instanceof AppError) || sqliteCode(error.cause) === undefined)
      throw openingProblem(path, error);
    throw new AppError(
      'conflict',
      `${path} has another name too, a hard link, and ${openerOf(stats)} has the file open: stop that first, and remove ` +
        'one of the names, as to write by both would damage it',
      { cause: error },
    );
  } finally {
    database.close();
  }
}

/**
 * By the fifth field of a line, in which spaces and the like are octal, proc_pid_mountinfo(5); none where /proc is not there,
 * as an admin command may find it.
 */
function isMountPoint(path: string): boolean {
  if (!existsSync(MOUNTS)) return false;
  const lines = readFileSync(MOUNTS, 'utf8').matchAll(/^\S+ \S+ \S+ \S+ (\S+) /gm);
  return [...lines].some(
    ([, place = '']) =>
      place.replace(/\\(\d{3})/g, (_, digits) => String.fromCharCode(Number.parseInt(digits, 8))) === path,
  );
}

const MOUNTS = '/proc/self/mountinfo';

/** Whoever has a database of SQLite open has locked a part of it. */
function openerOf(stats: Stats): string {
  const opener = locksOn(stats).find(({ processId }) => processId > 0 && processId !== process.pid);
  return opener === undefined ? 'another process' : `process ${opener.processId}`;
}
