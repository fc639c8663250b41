import { access } from 'node:fs/promises';
import { textOf } from './paths.ts';
import { processIds, readProc } from './proc.ts';

/** How many file descriptors this process may have; Infinity: no limit, or it cannot be read. */
export function openFilesMax(): number {
  return limitOf('open files');
}

/** How many file descriptors davit needs for itself, before any request, command or delivery. */
const OPEN_WHEN_IDLE = 67;
/**
 * Half of the descriptors are for the API's connections. The others must do for davit itself, 256 attempts, 16 pings,
 * 32 connections for metrics, and 100 pipes that daemons may keep open.
 */
const OWN_FILES = OPEN_WHEN_IDLE + 256 + 16 + 32 + 100;
/** A command's pipe, and what is open briefly while it starts. */
const FILES_OF_COMMAND = 2;

function filesNeeded(maxConcurrent: number): number {
  return OWN_FILES + FILES_OF_COMMAND * maxConcurrent;
}

/**
 * How many idle connections to receivers may be kept: only descriptors that nothing else may need are used for them.
 */
export function spareFiles(maxConcurrent: number): number {
  return Math.max(0, openFilesMax() / 2 - filesNeeded(maxConcurrent));
}

/** Says that davit cannot start with so few file descriptors, and what to do; undefined: there are enough to start. */
export function ownFilesProblem(maxConcurrent: number): string | undefined {
  return openFilesMax() >= OPEN_WHEN_IDLE
    ? undefined
    : tooFewFiles(`davit has ${OPEN_WHEN_IDLE} open itself`, maxConcurrent);
}

/** Says that work may fail for want of file descriptors under load, and what to do; undefined: there are enough. */
export function openFilesProblem(maxConcurrent: number): string | undefined {
  return openFilesMax() >= 2 * filesNeeded(maxConcurrent)
    ? undefined
    : tooFewFiles('under load deployments and deliveries may fail for want of them', maxConcurrent);
}

function tooFewFiles(effect: string, maxConcurrent: number): string {
  const needed = 2 * filesNeeded(maxConcurrent);
  return `only ${openFilesMax()} files may be open: ${effect}; allow ${needed} (ulimit -n, LimitNOFILE= of systemd)`;
}

/**
 * V8 and the threads reserve far more memory than they use: 3.7 GB, of which all but 0.8 GB count as data. These limits
 * leave room for more.
 */
const RESERVED = [
  { limit: 'address space', of: 'address space', bytes: 5_000_000_000, setting: 'ulimit -v, LimitAS=' },
  { limit: 'data size', of: 'data', bytes: 3_500_000_000, setting: 'ulimit -d, LimitDATA=' },
];

/** Says that V8 would abort davit for want of memory that it may reserve, and what to do; undefined: there is enough. */
export function reservedMemoryProblem(): string | undefined {
  const lacking = RESERVED.find(({ limit, bytes }) => limitOf(limit) < bytes);
  if (lacking === undefined) return undefined;
  const { limit, of, bytes, setting } = lacking;
  return (
    `only ${limitOf(limit)} bytes of ${of} are allowed, and davit reserves more, most of which it never uses: allow ` +
    `${bytes} (${setting} of systemd), and limit its memory otherwise (MemoryMax= of systemd, --memory of a container)`
  );
}

/** Says that writes will fail once a file has reached the limit for files; undefined: there is none. */
export function fileSizeProblem(): string | undefined {
  const bytes = limitOf('file size');
  if (bytes === Number.POSITIVE_INFINITY) return undefined;
  return (
    `files may have only ${bytes} bytes: writes fail once the database or its -wal needs more; allow any size (ulimit -f, ` +
    'LimitFSIZE= of systemd)'
  );
}

const POOL_THREADS_MAX = 64;
const POOL_THREADS_MIN = 4;
/** The largest share of the processes and threads that may still be started; the rest is for commands. */
const POOL_SHARE = 1 / 4;

/**
 * The size of libuv's thread pool. If the pool cannot start all of its threads when it is first used, it aborts davit
 * without a message.
 */
export function poolThreads(): number {
  return Math.max(POOL_THREADS_MIN, Math.min(POOL_THREADS_MAX, Math.floor(processesLeft() * POOL_SHARE)));
}

/** How many names libuv looks up at a time: these use half of the pool at most. Call it before the pool is started. */
export function lookupThreads(): number {
  return Math.ceil(poolThreads() / 2);
}

/**
 * Starts libuv's thread pool, to be called once `processesProblem` has found none: later, when commands may have used up
 * what is allowed, its first use would abort davit.
 */
export async function startPool(): Promise<void> {
  await access('/');
}

/** davit's three worker threads, libuv's pool, and a command. */
const PROCESSES_NEEDED = 3 + POOL_THREADS_MIN + 1;

/** Says that davit would soon abort for want of threads, and what to do; undefined: there are enough. */
export function processesProblem(): string | undefined {
  const left = processesLeft();
  if (left >= PROCESSES_NEEDED) return undefined;
  return (
    `only ${Math.max(0, left)} more processes and threads may be started: allow ${PROCESSES_NEEDED}, and some for each ` +
    'command (ulimit -u, TasksMax= of systemd, --pids-limit of a container)'
  );
}

/** With a limit above this, threads are not counted: nobody comes near it, and counting reads every process. */
const COUNTED_BELOW = 2_048;

/** How many more processes and threads may be started, by the limits of this user and of its cgroups. */
export function processesLeft(): number {
  const allowed = limitOf('processes');
  // The limit does not apply to root, setrlimit(2).
  const used = allowed < COUNTED_BELOW && process.getuid?.() !== 0 ? threadsOfUser() : 0;
  return Math.min(allowed - used, ...leftInCgroups());
}

function threadsOfUser(): number {
  const ofUser = new RegExp(`^Uid:\\s+${process.getuid?.()}\\s`, 'm');
  return processIds()
    .map((processId) => readProc(`/proc/${processId}/status`) ?? '')
    .filter((status) => ofUser.test(status))
    .reduce((sum, status) => sum + Number(/^Threads:\s+(\d+)/m.exec(status)?.[1] ?? 1), 0);
}

/** Of cgroup version 2 and version 1, cgroups(7). */
const CGROUP_FOLDERS = ['/sys/fs/cgroup', '/sys/fs/cgroup/pids'];

/** By `pids.max` of this process's cgroup and of the root directory, where a container may see its own cgroup. */
function leftInCgroups(): number[] {
  const own = [...textOf('/proc/self/cgroup').matchAll(/^\d+:(?:pids)?:(\/.*)$/gm)].map(([, path]) => path);
  return CGROUP_FOLDERS.flatMap((folder) =>
    ['', ...own].map((path) => {
      const max = numberOf(textOf(`${folder}${path}/pids.max`).trim());
      return max === Number.POSITIVE_INFINITY ? max : max - Number(textOf(`${folder}${path}/pids.current`));
    }),
  );
}

/** A soft limit of this process, proc_pid_limits(5). */
function limitOf(name: string): number {
  const limits = readProc('/proc/self/limits') ?? '';
  return numberOf(new RegExp(`^Max ${name} +(\\d+)`, 'm').exec(limits)?.[1] ?? '');
}

/** Infinity for `max` or `unlimited`, and where nothing could be read. */
function numberOf(text: string): number {
  return /^\d+$/.test(text) ? Number(text) : Number.POSITIVE_INFINITY;
}
