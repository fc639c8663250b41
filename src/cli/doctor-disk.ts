import { constants, statfsSync, statSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { dirname } from 'node:path';
import { delay, type Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import { networkProblem } from '../store/mounts.ts';
import { isOnReadOnlyFileSystem } from '../store/place.ts';
import { formatBytes } from './bytes.ts';
import { counted } from './counted.ts';
import { type Finding, note, ok, problem } from './findings.ts';

/** Room for the WAL at its largest, a few logs, and a night in which nobody looks. */
const DISK_LOW_BYTES = 256_000_000;
/** The -wal, -shm and -lock of a service that starts. */
const FILES_BESIDE = 3;

/** How a trial write ended: with the system's refusal, or with no answer; undefined: well, or its error says nothing. */
export type DiskTrial = (typeof REFUSALS)[number] | 'noAnswer' | undefined;

/** Whether there is room for the file `path`, and it can be written; and whether other machines may use it too. */
export function checkDisk(path: string, trial: DiskTrial): Finding[] {
  const network = networkProblem(path);
  return [
    checkRoom(path, trial),
    ...(network === undefined ? [] : [note('disk', network.message, network.advice)]),
  ];
}

function checkRoom(path: string, trial: DiskTrial): Finding {
  if (trial === 'noAnswer') {
    return problem(
      'disk',
      `the disk of the file has not ended a write within ${ANSWER_TIMEOUT_MS / 1000} s: nothing in the file was checked`,
      'see what the kernel says of the disk (dmesg): until it answers, writes wait, and then get 503',
    );
  }
  const { bavail, bsize, files, ffree } = statfsSync(dirname(path));
  const freeBytes = bavail * bsize;
  const fileBytes = statSync(path).size;
  const message = `${formatBytes(freeBytes)} are free on the disk of the file, which has ${formatBytes(fileBytes)}`;
  if (isOnReadOnlyFileSystem(path)) {
    return problem(
      'disk',
      'the file system is read-only: it was mounted so, or an error has made it so',
      'see what the kernel says of it (dmesg), repair and remount it: until then davit answers 503 and starts nothing',
    );
  }
  // Before the free space, which is of no use without inodes.
  if (files > 0 && ffree < FILES_BESIDE) {
    const many = ffree === 0 ? 'no further file' : `only ${counted(ffree, 'further file')}`;
    return problem(
      'disk',
      `${many} can be created on the disk of the file`,
      'remove files that nobody needs, however small',
    );
  }
  if (freeBytes < DISK_LOW_BYTES) {
    return problem('disk', message, 'make room: when it is full davit answers 503 and starts nothing');
  }
  if (trial !== undefined) {
    return problem(
      'disk',
      `nothing can be written to the disk of the file (${trial}), though ${formatBytes(freeBytes)} are free there`,
      trial === 'EIO'
        ? 'usually the disk fails: see what the kernel says of it (dmesg), and copy the file to another one (davit backup)'
        : 'usually a quota is used up: see quota and repquota; until there is room davit answers 503 and starts nothing',
    );
  }
  if (freeBytes < fileBytes) return note('disk', message, 'a copy of it needs another disk');
  return ok('disk', message);
}

/** More than a start needs; a quota with less left is used up by the next deployments. */
const TRIED_BYTES = 64 * 1024;
/** A flag of open(2) that Node does not name: a file without a name. */
const O_TMPFILE = 0o20000000 | constants.O_DIRECTORY;
/** A sleeping disk needs some seconds to spin up, and a busy one may take as many for a write. */
const ANSWER_TIMEOUT_MS = 10_000;

const REFUSALS = ['EDQUOT', 'ENOSPC', 'EIO'] as const;

/**
 * Tries a write to the disk of the file `path`; does not reject, and resolves in time. Only as the owner of the file, as
 * other users have other quotas, and root has none.
 */
export async function tryDisk(
  path: string,
  effects: Effects,
  write: (directory: string) => Promise<void> = writeUnnamed,
): Promise<DiskTrial> {
  if (statSync(path).uid !== process.geteuid?.()) return undefined;
  const written = write(dirname(path)).then(
    () => undefined,
    // Others, such as that of a file system without O_TMPFILE, say nothing.
    (error) => REFUSALS.find((code) => code === codeOf(error)),
  );
  return Promise.race([written, delay(ANSWER_TIMEOUT_MS, effects).then(() => 'noAnswer' as const)]);
}

/** In libuv's threads: a call that hangs would hold up all of davit. */
async function writeUnnamed(directory: string): Promise<void> {
  await using file = await open(directory, O_TMPFILE | constants.O_RDWR, 0o600);
  await file.writeFile(Buffer.alloc(TRIED_BYTES));
  await file.sync();
}
