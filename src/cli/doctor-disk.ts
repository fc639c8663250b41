import { closeSync, constants, fsyncSync, openSync, statfsSync, statSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { codeOf } from '../errors.ts';
import { lockPath } from '../store/lock.ts';
import { formatBytes } from './bytes.ts';
import { counted } from './counted.ts';
import { type FindingOf, note, ok, problem } from './findings.ts';

/** Room for the WAL at its largest, a few logs, and a night in which nobody looks. */
const DISK_LOW_BYTES = 256_000_000;
/** The -wal, -shm and -lock of a service that starts. */
const FILES_BESIDE = 3;

/** Whether there is room for the file `path`, and nothing else keeps it from being written. */
export function checkDisk(path: string): FindingOf<'disk'> {
  const { bavail, bsize, files, ffree } = statfsSync(dirname(path));
  const freeBytes = bavail * bsize;
  const fileBytes = statSync(path).size;
  const message = `${formatBytes(freeBytes)} are free where the file is, which has ${formatBytes(fileBytes)}`;
  if (isReadOnly(path)) {
    return problem(
      'disk',
      'the file system is read-only: it was mounted so, or an error has made it so',
      'see what the kernel says of it (dmesg), mend and mount it again: until then davit answers 503 and starts nothing',
    );
  }
  // First: room does not help there.
  if (files > 0 && ffree < FILES_BESIDE) {
    const many = ffree === 0 ? 'no further file' : `only ${counted(ffree, 'further file')}`;
    return problem(
      'disk',
      `${many} can be made where the file is`,
      'remove files that nobody needs, however small',
    );
  }
  if (freeBytes < DISK_LOW_BYTES) {
    return problem('disk', message, 'make room: when it is full davit answers 503 and starts nothing');
  }
  const refusal = refusalToWrite(path);
  if (refusal !== undefined) {
    return problem(
      'disk',
      `nothing can be written where the file is (${refusal}), though ${formatBytes(freeBytes)} are free there`,
      refusal === 'EIO'
        ? 'the disk fails, as a rule: see what the kernel says of it (dmesg), and copy the file to another one (davit backup)'
        : 'a quota is used up, as a rule: see quota and repquota; until there is room davit answers 503 and starts nothing',
    );
  }
  if (freeBytes < fileBytes) return note('disk', message, 'a copy of it needs another disk');
  return ok('disk', message);
}

/** A start needs less, and a quota of which less is left ends with the next deployments. */
const TRIED_BYTES = 64 * 1024;
/** A file without a name, open(2); Node has no name for it. */
const O_TMPFILE = 0o20000000 | constants.O_DIRECTORY;

const REFUSALS = ['EDQUOT', 'ENOSPC', 'EIO'] as const;

/** The code with which it failed, by the owner of the file: others, root first, have quotas of their own, or none. */
function refusalToWrite(path: string): (typeof REFUSALS)[number] | undefined {
  if (statSync(path).uid !== process.geteuid?.()) return undefined;
  try {
    const descriptor = openSync(dirname(path), O_TMPFILE | constants.O_RDWR, 0o600);
    try {
      writeFileSync(descriptor, Buffer.alloc(TRIED_BYTES));
      fsyncSync(descriptor);
    } finally {
      closeSync(descriptor);
    }
    return undefined;
  } catch (error) {
    return REFUSALS.find((code) => code === codeOf(error)); // what some networks cannot do tells nothing
  }
}

/**
 * By opening the lock file: access(2) does not know of a file system that the kernel has closed after an error, and to
 * close the file itself would let go of what SQLite has locked of it, fcntl(2).
 */
function isReadOnly(path: string): boolean {
  try {
    closeSync(openSync(lockPath(path), 'r+'));
    return false;
  } catch (error) {
    return codeOf(error) === 'EROFS';
  }
}
