/** Every error code, with its HTTP status. */
export const STATUS_OF_CODE = {
  invalid_request: 400,
  unauthorized: 401,
  forbidden: 403,
  not_found: 404,
  method_not_allowed: 405,
  request_timeout: 408,
  conflict: 409,
  payload_too_large: 413,
  unsupported_media_type: 415,
  idempotency_key_reused: 422,
  rate_limited: 429,
  headers_too_large: 431,
  internal_error: 500,
  unavailable: 503,
} as const;

export type ErrorCode = keyof typeof STATUS_OF_CODE;

/** One thing that is wrong with a request. `reason` never repeats the offending value. */
export interface ErrorDetail {
  in: 'body' | 'query' | 'path' | 'header';
  field: string;
  reason: string;
}

interface AppErrorOptions {
  details?: ErrorDetail[];
  /** Whole seconds, at least 1; only with `rate_limited` and `unavailable`. */
  retryAfterSeconds?: number | undefined;
  cause?: unknown;
}

/** The message of whatever was thrown. */
export function messageOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  const known = 'errno' in error ? UNNAMED.get(error.errno) : undefined;
  return known === undefined
    ? error.message
    : error.message.replace(UNNAMED_MESSAGE, `${known.name}: ${known.text}`);
}

/** The error's code, `ENOENT` for instance; its text if it has none. */
export function codeOf(error: unknown): string {
  if (!(error instanceof Error && 'code' in error)) return String(error);
  const known = 'errno' in error ? UNNAMED.get(error.errno) : undefined;
  return known?.name ?? String(error.code);
}

/**
 * The codes of what the machine has too little of at the moment, and may have again without anybody's doing: processes,
 * memory, open files, room on a disk. Not those of a disk or a server that fails, such as EIO or ETIMEDOUT: nobody knows
 * whether that passes, and in a project's directory it would hold up all other projects.
 */
export const SHORTAGES: ReadonlySet<string> = new Set([
  'EAGAIN',
  'ENOMEM',
  'EMFILE',
  'ENFILE',
  'ENOSPC',
  'EDQUOT',
]);

/** SQLite tells a quota and a limit on the size of files no more than a disk that fails. */
const UNKNOWN_LIMIT =
  'a quota is used up, the size of files is limited, by ulimit -f perhaps, or the disk fails';

/**
 * Why a file cannot be written for want of room, by the system's or SQLite's code of the error; null: the disk is full.
 */
export const NO_ROOM: ReadonlyMap<string, string | null> = new Map([
  ['ENOSPC', null],
  ['EDQUOT', 'a quota is used up'],
  ['EFBIG', 'the size of files is limited, by ulimit -f perhaps'],
  ['SQLITE_FULL', null],
  ['SQLITE_IOERR_WRITE', UNKNOWN_LIMIT],
  ['SQLITE_IOERR_FSYNC', UNKNOWN_LIMIT],
]);

/** What libuv has no name for, by its numbers: errno(3), negative. */
const UNNAMED = new Map<unknown, { name: string; text: string }>([
  [-116, { name: 'ESTALE', text: 'stale file handle' }],
  [-117, { name: 'EUCLEAN', text: 'structure needs cleaning' }],
  [-122, { name: 'EDQUOT', text: 'disk quota exceeded' }],
]);

/** How Node's messages begin for them: some of its synchronous calls, such as `writeSync`, do not even tell the number. */
const UNNAMED_MESSAGE = /^(?:UNKNOWN: unknown error|(Unknown system error -\d+): \1)/;

/** Whether the same operation may succeed later: most often the disk is full or cannot be read. */
export function isUnavailable(error: unknown): boolean {
  return (error instanceof AppError && error.code === 'unavailable') || isStorageProblem(error);
}

/** Whether SQLite failed because of the disk, a lock or the file. Every other error of SQLite is a bug. */
export function isStorageProblem(error: unknown): boolean {
  return /^SQLITE_(FULL|IOERR|NOMEM|BUSY|READONLY|CANTOPEN|LOCKED|PROTOCOL|CORRUPT|NOTADB)/.test(
    codeOf(error),
  );
}

/**
 * An expected failure, for a user to read: `message` says what was wrong and what to do, without secrets or the
 * offending value. Any other error is a bug, and is answered with `internal_error`.
 */
export class AppError extends Error {
  override readonly name = 'AppError';
  readonly code: ErrorCode;
  readonly details: ErrorDetail[];
  readonly retryAfterSeconds: number | undefined;

  constructor(code: ErrorCode, message: string, options: AppErrorOptions = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.code = code;
    this.details = options.details ?? [];
    this.retryAfterSeconds = options.retryAfterSeconds;
  }
}

/** The error for a secret that belongs to no key, or to one that is expired or revoked. */
export function wrongKey(): AppError {
  return new AppError('unauthorized', 'this API key is wrong, expired or revoked');
}

/** The error for a read that failed because of the disk, a lock or the file. */
export function unreadable(): AppError {
  return new AppError('unavailable', 'the database cannot be read at the moment: try again shortly', {
    retryAfterSeconds: 5,
  });
}

/** The error for one invalid field of a request. `reason` follows the field's name, and never repeats the value. */
export function invalid(place: ErrorDetail['in'], field: string, reason: string): AppError {
  return new AppError('invalid_request', `${field}: ${reason}`, { details: [{ in: place, field, reason }] });
}
