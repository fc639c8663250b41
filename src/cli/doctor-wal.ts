import { printable } from '../printable.ts';
import { readProc } from '../proc.ts';
import { quoteForBash } from '../shell-words.ts';
import type { KeptTransaction } from '../store/doctor.ts';
import { WAL_LARGE_BYTES } from '../store/wal.ts';
import { formatBytes } from './bytes.ts';
import type { Case } from './doctor-case.ts';
import { type Finding, note, ok, problem } from './findings.ts';
import type { Surroundings } from './project-surroundings.ts';

/** Of a file that no service uses. */
export function checkLeftWal({ walBytes }: Case): Finding {
  const message = walText(walBytes);
  if (walBytes > WAL_LARGE_BYTES) {
    return problem('wal', message, 'start davit serve and stop it again: that copies it into the file');
  }
  if (walBytes === 0) return ok('wal', message);
  return note('wal', `${message}: the service did not stop cleanly; nothing is lost`, null);
}

/**
 * Of one that a service uses. After a long read the WAL keeps its size until the next write, however much of it is copied
 * by then.
 */
export function checkServedWal({ walBytes }: Case, uncopiedBytes: number): Finding {
  const message = walText(walBytes);
  if (uncopiedBytes > WAL_LARGE_BYTES) {
    return problem(
      'wal',
      `${message}, of which ${formatBytes(uncopiedBytes)} are not copied into the file`,
      'a program that reads for long holds it up, usually a backup: once that has ended, restart davit serve',
    );
  }
  if (walBytes <= WAL_LARGE_BYTES) return ok('wal', message);
  return note('wal', `${message}: a write makes it short again once no program reads it any more`, null);
}

function walText(walBytes: number): string {
  return `the WAL has ${formatBytes(walBytes)}`;
}

/** Whether a process keeps the others from writing. */
export function checkWrites(
  { path }: Case,
  kept: KeptTransaction | undefined,
  { serviceProcessId }: Surroundings,
): Finding {
  if (kept === undefined) return ok('writes', 'no process keeps a write transaction');
  const { processId } = kept;
  if (processId !== null && processId === serviceProcessId) {
    return problem(
      'writes',
      `the service, process ${processId}, does not come to the end of a commit: its disk hardly answers, or not at all`,
      'see what the kernel says of the disk (dmesg)',
    );
  }
  return problem(
    'writes',
    `${processText(processId)} keeps a write transaction: until it ends, davit answers 503 and starts nothing`,
    processId === null
      ? `end its transaction, or the process: ${fuser(`${path}-shm`)} shows which ones have the file open`
      : 'end its transaction, or the process',
  );
}

function processText(processId: number | null): string {
  if (processId === null) return 'another process';
  const name = readProc(`/proc/${processId}/comm`)?.trim();
  return `process ${processId}${name === undefined ? '' : ` (${printable(name)})`}`;
}

/** The command that lists the processes that have a file open. */
export function fuser(file: string): string {
  return `'fuser -v ${quoteForBash(file)}'`;
}
