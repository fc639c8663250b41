import { closeSync, fchmodSync } from 'node:fs';
import type { Effects } from '../effects.ts';
import { codeOf, messageOf, SHORTAGES } from '../errors.ts';
import { retryOnShortage } from '../proc.ts';
import { type ProcessIdentity, processIdentity } from '../process-identity.ts';
import { createSemaphore } from '../semaphore.ts';
import { whyNotFound, whyNotStarted } from './command-file.ts';
import { findCommand, type SpawnRequest } from './command-path.ts';
import { raiseOomScoreOf, withRaisedOomScore } from './oom-score.ts';
import { createPipeReader, type PipeReading } from './pipes.ts';
import type { Posix, ProcessEnd } from './posix.ts';
import { signal } from './signals.ts';

type SpawnResult = StartedProcess | NotStarted | Shortage;

/** `cause` is a sentence for whoever configured the command. */
export interface NotStarted {
  kind: 'notStarted';
  cause: string;
}

/** A command that was not started for a shortage, which may be over soon: see SHORTAGES. */
export interface Shortage {
  kind: 'shortage';
  cause: string;
}

export interface StartedProcess {
  kind: 'started';
  identity: ProcessIdentity;
  /** Reads what the command prints, stdout and stderr in their true order; to be called once. */
  readOutput(onBytes: (bytes: Uint8Array) => Promise<void>): PipeReading;
  ended: Promise<ProcessEnd>;
}

export interface Spawner {
  /**
   * Starts a command in a session of its own, with stdin from /dev/null and stdout and stderr to one pipe. `isWanted`
   * is called just before the start; when it says no, nothing is started.
   */
  spawn(request: SpawnRequest, isWanted?: () => boolean): Promise<SpawnResult>;
  /** Starts no more commands. Those that run go on, and how they end is not reported. */
  close(): void;
}

/** A start may block one of libuv's threads on a hanging file system; others must be left, for resolving names too. */
const STARTING_MAX = 16;

/**
 * For so long, orphans are reaped in one turn of the event loop, some 10 µs each, as a command may leave them faster than
 * they are reaped. Not a number of them: where turns are long, zombies would remain until there are no process ids left.
 */
const REAPING_MAX_MS = 10;

/**
 * Starts commands, and reports how they end. `adopts`: orphans are reparented to this process (it is a subreaper, or
 * process 1), so it reaps every child of its main thread. Nothing may use Node's child_process meanwhile, which would
 * miss the ends of its own.
 */
export function createSpawner(posix: Posix, effects: Effects, adopts: boolean): Spawner {
  const reader = createPipeReader(effects);
  const running = new Map<number, (end: ProcessEnd) => void>();
  const starting = createSemaphore(STARTING_MAX);
  /** When the orphans that are left are to wait for the next turn; undefined: none was reaped in this one. */
  let reapingUntilMs: number | undefined;
  let closed = false;

  // One signal may stand for several ends.
  process.on('SIGCHLD', reapAll);
  return { spawn, close };

  async function spawn(request: SpawnRequest, isWanted = () => true): Promise<SpawnResult> {
    // No await if there is room: of several claims in one commit, the first then starts while the second is prepared,
    // which gives 7 % more commands.
    if (!starting.tryAcquire()) await starting.acquire();
    try {
      // Nor here, unless PATH has to be searched.
      const found = findCommand(request);
      const path = typeof found === 'string' ? found : await found;
      if (closed) return { kind: 'notStarted', cause: 'davit is shutting down' };
      if (!isWanted()) return { kind: 'notStarted', cause: 'it is no longer wanted' };
      return await start(path, request);
    } catch (error) {
      return notStarted(codeOf(error), messageOf(error));
    } finally {
      starting.release();
    }
  }

  async function start(path: string | undefined, request: SpawnRequest): Promise<SpawnResult> {
    if (path === undefined) return { kind: 'notStarted', cause: whyNotFound(request) };
    const { command, environment, directory } = request;
    const pipe = posix.pipe();
    let isRead = false;
    try {
      // So that a command that becomes another user can reopen /dev/stdout. No other process can reach the pipe.
      fchmodSync(pipe, 0o622);
      const program = { path, arguments: command, environment, directory, output: pipe };
      const spawned = await withRaisedOomScore(() => posix.spawn(program));
      if ('code' in spawned) return notStarted(spawned.code, whyNotStarted(spawned.code, request));
      const { processId } = spawned;
      raiseOomScoreOf(processId);
      // It has not been reaped, so the id is still its own, even if it has exited.
      const identity = await identityOrKill(processId);
      const ended = new Promise<ProcessEnd>((resolve) => running.set(processId, resolve));
      reap(processId);
      if (identity === undefined) {
        return { kind: 'notStarted', cause: whyNotStarted('hidden in /proc', request) };
      }
      isRead = true;
      return {
        kind: 'started',
        identity,
        readOutput: (onBytes) => reader.read(pipe, onBytes),
        ended,
      };
    } finally {
      if (!isRead) closeSync(pipe);
    }
  }

  /**
   * Kills the process, if davit may, when /proc does not show it (mounted with hidepid): without its start time it could
   * not be told later from another process with the same id.
   */
  async function identityOrKill(processId: number): Promise<ProcessIdentity | undefined> {
    let identity: ProcessIdentity | undefined;
    try {
      identity = await retryOnShortage(() => processIdentity(processId), effects);
      return identity;
    } finally {
      if (identity === undefined) signal(-processId, 'SIGKILL');
    }
  }

  function reapAll(): void {
    for (const processId of running.keys()) reap(processId);
    reapAdopted();
  }

  function reapAdopted(): void {
    if (!adopts || closed) return;
    while (reapingUntilMs === undefined || effects.monotonicMs() < reapingUntilMs) {
      const id = posix.zombieChild();
      if (id === undefined) return;
      if (reapingUntilMs === undefined) {
        reapingUntilMs = effects.monotonicMs() + REAPING_MAX_MS;
        setImmediate(reapMore);
      }
      reap(id);
    }
  }

  function reapMore(): void {
    reapingUntilMs = undefined;
    reapAdopted();
  }

  function reap(processId: number): void {
    const end = posix.reap(processId);
    if (end === undefined) return;
    running.get(processId)?.(end);
    running.delete(processId);
  }

  function close(): void {
    closed = true;
    process.off('SIGCHLD', reapAll);
    reader.close();
  }
}

/** `code` is the system's error code. */
export function notStarted(code: string, cause: string): NotStarted | Shortage {
  return { kind: SHORTAGES.has(code) ? 'shortage' : 'notStarted', cause };
}
