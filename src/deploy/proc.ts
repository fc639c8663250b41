import { closeSync, openSync, readdirSync, readFileSync, readlinkSync, readSync } from 'node:fs';
import { BOOT_ID_PATH, hasBootId } from '../boot-id.ts';
import { delay, type Effects } from '../effects.ts';
import { AppError, codeOf } from '../errors.ts';

/*
 * Who runs is read from /proc. Where no more files may be open that must not look as if nobody did: one is kept open, to
 * be given up for that moment.
 */
let spare: number | undefined;

/**
 * Throws AppError `conflict` unless /proc tells of the PID namespace of this process: by the ids of another one commands
 * would be taken for others, and others ended in their place, pid_namespaces(7). And unless it tells of the boot too.
 */
export function requireOwnProc(): void {
  const self = selfInProc();
  if (self !== process.pid) {
    throw new AppError(
      'conflict',
      self === undefined
        ? '/proc does not show this process, and davit looks after its commands there: mount it in the PID namespace of davit'
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

/** That other users' processes are hidden from this one, and what follows; undefined: they are not. */
export function hiddenProcessesProblem(): string | undefined {
  if (process.getuid?.() === 0 || readProc('/proc/1/stat') !== undefined) return undefined;
  return (
    'the processes of other users are hidden in /proc (hidepid): whom a command starts as another user, with sudo for ' +
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

/** The ids of all processes, with this one. */
export function processIds(): number[] {
  return withSpare(() => readdirSync('/proc'))
    .map(Number)
    .filter(Number.isInteger);
}

/** The ids of a process's threads; none when it is gone or somebody else's. */
export function threadIds(processId: number): string[] {
  return unlessGone(() => readdirSync(`/proc/${processId}/task`)) ?? [];
}

/**
 * A file below /proc as latin1; undefined when its process is gone or somebody else's. Throws the system's error if
 * neither is known.
 */
export function readProc(path: string): string | undefined {
  return unlessGone(() => read(path));
}

/**
 * Whether somebody lives whom a child of this process left behind, for whoever adopts them; also where that cannot be known.
 * They are children of the main thread, and commands of the threads that started them, proc_tid_children(5).
 */
export function hasOrphans(): boolean {
  return readChildren() !== '';
}

/** The children of the main thread: those whom others left behind, and those whom this process had when it was executed. */
export function childrenOfMainThread(): number[] {
  return (readChildren() ?? '').split(' ').filter(Boolean).map(Number);
}

function readChildren(): string | undefined {
  return readProc(`/proc/self/task/${process.pid}/children`);
}

/**
 * The paths of what a process has open, proc_pid_fd(5); none when it is gone or somebody else's. Throws the system's error
 * if neither is known.
 */
export function openFilesOf(processId: number): string[] {
  const folder = `/proc/${processId}/fd`;
  const names = unlessGone(() => readdirSync(folder)) ?? [];
  // One that was closed since then says nothing of the others.
  return names.flatMap((name) => unlessGone(() => readlinkSync(`${folder}/${name}`)) ?? []);
}

/**
 * What `look` finds, once there are files and memory for it: for want of them nobody is taken for gone or given up. It is
 * begun anew until then.
 */
export async function untilSeen<Result>(
  look: () => Result | Promise<Result>,
  effects: Effects,
): Promise<Result> {
  for (;;) {
    try {
      return await look();
    } catch (error) {
      if (!SHORTAGES.has(codeOf(error))) throw error;
    }
    await delay(LOOK_AGAIN_MS, effects);
  }
}

const SHORTAGES = new Set(['EMFILE', 'ENFILE', 'ENOMEM']);
const LOOK_AGAIN_MS = 100;

function unlessGone<Result>(look: () => Result): Result | undefined {
  try {
    return withSpare(look);
  } catch (error) {
    if (GONE_OR_HIDDEN.has(codeOf(error))) return undefined;
    throw error;
  }
}

const GONE_OR_HIDDEN = new Set(['ENOENT', 'ESRCH', 'EACCES', 'EPERM']);

const scratch = Buffer.allocUnsafe(64 * 1024);

function read(path: string): string {
  const descriptor = openSync(path, 'r');
  try {
    const length = readSync(descriptor, scratch, 0, scratch.length, 0);
    if (length < scratch.length) return scratch.toString('latin1', 0, length);
  } finally {
    closeSync(descriptor);
  }
  return readFileSync(path, 'latin1');
}

function withSpare<Result>(look: () => Result): Result {
  spare ??= openSpare();
  try {
    return look();
  } catch (error) {
    if (codeOf(error) !== 'EMFILE' || spare === undefined) throw error;
    closeSync(spare);
    try {
      return look();
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
