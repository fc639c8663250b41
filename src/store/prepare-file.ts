import {
  chmodSync,
  closeSync,
  constants,
  existsSync,
  fchownSync,
  fstatSync,
  openSync,
  statSync,
} from 'node:fs';
import { basename, dirname } from 'node:path';
import { AppError, codeOf } from '../errors.ts';
import { isPermitted, realPath, statusOf } from '../paths.ts';
import { sharedMemoryPath, walPath } from './place.ts';

/* What is done with the file before SQLite opens it for writing. */

/**
 * Creates an empty file for the database, unless there is one: it holds secrets, and SQLite would create it with the mode
 * that the umask allows. Throws AppError `conflict` if it cannot be created, or only the WAL of a file is left there.
 */
export function createPrivately(path: string): void {
  if (existsSync(path)) return;
  refuseLoneWal(path);
  try {
    if (process.getuid?.() === 0) createForOwner(realPath(path));
    // Follows a symbolic link, and leaves a file unchanged that another davit has created meanwhile.
    else closeSync(openSync(path, 'a', 0o600));
  } catch (error) {
    const code = codeOf(error);
    if (code === 'EEXIST') return; // another davit has created it meanwhile
    const reason = code === 'ENOENT' ? 'its directory is not there' : code;
    const allow = code === 'EACCES' ? `let this user write to ${dirname(realPath(path))}, or ` : '';
    throw new AppError(
      'conflict',
      `cannot create ${path} (${reason}): ${allow}choose another place with --db`,
      {
        cause: error,
      },
    );
  }
}

/**
 * Refuses to create a file beside a WAL: SQLite would delete the WAL of an empty file, and the writes that only it has.
 */
function refuseLoneWal(path: string): void {
  const wal = walPath(path);
  if ((statusOf(wal)?.size ?? 0) === 0) return;
  throw new AppError(
    'conflict',
    `${path} is not there, but ${wal} is, which holds a part of it: move ${path} back, or, to begin anew without it, move the -wal away too`,
  );
}

/**
 * Creates a file as root, and gives it to the owner of its directory, most often the service's user, who could not open
 * it otherwise; SQLite gives the -wal and -shm to the owner of the file. Both are opened first: whoever may rename or
 * link anything on the path could else have root give away a file of another directory.
 */
function createForOwner(path: string): void {
  const directory = openSync(dirname(path), constants.O_RDONLY | constants.O_DIRECTORY);
  try {
    const file = openSync(`/proc/self/fd/${directory}/${basename(path)}`, 'wx', 0o600);
    try {
      const { uid, gid } = fstatSync(directory);
      if (uid !== 0) {
        fchownSync(file, uid, gid);
        // Root without CAP_DAC_OVERRIDE could not open it any more.
        if (!isWritable(`/proc/self/fd/${file}`)) fchownSync(file, 0, 0);
      }
    } catch (error) {
      // Root without CAP_CHOWN, as in some containers, or of a user namespace without that user: the file stays root's.
      if (!['EPERM', 'EINVAL'].includes(codeOf(error))) throw error;
    } finally {
      closeSync(file);
    }
  } finally {
    closeSync(directory);
  }
}

/**
 * Throws AppError `conflict` for read-only files. SQLite would open them all the same, and create the -wal and -shm with
 * the same mode, so that no write would succeed later either. Those that a reader left so get the mode that the file has
 * now.
 */
export function refuseUnwritable(path: string): void {
  if (!isWritable(path)) throw unwritable(path);
  for (const side of [walPath(path), sharedMemoryPath(path)]) {
    if (isWritable(side)) continue;
    if (statusOf(side)?.uid !== process.getuid?.()) throw unwritable(side);
    chmodSync(side, statSync(path).mode & 0o777);
  }
}

/** Not by opening it: closing any descriptor of a file releases this process's locks on it, fcntl(2). */
function isWritable(file: string): boolean {
  return isPermitted(file, constants.W_OK);
}

/** The error for a file that this user may not write to. */
export function unwritable(file: string, cause?: unknown): AppError {
  return new AppError(
    'conflict',
    `cannot write to ${file}: check that this user may write to it and its directory`,
    { cause },
  );
}
