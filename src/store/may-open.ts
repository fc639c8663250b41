import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { realPath } from '../paths.ts';
import { openFilesOf } from '../proc.ts';
import { includesLock, refuseOtherMachine, removed, servedBy, servedWithoutLock } from './holder.ts';
import { refuseOtherNames } from './other-names.ts';

/**
 * A starting service opens the file first and its -wal and -shm later, and one that stops closes them first, which looks
 * as if those were missing.
 */
const STARTS_OR_STOPS_WITHIN_MS = 1_000;
const RETRY_MS = 20;

/**
 * Throws AppError `conflict` if the file must not be served, nor be migrated for that: another machine serves it, it is
 * also in use under another name, or its service has lost its lock. To be called before the file is opened: even to
 * read which schema it has, SQLite may create or remove a -wal beside it.
 */
export function refuseToServe(path: string): void {
  refuseOtherMachine(path);
  refuseOtherNames(path);
  refuseRemovedLock(path);
}

/**
 * The same for a file that is used beside its service, if one runs; also if it was moved, removed or replaced as
 * `refuseRemoved` says.
 */
export function refuseToOpen(path: string, effects: Effects): void {
  refuseOtherMachine(path);
  refuseOtherNames(path);
  refuseRemoved(path, effects);
}

/**
 * Throws AppError `conflict` if the file, its -wal or its -shm was moved, removed or replaced while a service has it
 * open, as far as this user can see. The service then writes no more, and what others write under these names may be
 * lost. A -wal that was moved is not always noticed here, as other connections of the service create a new one: SQLite
 * refuses that. `withinMs`: how long a service is waited for that may be starting or stopping.
 */
export function refuseRemoved(
  path: string,
  { monotonicMs, block }: Effects,
  withinMs = STARTS_OR_STOPS_WITHIN_MS,
): void {
  const untilMs = monotonicMs() + withinMs;
  for (let found = removedOf(path); found !== undefined; found = removedOf(path)) {
    if (found.isCertain || monotonicMs() > untilMs) {
      throw new AppError(
        'conflict',
        `${found.file} was moved, removed or replaced while process ${found.processId} serves ${path}: stop that one first, ` +
          'as what is written now may be lost',
      );
    }
    block(RETRY_MS);
  }
}

function removedOf(path: string): { file: string; processId: number; isCertain: boolean } | undefined {
  const processId = servedBy(path)?.process_id ?? null;
  if (processId === null) return undefined;
  const open = openFilesOf(processId);
  // Otherwise it is not the service, which is in another PID namespace, or one that has another path for the file.
  if (!includesLock(open, path)) return undefined;
  const real = realPath(path);
  const files = [real, `${real}-wal`, `${real}-shm`];
  const gone = files.find((file) => open.includes(removed(file)));
  const hasOpened = files.some((file) => open.includes(file));
  const file = gone ?? (hasOpened ? files.find((file) => !open.includes(file)) : undefined);
  if (file === undefined) return undefined;
  // At a clean stop SQLite removes the -shm while it still has it open; the -wal it closes first.
  return { file, processId, isCertain: gone !== undefined && gone !== `${real}-shm` };
}

/** Throws AppError `conflict` while a service runs whose lock file was deleted. */
function refuseRemovedLock(path: string): void {
  const holder = servedWithoutLock(path);
  if (holder === undefined) return;
  throw new AppError(
    'conflict',
    `${path} is served already by process ${holder}, whose lock was removed: stop that one first, or serve another file`,
  );
}
