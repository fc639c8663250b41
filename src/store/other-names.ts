import { AppError } from '../errors.ts';
import { realPath, statusOf } from '../paths.ts';
import { openFilesOf } from '../proc.ts';
import { connect, kindOf } from './database.ts';
import { beginExclusive } from './exclusive.ts';
import { openerOf, openersOf } from './file-locks.ts';
import { LOCK_PROBE_TIMEOUT_MS, servedBy } from './holder.ts';
import { isMountPoint } from './mounts.ts';
import { openingProblem, sqliteCode } from './sqlite-errors.ts';

/**
 * A file that is opened by two names has two locks and two WALs, and writes by both damage it. Throws AppError
 * `conflict` for a file that is itself a mount point, as it has another name elsewhere, with a -wal and a lock of its
 * own there; for one that was moved here while a process had it open; and for one with several hard links while a
 * process has it open that does not serve it by this name.
 */
export function refuseOtherNames(path: string): void {
  if (isMountPoint(realPath(path))) {
    throw new AppError(
      'conflict',
      `${path} is mounted by itself, and what belongs to it (-wal, -lock) would be beside the mount and not beside the ` +
        'file: mount the directory that it is in',
    );
  }
  refuseMovedHere(path);
  const stats = statusOf(path);
  if (stats === undefined || stats.nlink === 1 || servedBy(path) !== null) return;
  const database = connect(path, { timeoutMs: LOCK_PROBE_TIMEOUT_MS });
  try {
    kindOf(database, path); // throws for another program's file, before anything is changed
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
 * Throws AppError `conflict` for a file that was moved here while a process has it open: that process goes on with the
 * -wal of the old name.
 */
export function refuseMovedHere(path: string): void {
  const stats = statusOf(path);
  if (stats === undefined) return;
  const real = realPath(path);
  for (const processId of openersOf(stats)) {
    const open = new Set(openFilesOf(processId));
    // It may have another path for the file, as in a container; or it uses the -wal of this name.
    if (!open.has(real) || open.has(`${real}-wal`)) continue;
    const oldPath = [...open].map((file) => SHM_OF.exec(file)?.[1]).find((one) => one && !open.has(one));
    if (oldPath === undefined) continue;
    throw new AppError(
      'conflict',
      `${path} was moved here while process ${processId} has it open, and a part of it is in ${oldPath}-wal: move it ` +
        `back to ${oldPath}`,
    );
  }
}

/** The path of a -shm, which only a process that has the database open in WAL mode opens; proc_pid_fd(5). */
const SHM_OF = /^(.*)-shm(?: \(deleted\))?$/s;
