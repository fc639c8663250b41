import { type Stats, statSync } from 'node:fs';
import { basename } from 'node:path';
import type { Command } from 'commander';
import { AppError, codeOf } from '../errors.ts';
import { absolutePath, namesDirectory, realPath } from '../paths.ts';
import { printable } from '../printable.ts';
import type { Store } from '../store/store.ts';
import { walBytesOf } from '../store/wal.ts';
import { type CommandContext, misused } from './command.ts';

/**
 * Opens the file for `action`, and closes it in any case. Only commands that may come first create a missing file, and
 * say so: otherwise a wrong path would look like an empty file. Throws AppError.
 */
export async function withStore<Result>(
  command: Command,
  { effects, terminal }: CommandContext,
  whenMissing: 'create' | 'refuse',
  action: (store: Store) => Promise<Result> | Result,
): Promise<Result> {
  const path = whenMissing === 'refuse' ? existingDbPathOf(command) : dbPathOf(command);
  // Imported only here, as loading SQLite takes longer than all else that `--help` needs.
  const [{ openStore }, { refuseToOpen }] = await Promise.all([
    import('../store/store.ts'),
    import('../store/may-open.ts'),
  ]);
  refuseToOpen(path, effects);
  const isNew = statusOfFile(path) === undefined;
  const store = openStore(path, effects);
  if (isNew) terminal.note(`created the file ${printable(absolutePath(path))}`);
  try {
    return await action(store);
  } finally {
    await store.close();
  }
}

/**
 * A name may have 255 bytes, and SQLite takes paths of 512. This leaves room for the longest ones beside the file: those
 * of what a restore keeps, and of a copy that is being made.
 */
const NAME_MAX_BYTES = 200;
const PATH_MAX_BYTES = 400;

/**
 * The path of `--db` or DAVIT_DB. An empty one and `:memory:` would be temporary databases of SQLite: they are misuse.
 */
export function dbPathOf(command: Command): string {
  const path = String(command.optsWithGlobals()['db']);
  if (path === '' || path === ':memory:') misused(command, '--db must be the path of a file');
  if (namesDirectory(path)) {
    misused(command, `--db must be the path of a file, not of a directory: add its name to '${path}'`);
  }
  // better-sqlite3 trims the path, and would open another file.
  if (path.trim() !== path) misused(command, '--db must not begin or end with white space');
  const real = realPath(path);
  if (Buffer.byteLength(basename(real)) > NAME_MAX_BYTES || Buffer.byteLength(real) > PATH_MAX_BYTES) {
    misused(
      command,
      `--db must be a path of at most ${PATH_MAX_BYTES} bytes, the name at its end of at most ${NAME_MAX_BYTES}: files with ` +
        'longer names lie beside it',
    );
  }
  const status = statusOfFile(path);
  if (status !== undefined && !status.isFile()) {
    const kind = status.isDirectory() ? 'a directory' : 'not a regular file';
    throw new AppError('conflict', `${path} is ${kind}: give the path of a file with --db or DAVIT_DB`);
  }
  return path;
}

/** The same; throws AppError `not_found` if the file is missing or empty. */
export function existingDbPathOf(command: Command): string {
  const path = dbPathOf(command);
  const status = statusOfFile(path);
  if (status === undefined) {
    throw new AppError(
      'not_found',
      walBytesOf(path) > 0
        ? `there is no file ${path}, but its -wal is there, which holds a part of it: move the file back`
        : `there is no file ${path}: give its path with --db or DAVIT_DB`,
    );
  }
  if (status.size === 0) {
    throw new AppError(
      'not_found',
      `${path} is not a davit file, as it is empty: choose another one with --db`,
    );
  }
  return path;
}

/** Undefined: nothing is there. Throws AppError `conflict` if that cannot be known. */
function statusOfFile(path: string): Stats | undefined {
  try {
    return statSync(path, { throwIfNoEntry: false });
  } catch (error) {
    const code = codeOf(error);
    throw new AppError(
      'conflict',
      `cannot access ${path} (${code}): run this as a user who can, or choose another file with --db`,
      { cause: error },
    );
  }
}
