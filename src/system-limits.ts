import { readdirSync, readFileSync } from 'node:fs';

/** How many files this process may have open; Infinity: any number, or it cannot be read. */
export function openFilesMax(): number {
  return limitOf('open files');
}

/** What davit has open itself, whatever it does. */
const OPEN_ITSELF = 67;
/**
 * Half of them are for the API's connections. Of the others davit has some open itself; 256 attempts, 16 pings and 32
 * connections for metrics may be under way, and 100 pipes be left to daemons.
 */
const OWN_FILES = OPEN_ITSELF + 256 + 16 + 32 + 100;
/** Its pipe, and what is open for a moment while it starts. */
const FILES_OF_COMMAND = 2;

function filesNeeded(maxConcurrent: number): number {
  return OWN_FILES + FILES_OF_COMMAND * maxConcurrent;
}

/** How many idle connections to receivers may be kept, which can be done without: files that nothing else may need. */
export function spareFiles(maxConcurrent: number): number {
  return Math.max(0, openFilesMax() / 2 - filesNeeded(maxConcurrent));
}

/** That davit could not begin for want of files, and what to do about it; undefined: it can. */
export function ownFilesProblem(maxConcurrent: number): string | undefined {
  return openFilesMax() >= OPEN_ITSELF
    ? undefined
    : fewFiles(`davit has ${OPEN_ITSELF} open itself`, maxConcurrent);
}

/** That deployments may fail for want of files, and what to do about it; undefined: there are enough. */
export function openFilesProblem(maxConcurrent: number): string | undefined {
  return openFilesMax() >= 2 * filesNeeded(maxConcurrent)
    ? undefined
    : fewFiles('under load deployments and deliveries may fail for want of them', maxConcurrent);
}

function fewFiles(effect: string, maxConcurrent: number): string {
  const needed = 2 * filesNeeded(maxConcurrent);
  return `only ${openFilesMax()} files may be open: ${effect}; allow ${needed} (ulimit -n, LimitNOFILE= of systemd)`;
}

const POOL_THREADS_MAX = 64;
const POOL_THREADS_MIN = 4;
/** Of the processes and threads that may still be, libuv's pool takes so many at most: the rest is for commands. */
const POOL_SHARE = 1 / 4;

/**
 * How many threads libuv's pool shall have. It ends davit, without a word and at its first use, where it cannot start
 * them all.
 */
export function poolThreads(): number {
  return Math.max(POOL_THREADS_MIN, Math.min(POOL_THREADS_MAX, Math.floor(processesLeft() * POOL_SHARE)));
}

/** Three threads of its own, libuv's pool, and a command. */
const PROCESSES_NEEDED = 3 + POOL_THREADS_MIN + 1;

/** That davit would soon end for want of threads, and what to do about it; undefined: there are enough. */
export function processesProblem(): string | undefined {
  const left = processesLeft();
  if (left >= PROCESSES_NEEDED) return undefined;
  return (
    `only ${Math.max(0, left)} more processes and threads may be started: allow ${PROCESSES_NEEDED}, and some for each ` +
    'command (ulimit -u, TasksMax= of systemd, --pids-limit of a container)'
  );
}

/** Where more may be, nobody comes near: all processes would be looked at for nothing. */
const COUNTED_BELOW = 2_048;

/** How many processes and threads may still be started: by this user, and in its cgroups. */
export function processesLeft(): number {
  const allowed = limitOf('processes');
  // setrlimit(2): root has no such limit, and whatever runs is his.
  const used = allowed < COUNTED_BELOW && process.getuid?.() !== 0 ? threadsOfUser() : 0;
  return Math.min(allowed - used, ...leftInCgroups());
}

function threadsOfUser(): number {
  const ofUser = new RegExp(`^Uid:\\s+${process.getuid?.()}\\s`, 'm');
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map((processId) => textOf(`/proc/${processId}/status`))
    .filter((status) => ofUser.test(status))
    .reduce((sum, status) => sum + Number(/^Threads:\s+(\d+)/m.exec(status)?.[1] ?? 1), 0);
}

/** Of version 2 and of version 1, cgroups(7). */
const CGROUP_FOLDERS = ['/sys/fs/cgroup', '/sys/fs/cgroup/pids'];

/** By `pids.max` where this process is, and at the top: there a container may see its own. */
function leftInCgroups(): number[] {
  const own = [...textOf('/proc/self/cgroup').matchAll(/^\d+:(?:pids)?:(\/.*)$/gm)].map(([, path]) => path);
  return CGROUP_FOLDERS.flatMap((folder) =>
    ['', ...own].map((path) => {
      const max = numberOf(textOf(`${folder}${path}/pids.max`).trim());
      return max === Number.POSITIVE_INFINITY ? max : max - Number(textOf(`${folder}${path}/pids.current`));
    }),
  );
}

/** A soft limit, proc_pid_limits(5). */
function limitOf(name: string): number {
  return numberOf(new RegExp(`^Max ${name} +(\\d+)`, 'm').exec(textOf('/proc/self/limits'))?.[1] ?? '');
}

/** Infinity for `max`, and where nothing could be read. */
function numberOf(text: string): number {
  return /^\d+$/.test(text) ? Number(text) : Number.POSITIVE_INFINITY;
}

function textOf(path: string): string {
  try {
    return readFileSync(path, 'latin1');
  } catch {
    return '';
  }
}
