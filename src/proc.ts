import { closeSync, lstatSync, openSync, readdirSync, readlinkSync, readSync, statSync } from 'node:fs';
import { BOOT_ID_PATH, hasBootId } from './boot-id.ts';
import { delay, type Effects } from './effects.ts';
import { AppError, codeOf, SHORTAGES } from './errors.ts';

/*
 * Which processes run is read from /proc. A lack of file descriptors must not make it look empty: a spare one is kept
 * open, to be closed for a read that would fail otherwise.
 */
let spare: number | undefined;

/**
 * Throws AppError `conflict` unless /proc belongs to the PID namespace of this process, pid_namespaces(7), and shows
 * the boot id. With the process ids of another namespace the wrong processes would be taken for commands, and killed.
 */
export function requireOwnProc(): void {
  const self = selfInProc();
  if (self !== process.pid) {
    throw new AppError(
      'conflict',
      self === undefined
        ? '/proc does not show this process, and davit finds its commands there: mount /proc in the PID namespace of davit'
        : `/proc is that of another PID namespace, where davit is process ${self} in place of ${process.pid}: mount its own ` +
            'there (unshare has --mount-proc)',
    );
  }
  if (!hasBootId()) {
    throw new AppError(
      'conflict',
      `${BOOT_ID_PATH} is not there, and davit tells its commands apart by it: mount all of /proc (without subset=pid, ` +
        'which ProcSubset= of systemd sets)',
    );
  }
}

/** A message saying that /proc hides the processes of other users, and what follows; undefined: it does not. */
export function hiddenProcessesProblem(): string | undefined {
  if (readProc('/proc/1/stat') !== undefined) return undefined;
  return (
    'the processes of other users are hidden in /proc (hidepid): what a command starts as another user, with sudo for ' +
    'instance, is neither found nor ended; let the group of davit see them (gid= of /proc)'
  );
}

function selfInProc(): number | undefined {
  try {
    return Number(readlinkSync('/proc/self'));
  } catch {
    return undefined;
  }
}

/** The ids of all processes, this one included. */
export function processIds(): number[] {
  return withSpare(() => readdirSync('/proc'))
    .map(Number)
    .filter(Number.isInteger);
}

/** The id that was given out last, to a process or a thread: the fifth field of /proc/loadavg, proc_loadavg(5). */
export function newestId(): number | undefined {
  const fields = readProc('/proc/loadavg')?.trim().split(' ');
  return fields && Number(fields[4]);
}

/** The ids of a process's threads; none when it is gone or another user's. */
export function threadIds(processId: number): string[] {
  return unlessGone(() => readdirSync(`/proc/${processId}/task`)) ?? [];
}

/**
 * A file below /proc as latin1; undefined when its process is gone or another user's. Throws the system's error if it
 * cannot tell. `maxBytes`: at most 64 KiB more are read; for files whose length a process of anybody chooses.
 */
export function readProc(path: string, maxBytes = Number.POSITIVE_INFINITY): string | undefined {
  return unlessGone(() => readText(path, maxBytes));
}

/**
 * The environment of a process or a thread, by its folder in /proc, as far as execve(2) can have given it; undefined as
 * above. Anybody's process may show all of its memory there, prctl(2): 1.5 GiB, which took it none, held davit up for 20 s.
 */
export function readEnvironment(folder: string): string | undefined {
  return readProc(`${folder}/environ`, ENVIRONMENT_MAX_BYTES);
}

/** For the arguments and the environment together: three quarters of 8 MiB, execve(2). */
const ENVIRONMENT_MAX_BYTES = 6 * 1024 * 1024;

/**
 * Whether an orphan lives that was reparented to this process; true also if that cannot be known. Orphans are children
 * of the main thread, and commands are children of the threads that started them, proc_tid_children(5).
 */
export function hasOrphans(): boolean {
  try {
    childrenFile ??= openSync(CHILDREN, 'r');
    return readSync(childrenFile, scratch, 0, 1, 0) > 0;
  } catch {
    return true;
  }
}

/** Kept open, as `hasOrphans` is asked before each command. */
let childrenFile: number | undefined;
const CHILDREN = `/proc/self/task/${process.pid}/children`;

/**
 * The children of the main thread: reparented orphans, and those that this process had when davit was executed in it.
 */
export function childrenOfMainThread(): number[] {
  return (readProc(CHILDREN) ?? '').split(' ').filter(Boolean).map(Number);
}

/**
 * The paths of what a process has open, proc_pid_fd(5), but for those that are too long to be used; none when it is gone
 * or another user's. Throws the system's error if it cannot tell.
 */
export function openFilesOf(processId: number): string[] {
  // A file that was closed meanwhile is left out.
  return descriptorsOf(processId).flatMap((link) => unlessGone(() => readlinkSync(link)) ?? []);
}

/**
 * Whether a process has one of these very files open for reading or writing. A place in the file system alone, O_PATH of
 * open(2), needs no right to the file.
 */
export function hasOpened(
  processId: number,
  files: readonly { dev: number | undefined; ino: number | undefined }[],
): boolean {
  return descriptorsOf(processId).some((link) => {
    try {
      const { dev, ino } = statSync(link);
      const isOneOfThem = files.some((file) => file.dev === dev && file.ino === ino);
      // The link has the mode of the descriptor.
      return isOneOfThem && (lstatSync(link).mode & 0o600) !== 0;
    } catch {
      return false; // closed meanwhile, or on a file system that fails: it may be any user's
    }
  });
}

/** The links to what a process has open. */
function descriptorsOf(processId: number): string[] {
  const folder = `/proc/${processId}/fd`;
  return (unlessGone(() => readdirSync(folder)) ?? []).map((name) => `${folder}/${name}`);
}

/** The other processes that have a file of this path open, as far as this user may look. */
export function holdersOf(path: string): number[] {
  return processIds().filter(
    (processId) => processId !== process.pid && openFilesOf(processId).includes(path),
  );
}

/**
 * What `read` finds in /proc. It is called again as long as it fails for lack of descriptors or memory, which must not
 * make a process look gone.
 */
export async function retryOnShortage<Result>(
  read: () => Result | Promise<Result>,
  effects: Effects,
): Promise<Result> {
  for (;;) {
    try {
      return await read();
    } catch (error) {
      if (!SHORTAGES.has(codeOf(error))) throw error;
    }
    await delay(RETRY_MS, effects);
  }
}

const RETRY_MS = 100;

function unlessGone<Result>(read: () => Result): Result | undefined {
  try {
    return withSpare(read);
  } catch (error) {
    if (GONE_OR_HIDDEN.has(codeOf(error))) return undefined;
    throw error;
  }
}

/** The last is for a file below more directories than a path can name: anybody may have one open. */
const GONE_OR_HIDDEN = new Set(['ENOENT', 'ESRCH', 'EACCES', 'EPERM', 'ENAMETOOLONG']);

const scratch = Buffer.allocUnsafe(64 * 1024);

function readText(path: string, maxBytes: number): string {
  const descriptor = openSync(path, 'r');
  try {
    let text = '';
    let length = 0;
    // One read(2) of a list such as /proc/locks gives a page of it at most.
    while (text.length + length < maxBytes) {
      const readBytes = readSync(descriptor, scratch, length, scratch.length - length, null);
      if (readBytes === 0) break;
      length += readBytes;
      if (length < scratch.length) continue;
      text += scratch.toString('latin1');
      length = 0;
    }
    return text + scratch.toString('latin1', 0, length);
  } finally {
    closeSync(descriptor);
  }
}

/** What `read` returns. It is called again with the spare descriptor closed if it lacks one. */
export function withSpare<Result>(read: () => Result): Result {
  spare ??= openSpare();
  try {
    return read();
  } catch (error) {
    if (codeOf(error) !== 'EMFILE' || spare === undefined) throw error;
    closeSync(spare);
    try {
      return read();
    } finally {
      spare = openSpare();
    }
  }
}

function openSpare(): number | undefined {
  try {
    return openSync('/dev/null', 'r');
  } catch {
    return undefined;
  }
}
