import { statSync } from 'node:fs';
import { dirname } from 'node:path';
import type { Command } from 'commander';
import { codeOf, NO_ROOM } from '../errors.ts';
import { oneOf } from '../options.ts';
import type { FileCheck } from '../store/check.ts';
import type { CommandContext } from './command.ts';
import { problemText } from './error-text.ts';

/**
 * `copy`: a compact copy of a file that may be served. `adopt`: a copy of a backup, byte for byte. `migrate`: a file of an
 * older davit, in place.
 */
const JOBS = ['copy', 'adopt', 'migrate'] as const;
export type FileJob = (typeof JOBS)[number];
export type CopyJob = Exclude<FileJob, 'migrate'>;

/** For `migrate`, both paths are the file's. */
export interface FileJobOptions {
  from: string;
  to: string;
  /** Of the file to migrate: see `migrateFile`. */
  lastWrite?: string | undefined;
}

/** What the process prints to stdout, a line of JSON each. The last is `done`, `migrated`, `noRoom` or `failed`. */
export type FileMessage =
  | { kind: 'copying'; bytes: number }
  | { kind: 'migrating'; version: number }
  | { kind: 'checking' }
  | { kind: 'done'; check: FileCheck }
  | { kind: 'migrated' }
  /** `code`: the system's or SQLite's. `room`: the copy was not begun, as it needs more than there is. */
  | { kind: 'noRoom'; code: string; room?: Room }
  | { kind: 'failed'; message: string };

/** What must be left on a disk, and what is free there. */
interface Spare {
  spareBytes: number;
  freeBytes: number;
}

/** `neededBytes`: with `spareBytes`. */
export interface Room extends Spare {
  neededBytes: number;
}

/** How davit calls itself for this: see file-work.ts. Not for users. */
export const FILE_PROCESS = '__file';

/**
 * The process that copies, migrates and checks files for another davit. SQLite does each in calls that cannot be
 * interrupted: to stop at ^C, and to show progress, takes another process.
 */
export function defineFileProcess(command: Command, { terminal }: CommandContext): void {
  command
    .argument('<job>', '', oneOf(JOBS))
    .argument('<from>')
    .argument('<to>')
    .argument('<parent>', '', Number)
    .argument('[last-write]')
    .action(async (job: FileJob, from: string, to: string, parentProcessId: number, lastWrite?: string) => {
      const tell = (message: FileMessage) => terminal.print(JSON.stringify(message));
      const tellNext = (message: FileMessage) => {
        if (process.ppid !== parentProcessId) throw new Error('the davit that asked for this has ended');
        tell(message);
      };
      try {
        tell(await perform(job, { from, to, lastWrite }, parentProcessId, tellNext));
      } catch (error) {
        tell(failureOf(error));
      }
      if (job !== 'migrate' && process.ppid !== parentProcessId) await removeOrphan(to);
    });
}

async function perform(
  job: FileJob,
  { from, to, lastWrite }: FileJobOptions,
  parentProcessId: number,
  tell: (message: FileMessage) => void,
): Promise<FileMessage> {
  const onBegin = (bytes: number) => tell({ kind: 'copying', bytes });
  const onCopied = () => tell({ kind: 'checking' });
  switch (job) {
    case 'copy': {
      const [{ copyDatabase }, spare] = await Promise.all([
        import('../store/backup.ts'),
        spareOf(from, dirname(to), parentProcessId),
      ]);
      const onCopy = (bytes: number) => {
        if (spare !== undefined) refuseToTake(bytes, spare);
        onBegin(bytes);
      };
      return { kind: 'done', check: copyDatabase(from, to, { onBegin: onCopy, onCopied }) };
    }
    case 'adopt': {
      const { checkDatabase } = await import('../store/check.ts');
      const { adoptFile, adoptedBytes } = await import('../store/restore.ts');
      onBegin(adoptedBytes(from));
      adoptFile(from, to);
      onCopied();
      return { kind: 'done', check: checkDatabase(to) };
    }
    case 'migrate': {
      const { migrateFile } = await import('../store/migrations.ts');
      migrateFile(to, {
        lastWrite,
        onStep: (version) => tell(version === null ? { kind: 'checking' } : { kind: 'migrating', version }),
      });
      return { kind: 'migrated' };
    }
    default:
      return job satisfies never;
  }
}

/**
 * What must be left on the disk of a service that writes on, for its WAL, and what is free; undefined: the copy is made
 * on another disk, or of a file that is not served. There it may fill the disk: its size is known only roughly before.
 */
async function spareOf(from: string, directory: string, parentProcessId: number): Promise<Spare | undefined> {
  const [{ servedBy }, { freeBytesIn }, { CHECKPOINT_AT_BYTES }] = await Promise.all([
    import('../store/holder.ts'),
    import('../store/partial-file.ts'),
    import('../store/checkpoints.ts'),
  ]);
  const service = servedBy(from);
  // A service that migrates the file at its start has locked it, and has this copy made first.
  if (service === null || service.process_id === parentProcessId) return undefined;
  const freeBytes = statSync(from).dev === statSync(directory).dev ? freeBytesIn(directory) : undefined;
  return freeBytes === undefined ? undefined : { spareBytes: CHECKPOINT_AT_BYTES, freeBytes };
}

/** Throws NoRoom if a file of that size would leave less than `spareBytes`. */
function refuseToTake(bytes: number, { spareBytes, freeBytes }: Spare): void {
  const neededBytes = bytes + spareBytes;
  if (freeBytes < neededBytes) throw new NoRoom({ neededBytes, spareBytes, freeBytes });
}

class NoRoom extends Error {
  readonly room: Room;

  constructor(room: Room) {
    super('the copy needs more room than there is');
    this.room = room;
  }
}

function failureOf(error: unknown): FileMessage {
  const code = codeOf(error);
  if (error instanceof NoRoom) return { kind: 'noRoom', code: 'ENOSPC', room: error.room };
  if (NO_ROOM.has(code)) return { kind: 'noRoom', code };
  return { kind: 'failed', message: problemText(error) };
}

/** Removes the file in place of the davit that asked for it, which was killed. */
async function removeOrphan(path: string): Promise<void> {
  const { removePartial } = await import('../store/partial-file.ts');
  removePartial(path);
}
