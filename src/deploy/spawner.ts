import { type ChildProcess, spawn } from 'node:child_process';
import { closeSync } from 'node:fs';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import { whyNotStarted } from './not-started.ts';
import { createPipePool, createPipeReader, type PipeReading } from './pipes.ts';
import { endOrphanedSpawners, type ProcessIdentity, SPAWNER_MARKER } from './processes.ts';
import {
  readMessages,
  SPAWNER_ARGUMENT,
  type SpawnerReply,
  type SpawnerRequest,
  type SpawnRequest,
} from './spawner-process.ts';

export interface SpawnerOptions {
  /** How to start davit once more. */
  command: { file: string; arguments: readonly string[] };
  /** The helper's whole environment; needs a PATH in which `mkfifo` is found. */
  environment: Record<string, string>;
  /** ASCII, the same for all services on one database file and for no other: see endOrphanedSpawners. */
  token: string;
  /** Where private directories for pipes are made and, when their service is gone, removed. */
  directory: string;
  effects: Effects;
  /** Hears, in a sentence, what somebody should look into although the spawner helped itself. */
  onProblem: (problem: string) => void;
}

/** `lost`: the helper died, so that nobody will ever know. */
export type ProcessEnd =
  | { kind: 'exited'; exitCode: number }
  | { kind: 'signalled'; signal: string }
  | { kind: 'lost' };

export type SpawnResult =
  | StartedProcess
  | { kind: 'notStarted'; cause: string }
  | { kind: 'unwanted' }
  /** The helper died: it may have been started or not. */
  | { kind: 'lost' };

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
  /** The helper's, while there is one. */
  processId(): number | undefined;
  /** Ends the helper. What still runs goes on without it, and its end is `lost`. */
  close(): Promise<void>;
}

/**
 * A helper process that starts commands. Node's own spawn holds up the event loop in proportion to the
 * memory of the process (6 ms at 250 MB), the helper's is small; to be called before anything else grows.
 * A helper that dies is replaced. Throws AppError `unavailable` when it cannot be started at all.
 */
export async function startSpawner(options: SpawnerOptions): Promise<Spawner> {
  const { effects, onProblem } = options;
  const reader = createPipeReader(effects);
  const pool = createPipePool({ directory: options.directory, makePipes });
  let closed = false;
  let helper = startHelper(options);

  await helper.ready;
  watch(helper);
  // Without pipes no command runs, which is told for each; the rest of the service does not need them.
  await pool.fill().catch((error: unknown) => onProblem(messageOf(error)));
  return { spawn: spawnCommand, processId: () => helper.child.pid, close };

  async function spawnCommand(request: SpawnRequest, isWanted = () => true): Promise<SpawnResult> {
    try {
      const live = await liveHelper();
      const pipe = await pool.take();
      if (!isWanted()) {
        pipe.release();
        closeSync(pipe.descriptor);
        return { kind: 'unwanted' };
      }
      const answer = await live.ask((id) => ({
        kind: 'spawn',
        id,
        command: { ...request, pipe: pipe.path },
      }));
      pipe.release();
      if (answer.kind === 'started') {
        return {
          kind: 'started',
          identity: answer.identity,
          readOutput: (onBytes) => reader.read(pipe.descriptor, onBytes),
          ended: answer.ended,
        };
      }
      closeSync(pipe.descriptor);
      if (answer.kind === 'lost') {
        // What it may have forked would become the command after everybody looked for that.
        await endOrphanedSpawners(options.token, effects);
        return { kind: 'lost' };
      }
      if (answer.kind === 'notStarted')
        return { kind: 'notStarted', cause: whyNotStarted(answer.code, request) };
      throw new Error(`the spawner answered with ${answer.kind}`);
    } catch (error) {
      return { kind: 'notStarted', cause: messageOf(error) };
    }
  }

  async function makePipes(paths: string[]): Promise<void> {
    const live = await liveHelper();
    const answer = await live.ask((id) => ({ kind: 'makePipes', id, paths }));
    const problem = answer.kind === 'pipesMade' ? answer.problem : 'the spawner died';
    if (problem !== null) throw new Error(`no pipe for the command's output: ${problem}`);
  }

  /** One that is dead is replaced once, and again whenever somebody asks: no loop around one that cannot live. */
  async function liveHelper(): Promise<Helper> {
    if (closed) throw new Error('davit is shutting down');
    if (helper.isDead()) {
      helper = startHelper(options);
      watch(helper);
    }
    await helper.ready;
    return helper;
  }

  function watch(watched: Helper): void {
    watched.dead.then((how) => {
      if (closed) return;
      onProblem(how);
      if (watched.wasReady()) liveHelper().catch(() => undefined);
    });
  }

  async function close(): Promise<void> {
    closed = true;
    helper.child.stdin?.end();
    const cancelKill = effects.after(CLOSE_PATIENCE_MS, () => helper.child.kill('SIGKILL'));
    await helper.dead;
    cancelKill();
    reader.close();
    pool.close();
  }
}

const CLOSE_PATIENCE_MS = 2_000;

/**
 * The helper answers a few lines at a time and must stay small, as every fork copies its page tables: little
 * space for what is soon garbage (MiB), no threads that help collecting it.
 */
const HELPER_NODE_OPTIONS = '--max-semi-space-size=1 --v8-pool-size=0';

type Answer =
  | { kind: 'started'; identity: ProcessIdentity; ended: Promise<ProcessEnd> }
  | { kind: 'notStarted'; code: string }
  | { kind: 'pipesMade'; problem: string | null }
  | { kind: 'lost' };

interface Helper {
  child: ChildProcess;
  /** Resolves at its first word; rejects with AppError `unavailable` when it dies before. */
  ready: Promise<void>;
  /** Resolves when it is dead, with a sentence about it. */
  dead: Promise<string>;
  wasReady(): boolean;
  isDead(): boolean;
  ask(request: (id: number) => SpawnerRequest): Promise<Answer>;
}

function startHelper({ command, environment, token }: SpawnerOptions): Helper {
  const asked = new Map<number, (answer: Answer) => void>();
  const running = new Map<number, PromiseWithResolvers<ProcessEnd>>();
  const ready = Promise.withResolvers<void>();
  const dead = Promise.withResolvers<string>();
  let lastId = 0;
  let wasReady = false;
  let isDead = false;
  let complaint = '';

  // Whoever waits for `ready` hears of a failure; nobody may be waiting.
  ready.promise.catch(() => undefined);
  const child = spawn(command.file, [...command.arguments, SPAWNER_ARGUMENT], {
    env: { ...environment, NODE_OPTIONS: HELPER_NODE_OPTIONS, [SPAWNER_MARKER]: token },
    stdio: ['pipe', 'pipe', 'pipe'],
  });
  child.once('error', (error) => die(error.message));
  // After its last words were read, so that nothing it has told of is lost.
  child.once('close', (exitCode, signal) => die(`it ended with ${signal ?? exitCode}`));
  // It is dead or dying, which is told elsewhere.
  child.stdin.on('error', () => undefined);
  child.stderr.on('data', (bytes: Buffer) => {
    complaint = (complaint + bytes.toString()).slice(-COMPLAINT_MAX_LENGTH);
  });
  readMessages<SpawnerReply>(child.stdout, hear);
  send({ kind: 'hello', serviceProcessId: process.pid });

  return {
    child,
    ready: ready.promise,
    dead: dead.promise,
    wasReady: () => wasReady,
    isDead: () => isDead,
    ask,
  };

  function ask(request: (id: number) => SpawnerRequest): Promise<Answer> {
    if (isDead) return Promise.resolve({ kind: 'lost' });
    lastId += 1;
    const id = lastId;
    send(request(id));
    return new Promise((resolve) => {
      asked.set(id, resolve);
    });
  }

  function send(request: SpawnerRequest): void {
    child.stdin.write(`${JSON.stringify(request)}\n`);
  }

  function hear(reply: SpawnerReply): void {
    switch (reply.kind) {
      case 'ready':
        wasReady = true;
        ready.resolve();
        break;
      case 'started': {
        const end = Promise.withResolvers<ProcessEnd>();
        running.set(reply.id, end);
        answer(reply.id, { kind: 'started', identity: reply.identity, ended: end.promise });
        break;
      }
      case 'pipesMade':
      case 'notStarted':
        answer(reply.id, reply);
        break;
      case 'ended':
        running.get(reply.id)?.resolve(endFrom(reply));
        running.delete(reply.id);
        break;
      default:
        reply satisfies never;
    }
  }

  function answer(id: number, what: Answer): void {
    asked.get(id)?.(what);
    asked.delete(id);
  }

  function die(how: string): void {
    if (isDead) return;
    isDead = true;
    const sentence = `the process that starts commands is gone: ${how}${complaint && `: ${complaint.trim()}`}`;
    ready.reject(new AppError('unavailable', sentence));
    for (const resolve of asked.values()) resolve({ kind: 'lost' });
    for (const { resolve } of running.values()) resolve({ kind: 'lost' });
    asked.clear();
    running.clear();
    dead.resolve(sentence);
  }
}

const COMPLAINT_MAX_LENGTH = 2_000;

function endFrom({ exitCode, signal }: { exitCode: number | null; signal: string | null }): ProcessEnd {
  if (signal !== null) return { kind: 'signalled', signal };
  return exitCode === null ? { kind: 'lost' } : { kind: 'exited', exitCode };
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
