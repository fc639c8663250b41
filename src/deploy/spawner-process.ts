import { spawn } from 'node:child_process';
import { closeSync, constants, openSync, readFileSync, unlinkSync, writeFileSync } from 'node:fs';
import { setFlagsFromString } from 'node:v8';
import { type ProcessIdentity, processIdentity } from './processes.ts';

/*
 * The body of the small process that starts commands, and the messages that it and the service exchange:
 * one line of JSON each, over its stdin and stdout. Environments hold secrets and pass nowhere else.
 */

export type SpawnerRequest =
  | { kind: 'hello'; serviceProcessId: number }
  | { kind: 'makePipes'; id: number; paths: string[] }
  | { kind: 'spawn'; id: number; command: SpawnCommand };

export interface SpawnRequest {
  /** Argument vector; the first is a path, relative to `directory`, or a name that the environment's PATH finds. */
  command: readonly [string, ...string[]];
  /** Absolute. */
  directory: string;
  /** All that the command gets. */
  environment: Record<string, string>;
}

export interface SpawnCommand extends SpawnRequest {
  /** A named pipe that the service reads; it becomes stdout and stderr, and loses its name. */
  pipe: string;
}

export type SpawnerReply =
  | { kind: 'ready' }
  | { kind: 'pipesMade'; id: number; problem: string | null }
  | { kind: 'started'; id: number; identity: ProcessIdentity }
  | { kind: 'notStarted'; id: number; code: string }
  | { kind: 'ended'; id: number; exitCode: number | null; signal: string | null };

/** The command-line argument that makes a davit be this process. */
export const SPAWNER_ARGUMENT = '__spawner';

/**
 * Serves one service until stdin ends, which is when the service closes it or dies; whatever runs then goes
 * on without it. Nothing but stdin keeps this process alive, so it needs no exit.
 */
export function runSpawner(): void {
  let serviceProcessId: number | undefined;

  // It does little and often sleeps for days: compiled code would only make it larger (60 MB resident after
  // some thousand commands, 50 without).
  for (const flag of ['--no-opt', '--no-maglev', '--no-sparkplug']) setFlagsFromString(flag);
  // A terminal's ^C and systemd's SIGTERM reach the whole group; how commands end is the service's to decide.
  for (const name of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(name, () => undefined);
  process.stdout.on('error', () => process.stdin.destroy());
  readMessages<SpawnerRequest>(process.stdin, take);

  function take(request: SpawnerRequest): void {
    if (request.kind === 'hello') serviceProcessId = request.serviceProcessId;
    // What a dead service asked for may still be in the pipe. It must not be started: its successor may
    // already have looked for what runs.
    if (process.ppid !== serviceProcessId) {
      process.stdin.destroy();
      return;
    }
    switch (request.kind) {
      case 'hello':
        reply({ kind: 'ready' });
        break;
      case 'makePipes':
        makePipes(request.id, request.paths);
        break;
      case 'spawn':
        startCommand(request.id, request.command);
        break;
      default:
        request satisfies never;
    }
  }
}

/** Messages as they arrive: what the other side, which is this same program, sent as lines of JSON. */
export function readMessages<Message>(
  stream: NodeJS.ReadableStream,
  onMessage: (message: Message) => void,
): void {
  let rest = '';
  stream.setEncoding('utf8');
  stream.on('data', (text: string) => {
    const lines = (rest + text).split('\n');
    rest = lines.pop() ?? '';
    for (const line of lines) onMessage(JSON.parse(line) as Message);
  });
}

function reply(message: SpawnerReply): void {
  process.stdout.write(`${JSON.stringify(message)}\n`);
}

/**
 * Node has no call for pipe(2) or mkfifo(3), and what it gives children as a pipe is a socket pair, which
 * cannot be opened by name: `echo >/dev/stderr` would fail in every command.
 */
function makePipes(id: number, paths: string[]): void {
  // Others may write to it, as a command that became another user opens /dev/stdout anew; nobody else gets to
  // it, as its directory is private.
  const child = spawn('mkfifo', ['-m', '0622', ...paths], { stdio: 'ignore' });
  child.once('error', (error) => reply({ kind: 'pipesMade', id, problem: `mkfifo: ${error.message}` }));
  child.once('exit', (exitCode, signal) => {
    const problem = exitCode === 0 ? null : `mkfifo ended with ${signal ?? exitCode}`;
    reply({ kind: 'pipesMade', id, problem });
  });
  child.unref();
}

function startCommand(id: number, { command, directory, environment, pipe }: SpawnCommand): void {
  try {
    const [file, ...rest] = command;
    const output = openForWriting(pipe);
    const child = withRaisedOomScore(() => {
      try {
        return spawn(file, rest, {
          cwd: directory,
          env: environment,
          stdio: ['ignore', output, output],
          detached: true, // setsid(2): its own session and process group
        });
      } finally {
        closeSync(output);
      }
    });
    child.once('error', (error) => reply({ kind: 'notStarted', id, code: codeOf(error) }));
    if (child.pid === undefined) return;
    child.unref();
    child.once('exit', (exitCode, signal) => reply({ kind: 'ended', id, exitCode, signal }));
    // Nobody waits for it before the event loop turns, so the id is still its own, even if it has exited.
    const identity = processIdentity(child.pid);
    if (identity === undefined) {
      // Without its start time nobody could tell it from a stranger later (a /proc mounted with hidepid).
      child.kill('SIGKILL');
      reply({ kind: 'notStarted', id, code: 'hidden in /proc' });
      return;
    }
    reply({ kind: 'started', id, identity });
  } catch (error) {
    reply({ kind: 'notStarted', id, code: codeOf(error) });
  }
}

/** A pipe that nobody reads would hold up its opening for ever, so this process reads it until it is open. */
function openForWriting(pipe: string): number {
  const reader = openSync(pipe, constants.O_RDWR);
  try {
    return openSync(pipe, constants.O_WRONLY);
  } finally {
    closeSync(reader);
    unlinkSync(pipe);
  }
}

/** When memory runs out, the kernel shall take a command and not the service: proc_pid_oom_score_adj(5). */
const COMMAND_OOM_SCORE = 500;
const OOM_SCORE_FILE = '/proc/self/oom_score_adj';

/** What is started inherits the score of this moment; this process itself keeps its own. */
function withRaisedOomScore<Result>(start: () => Result): Result {
  const before = ownOomScore();
  if (before === undefined || before >= COMMAND_OOM_SCORE) return start();
  const raised = setOomScore(COMMAND_OOM_SCORE);
  try {
    return start();
  } finally {
    if (raised) setOomScore(before);
  }
}

function ownOomScore(): number | undefined {
  try {
    return Number(readFileSync(OOM_SCORE_FILE, 'latin1'));
  } catch {
    return undefined;
  }
}

function setOomScore(score: number): boolean {
  try {
    writeFileSync(OOM_SCORE_FILE, String(score));
    return true;
  } catch {
    // A container may forbid it; a command is then as likely to be ended as the service.
    return false;
  }
}

function codeOf(error: unknown): string {
  return error instanceof Error && 'code' in error ? String(error.code) : String(error);
}
