import { type Command, InvalidArgumentError } from 'commander';
import { AppError, type ErrorCode } from '../errors.ts';
import type { FileCheck } from '../store/backup.ts';
import { type CommandContext, errorText } from './command.ts';

/** `copy`: the file of a running service, compactly. `adopt`: a file that somebody kept, byte for byte. */
export type FileJob = 'copy' | 'adopt';

/** What the process tells on stdout, a line of JSON each. The last is `done`, `noRoom` or `failed`. */
export type FileMessage =
  | { kind: 'copying'; bytes: number }
  | { kind: 'checking' }
  | { kind: 'done'; check: FileCheck }
  | { kind: 'noRoom' }
  | { kind: 'failed'; code: ErrorCode | null; message: string };

/** How main.ts calls it. No user does. */
export const FILE_PROCESS = '__file';

/**
 * The process that copies and checks files for `davit backup` and `davit restore`. SQLite does either in one call
 * that nothing interrupts: what is to stop at a ^C, and to show how far it is, has to be another process.
 */
export function defineFileProcess(command: Command, { terminal }: CommandContext): void {
  command
    .argument('<job>', '', parseJob)
    .argument('<from>')
    .argument('<to>')
    .argument('<parent>', '', Number)
    .action(async (job: FileJob, from: string, to: string, parentProcessId: number) => {
      const tell = (message: FileMessage) => terminal.print(JSON.stringify(message));
      const progress = {
        onBegin: (bytes: number) => tell({ kind: 'copying', bytes }),
        onCopied() {
          if (process.ppid !== parentProcessId) throw new Error('nobody waits for this copy any more');
          tell({ kind: 'checking' });
        },
      };
      try {
        tell({ kind: 'done', check: await perform(job, from, to, progress) });
      } catch (error) {
        tell(failureOf(error));
      }
      if (process.ppid !== parentProcessId) await removeOrphan(to);
    });
}

async function perform(
  job: FileJob,
  from: string,
  to: string,
  progress: { onBegin(bytes: number): void; onCopied(): void },
): Promise<FileCheck> {
  const { checkDatabase, copyDatabase } = await import('../store/backup.ts');
  switch (job) {
    case 'copy':
      return copyDatabase(from, to, progress);
    case 'adopt': {
      const { adoptFile, adoptedBytes } = await import('../store/restore.ts');
      progress.onBegin(adoptedBytes(from));
      adoptFile(from, to);
      progress.onCopied();
      return checkDatabase(to);
    }
    default:
      return job satisfies never;
  }
}

function failureOf(error: unknown): FileMessage {
  const code = error instanceof Error && 'code' in error ? error.code : undefined;
  if (code === 'SQLITE_FULL' || code === 'ENOSPC' || code === 'EDQUOT') return { kind: 'noRoom' };
  if (error instanceof AppError) return { kind: 'failed', code: error.code, message: error.message };
  return { kind: 'failed', code: null, message: errorText(error) };
}

/** Who asked for the file was killed meanwhile, and cannot remove it any more. */
async function removeOrphan(path: string): Promise<void> {
  const { removePartial } = await import('../store/partial-file.ts');
  removePartial(path);
}

function parseJob(text: string): FileJob {
  if (text !== 'copy' && text !== 'adopt') throw new InvalidArgumentError('It must be copy or adopt.');
  return text;
}
