import {
  chownSync,
  closeSync,
  existsSync,
  fsyncSync,
  linkSync,
  openSync,
  realpathSync,
  renameSync,
  rmSync,
  type Stats,
  statSync,
} from 'node:fs';
import { dirname } from 'node:path';
import { AppError } from '../errors.ts';
import { connect, sqliteCode } from './database.ts';
import { type UnfinishedDeployment, deploymentReads } from './deployments.ts';

/** What SQLite keeps beside a file and reads without asking whose it is. */
const SIDE_FILES = ['-wal', '-journal'] as const;

/**
 * Puts the file `replacement`, one that `checkDatabase` found good, where `path` is or was, in one step: at every
 * moment there is the old file or the new one there. The old one is kept at `asidePath`, with all that its WAL
 * held. No WAL of the old one is ever beside the new one, where SQLite would read it as that one's. The caller
 * holds `lockForServing`. Returns whether there was anything to keep. Throws AppError `conflict`, and nothing has
 * changed, while another process has the old one open.
 */
export function replaceDatabase(path: string, replacement: string, asidePath: string): boolean {
  const target = realPath(path);
  const before = statSync(target, { throwIfNoEntry: false });
  const release = before === undefined ? () => undefined : holdAlone(target);
  try {
    giveToOwner([replacement, `${target}-lock`], before ?? statSync(dirname(target)));
    const sides = SIDE_FILES.filter((side) => existsSync(target + side));
    if (before !== undefined) linkSync(target, asidePath);
    for (const side of sides) renameSync(target + side, asidePath + side);
    rmSync(`${target}-shm`, { force: true });
    // First that nothing is left beside it, then the new one: a power cut must not turn that around.
    syncDirectory(dirname(target));
    if (before === undefined) linkSync(replacement, target);
    else renameSync(replacement, target);
    syncDirectory(dirname(target));
    return before !== undefined || sides.length > 0;
  } finally {
    release();
  }
}

/** What a file says is still running; nothing of a file that cannot be read. */
export function unfinishedIn(path: string): UnfinishedDeployment[] {
  if (!existsSync(path)) return [];
  const database = connect(path);
  try {
    return deploymentReads(database).unfinished();
  } catch (error) {
    if (sqliteCode(error) === undefined) throw error;
    return [];
  } finally {
    database.close();
  }
}

/** So that what was renamed or linked is so after a power cut, too. */
export function syncDirectory(path: string): void {
  const descriptor = openSync(path, 'r');
  try {
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
}

function realPath(path: string): string {
  return existsSync(path) ? realpathSync(path) : path;
}

/**
 * Takes the WAL into the file and keeps everybody else out until the returned function is called. Of a damaged
 * file nothing can be taken in: it is kept with its WAL.
 */
function holdAlone(path: string): () => void {
  const database = connect(path);
  try {
    database.pragma('locking_mode = EXCLUSIVE');
    // Refused as long as anybody else has the file open in WAL mode, even if only to read now and then.
    database.pragma('journal_mode = DELETE');
    database.exec('BEGIN EXCLUSIVE');
    return () => database.close();
  } catch (error) {
    database.close();
    const code = sqliteCode(error);
    if (code === 'SQLITE_NOTADB' || code?.startsWith('SQLITE_CORRUPT') === true) return () => undefined;
    if (code?.startsWith('SQLITE_BUSY') !== true) throw error;
    throw new AppError(
      'conflict',
      `another process has ${path} open, a davit admin command or a backup as a rule: try again when it has ended`,
      { cause: error },
    );
  }
}

/** What root restores must be the service's own. */
function giveToOwner(paths: string[], { uid, gid }: Stats): void {
  if (process.getuid?.() !== 0) return;
  for (const path of paths) chownSync(path, uid, gid);
}
