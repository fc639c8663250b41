import { closeSync, constants as fileConstants } from 'node:fs';
import { constants as systemConstants } from 'node:os';
import { getSystemErrorName } from 'node:util';
import { type Declare, loadCLibrary } from '../libc.ts';

/** System calls that Node does not offer. */
export interface Posix {
  /**
   * The reading end of a new pipe, which never blocks; nobody has the other one open. Throws an Error with the system's
   * error code.
   */
  pipe(): number;
  /**
   * Starts a program in a session and a process group of its own, with stdin from /dev/null, no descriptors but 0 to 2,
   * and every signal at its default. Resolves to its process id, or to the system's error code, execve(2). Rejects with
   * an Error that has one if the start could not even be prepared.
   */
  spawn(program: Program): Promise<{ processId: number } | { code: string }>;
  /** Reaps a child and says how it ended, after which its id may be reused; undefined: it has not ended. */
  reap(processId: number): ProcessEnd | undefined;
  /**
   * The id of some child of this thread that has ended; it stays a zombie. Undefined: there is none. Those that `spawn`
   * has started are children of other threads.
   */
  zombieChild(): number | undefined;
  /**
   * Makes this process a subreaper, prctl(2): orphans among its descendants become its children, which it has to reap.
   * Whether the system does that.
   */
  becomeSubreaper(): boolean;
}

interface Program {
  /** Relative to `directory`, if it does not begin with a slash. */
  path: string;
  /** From argv[0] on. */
  arguments: readonly string[];
  /** The whole of it. */
  environment: Readonly<Record<string, string>>;
  directory: string;
  /** The reading end of the pipe to which its stdout and stderr write. */
  output: number;
}

export type ProcessEnd = { kind: 'exited'; exitCode: number } | { kind: 'signalled'; signal: string };

/**
 * Loads the functions from the C library. Node's spawn copies the page tables of this process while the event loop
 * waits: 1,200 commands a second at 50 MB resident, 90 at 300 MB. posix_spawn(3) copies nothing and starts 2,600 at
 * either size, 0.8 of what a loop in C does. It runs in libuv's threads, as execve(2) blocks on a file system that
 * hangs.
 */
export async function loadPosix(): Promise<Posix> {
  const { declare, lastError } = await loadCLibrary();
  // Results by an Int32Array, and without `...`, which Linux passes alike: with a cold cache, `_Out_ int *` took 6 µs
  // more for each call, and `...` 2.
  const pipe2 = declare('int pipe2(void *descriptors, int flags)');
  const prctl = declare('int prctl(int option, ...)');
  const waitpid = declare('int waitpid(int id, void *status, int options)');
  const waitid = declare('int waitid(int kind, int id, void *information, int options)');
  const spawnProgram = declare(
    'int posix_spawn(_Out_ int *id, str path, void *actions, void *attributes, const char **argv, const char **envp)',
  );
  const prepare = fileActions(declare);
  const attributes = spawnAttributes(declare);
  const descriptors = new Int32Array(2);
  const status = new Int32Array(1);
  const information = Buffer.alloc(SIGNAL_INFORMATION_BYTES);

  return { pipe, spawn, reap, zombieChild, becomeSubreaper };

  function pipe(): number {
    if (pipe2(descriptors, fileConstants.O_NONBLOCK | O_CLOEXEC) !== 0)
      throw systemError('pipe2', lastError());
    const [reader = -1, writer = -1] = descriptors;
    closeSync(writer);
    return reader;
  }

  async function spawn(program: Program): Promise<{ processId: number } | { code: string }> {
    const variables = Object.entries(program.environment).map(([name, value]) => `${name}=${value}`);
    const actions = prepare(program);
    try {
      const id: [number] = [0];
      const errorNumber = await new Promise<number>((resolve, reject) => {
        spawnProgram.async(
          id,
          program.path,
          actions.bytes,
          attributes,
          [...program.arguments, null],
          [...variables, null],
          (error: unknown, result: number) => (error ? reject(error) : resolve(result)),
        );
      });
      return errorNumber === 0 ? { processId: id[0] } : { code: getSystemErrorName(-errorNumber) };
    } finally {
      actions.free();
    }
  }

  function reap(processId: number): ProcessEnd | undefined {
    const result = waitpid(processId, status, WNOHANG);
    if (result === 0) return undefined;
    if (result !== processId) throw new Error(`waitpid: ${lastError()}`);
    const word = status[0] ?? 0;
    const signal = word & 0x7f;
    return signal === 0
      ? { kind: 'exited', exitCode: (word >> 8) & 0xff }
      : { kind: 'signalled', signal: signalName(signal) };
  }

  function zombieChild(): number | undefined {
    if (waitid(P_ALL, 0, information, WNOHANG | WEXITED | WNOWAIT | WNOTHREAD) !== 0) return undefined; // ECHILD
    const processId = information.readInt32LE(SIGNAL_INFORMATION_PROCESS_ID);
    return processId === 0 ? undefined : processId;
  }

  function becomeSubreaper(): boolean {
    return prctl(PR_SET_CHILD_SUBREAPER, 'unsigned long', 1) === 0;
  }
}

const O_CLOEXEC = 0o2000000;
const PR_SET_CHILD_SUBREAPER = 36;
const WNOHANG = 1;
const WEXITED = 4;
const WNOWAIT = 0x01000000;
const WNOTHREAD = 0x20000000;
const P_ALL = 0;
const POSIX_SPAWN_SETSIGDEF = 0x04;
const POSIX_SPAWN_SETSIGMASK = 0x08;
const POSIX_SPAWN_SETSID = 0x80;

/** Enough for each of the C library's opaque structures: the largest, posix_spawnattr_t, has 336. */
const STRUCTURE_BYTES = 512;
/** siginfo_t, and the offset of its si_pid on 64-bit machines. */
const SIGNAL_INFORMATION_BYTES = 128;
const SIGNAL_INFORMATION_PROCESS_ID = 16;
/** sigset_t */
const SIGNAL_SET_BYTES = 128;

/**
 * What happens between fork and exec: descriptors 0 to 2, and the working directory. The new process opens the end of its
 * pipe itself: of an end that davit had opened, others that are being started would hold copies, on a busy machine for
 * 3 ms of four pipes in ten. By `/proc/self`, which no capability or security module closes to the process itself.
 */
function fileActions(declare: Declare): (program: Program) => { bytes: Buffer; free(): void } {
  const init = declare('int posix_spawn_file_actions_init(void *actions)');
  const destroy = declare('int posix_spawn_file_actions_destroy(void *actions)');
  const changeDirectory = declare('int posix_spawn_file_actions_addchdir_np(void *actions, str path)');
  const duplicate = declare('int posix_spawn_file_actions_adddup2(void *actions, int from, int to)');
  const closeFrom = declare('int posix_spawn_file_actions_addclosefrom_np(void *actions, int first)');
  const open = declare(
    'int posix_spawn_file_actions_addopen(void *actions, int to, str path, int flags, int mode)',
  );
  return ({ directory, output }) => {
    const bytes = Buffer.allocUnsafe(STRUCTURE_BYTES);
    must(init(bytes));
    try {
      must(open(bytes, 0, '/dev/null', fileConstants.O_RDONLY, 0));
      must(open(bytes, 1, `/proc/self/fd/${output}`, fileConstants.O_WRONLY, 0));
      must(duplicate(bytes, 1, 2));
      must(closeFrom(bytes, 3));
      must(changeDirectory(bytes, directory));
    } catch (error) {
      destroy(bytes);
      throw error;
    }
    return { bytes, free: () => destroy(bytes) };
  };
}

/** The same for all programs: setsid(2), no signal blocked, and none ignored (Node ignores SIGPIPE). */
function spawnAttributes(declare: Declare): Buffer {
  const init = declare('int posix_spawnattr_init(void *attributes)');
  const setFlags = declare('int posix_spawnattr_setflags(void *attributes, short flags)');
  const setDefaults = declare('int posix_spawnattr_setsigdefault(void *attributes, void *signals)');
  const setMask = declare('int posix_spawnattr_setsigmask(void *attributes, void *signals)');
  const attributes = Buffer.alloc(STRUCTURE_BYTES);
  must(init(attributes));
  must(setFlags(attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK));
  must(setDefaults(attributes, Buffer.alloc(SIGNAL_SET_BYTES, 0xff)));
  must(setMask(attributes, Buffer.alloc(SIGNAL_SET_BYTES)));
  return attributes;
}

/** These calls fail only for lack of memory. */
function must(errorNumber: number): void {
  if (errorNumber !== 0) throw systemError('posix_spawn', getSystemErrorName(-errorNumber));
}

function systemError(call: string, code: string): Error {
  return Object.assign(new Error(`${call}: ${code}`), { code });
}

const SIGNAL_NAMES = new Map(
  // The first of two names is the usual one: SIGABRT before SIGIOT.
  Object.entries(systemConstants.signals)
    .reverse()
    .map(([name, number]) => [number as number, name]),
);

/** Real-time signals have numbers only. */
function signalName(number: number): string {
  return SIGNAL_NAMES.get(number) ?? `SIG${number}`;
}
