import { openFilesOf } from '../deploy/proc.ts';
import { AppError } from '../errors.ts';
import { servedBy } from '../store/lock.ts';
import { realPath } from '../store/place.ts';

/**
 * Throws AppError `conflict` where the file, its -wal or its -shm was removed or replaced while a service has it open, as
 * far as this user may see. The service writes no more then, and what others write by these names may be lost.
 */
export function refuseRemoved(path: string): void {
  const processId = servedBy(path)?.process_id ?? null;
  if (processId === null) return;
  const open = openFilesOf(processId);
  // proc_pid_fd(5); of a stranger who has that id in another PID namespace it is not said.
  const removed = ['', '-wal', '-shm']
    .map((side) => realPath(path) + side)
    .find((file) => open.includes(`${file} (deleted)`));
  if (removed === undefined) return;
  throw new AppError(
    'conflict',
    `${removed} was removed or replaced while process ${processId} serves ${path}: stop that one first, as what is written ` +
      'now may be lost',
  );
}
