import { closeSync, fchmodSync } from 'node:fs';
import type { Effects } from '../effects.ts';
import { messageOf } from '../errors.ts';
import { createSemaphore } from '../semaphore.ts';
import type { ProcessIdentity } from '../store/deployments.ts';
import { findCommand, type SpawnRequest, whyNotStarted } from './command-file.ts';
import { withRaisedOomScore } from './oom-score.ts';
import { createPipeReader, type PipeReading } from './pipes.ts';
import type { Posix, ProcessEnd, Program } from './posix.ts';
import { childrenOfMainThread, untilSeen } from './proc.ts';
import { processIdentity, sessionOf } from './processes.ts';

export type SpawnResult = StartedProcess | { kind: 'notStarted'; cause: string } | { kind: 'unwanted' };

export interface StartedProcess {
  kind: 'started';
  identity: ProcessIdentity;
  /** Reads what it prints, stdout and stderr in their true order; to be called once. */
  readOutput(onBytes: (bytes: Uint8Array) => Promise<void>): PipeReading;
  ended: Promise<ProcessEnd>;
}

export interface Spawner {
  /**
   * Starts a command in a session of its own, stdin /dev/null, stdout and stderr one pipe. `isWanted` is asked
   * at the last moment whether it still is.
   */
  spawn(request: SpawnRequest, isWanted?: () => boolean): Promise<SpawnResult>;
  /** Starts nothing any more. What still runs goes on, and nobody hears how it ends. */
  close(): void;
}

/** Of libuv's threads, which resolve names too, only so many may wait for a file system that hangs. */
const STARTING_MAX = 16;

const NODE_TAKES_AT_MOST_MS = 1_000;

/**
 * Starts commands, and hears of their ends. `adopts`: this process is given the orphans of the others, and nobody else waits
 * for them.
 */
export function createSpawner(posix: Posix, effects: Effects, adopts: boolean): Spawner {
  const reader = createPipeReader(effects);
  const running = new Map<number, (end: ProcessEnd) => void>();
  const ownSession = sessionOf(process.pid);
  // Left to davit by what executed it, as the script of a container does: neither Node's nor a command.
  const inherited = new Set(adopts ? childrenOfMainThread() : []);
  const starting = createSemaphore(STARTING_MAX);
  let startsUnderWay = 0;
  /** Has ended, and may be Node's to wait for. While nobody does, the system tells of no other end. */
  let unclaimed: { processId: number; sinceMs: number } | undefined;
  let closed = false;

  // One signal may stand for several ends.
  process.on('SIGCHLD', lookAtAll);
  return { spawn, close };

  async function spawn(request: SpawnRequest, isWanted = () => true): Promise<SpawnResult> {
    // At once: of several claims of one commit the first then starts while the second is prepared. 7 % more commands.
    if (!starting.tryAcquire()) await starting.acquire();
    startsUnderWay += 1;
    try {
      // Without a pause where nothing is looked up.
      const found = findCommand(request);
      const path = typeof found === 'string' ? found : await found;
      if (closed) return { kind: 'notStarted', cause: 'davit is shutting down' };
      return isWanted() ? await start(path, request) : { kind: 'unwanted' };
    } catch (error) {
      return { kind: 'notStarted', cause: messageOf(error) };
    } finally {
      startsUnderWay -= 1;
      starting.release();
      waitForAdopted();
    }
  }

  async function start(path: string | undefined, request: SpawnRequest): Promise<SpawnResult> {
    if (path === undefined) return { kind: 'notStarted', cause: whyNotStarted('ENOENT', request) };
    const { command, environment, directory } = request;
    const pipe = posix.pipe();
    let isRead = false;
    try {
      const program = { path, arguments: command, environment, directory, output: pipe.writer };
      const spawned = await spawnWriting(program);
      if ('code' in spawned) return { kind: 'notStarted', cause: whyNotStarted(spawned.code, request) };
      const { processId } = spawned;
      // Nobody has waited for it, so the id is still its own, even if it has exited.
      const identity = await identityOrEnd(processId);
      const ended = new Promise<ProcessEnd>((resolve) => running.set(processId, resolve));
      look(processId);
      if (identity === undefined) {
        return { kind: 'notStarted', cause: whyNotStarted('hidden in /proc', request) };
      }
      isRead = true;
      return {
        kind: 'started',
        identity,
        readOutput: (onBytes) => reader.read(pipe.reader, onBytes),
        ended,
      };
    } finally {
      if (!isRead) closeSync(pipe.reader);
    }
  }

  /** Closes its output here: to look at the process takes a file, and with none to be had that would wait for ever. */
  async function spawnWriting(program: Program): ReturnType<Posix['spawn']> {
    try {
      // A command that becomes another user may open /dev/stdout anew; nobody else gets to it.
      fchmodSync(program.output, 0o622);
      return await withRaisedOomScore(() => posix.spawn(program));
    } finally {
      closeSync(program.output);
    }
  }

  /** Without its start time nobody could tell it from a stranger later (a /proc mounted with hidepid): then it is ended. */
  async function identityOrEnd(processId: number): Promise<ProcessIdentity | undefined> {
    let identity: ProcessIdentity | undefined;
    try {
      identity = await untilSeen(() => processIdentity(processId), effects);
      return identity;
    } finally {
      if (identity === undefined) process.kill(-processId, 'SIGKILL');
    }
  }

  function lookAtAll(): void {
    for (const processId of running.keys()) look(processId);
    waitForAdopted();
  }

  /** Who was started this very moment, and is not known yet, must not be taken for an orphan. */
  function waitForAdopted(): void {
    if (!adopts || closed || startsUnderWay > 0) return;
    for (let id = posix.endedChild(); id !== undefined; id = posix.endedChild()) {
      if (!running.has(id) && !inherited.delete(id) && mayBeOfNode(id) && !isOverdue(id)) return;
      look(id);
    }
  }

  /** Node waits for its own when it hears of their end, as davit does: whom it leaves is somebody else's orphan. */
  function isOverdue(processId: number): boolean {
    const nowMs = effects.monotonicMs();
    if (unclaimed?.processId !== processId) {
      unclaimed = { processId, sinceMs: nowMs };
      effects.after(2 * NODE_TAKES_AT_MOST_MS, waitForAdopted);
    }
    if (nowMs - unclaimed.sinceMs < NODE_TAKES_AT_MOST_MS) return false;
    unclaimed = undefined;
    return true;
  }

  /** Who was started by Node is waited for by Node; commands, and so those whom they leave, have other sessions. */
  function mayBeOfNode(processId: number): boolean {
    try {
      return sessionOf(processId) === ownSession;
    } catch {
      return true; // no more files may be open: the next look will tell
    }
  }

  function look(processId: number): void {
    const end = posix.endOf(processId);
    if (end === undefined) return;
    running.get(processId)?.(end);
    running.delete(processId);
  }

  function close(): void {
    closed = true;
    process.off('SIGCHLD', lookAtAll);
    reader.close();
  }
}
