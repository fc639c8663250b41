import { AppError, codeOf, isStorageProblem, messageOf } from '../errors.ts';
import { printable } from '../printable.ts';
import { withoutSecrets } from '../secrets.ts';

/** An error as one line; only a bug of davit comes with its stack. */
export function errorText(error: unknown): string {
  return `error: ${problemText(error)}`;
}

/** The same without `error: `. Escaped first, as a line end in a password would hide that it is one. */
export function problemText(error: unknown): string {
  if (error instanceof AppError) return withoutSecrets(printable(error.message));
  if (!(error instanceof Error)) return String(error);
  if ('syscall' in error && error.syscall === 'uv_cwd') {
    return 'the current directory was removed: change to another one, or give paths that begin with /';
  }
  // A system call failed, for a port or a file: the message says enough.
  if ('syscall' in error) return withoutSecrets(printable(messageOf(error)));
  if (isStorageProblem(error)) return storageText(error);
  return `davit failed, which is a bug: ${error.stack ?? error.message}`;
}

function storageText(error: Error): string {
  return codeOf(error).startsWith('SQLITE_BUSY')
    ? 'another process keeps the database locked: try again when it has ended'
    : `the database cannot be used (${printable(error.message)}): 'davit doctor' tells more`;
}
