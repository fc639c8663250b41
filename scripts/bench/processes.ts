import { type ChildProcess, fork, type SpawnOptions, spawn } from 'node:child_process';
import { once } from 'node:events';
import { accessSync, closeSync, constants, mkdtempSync, openSync, readdirSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { text as textOf } from 'node:stream/consumers';
import type { GuardRequest } from './children/guard.ts';
import type { ServerRequest } from './children/server.ts';
import type { Bench } from './measure.ts';

/*
 * The other processes of a benchmark. The guard is told of each: once this process is gone, for whatever reason, it
 * ends those that are left, and removes the data.
 */

let guard: ChildProcess | undefined;

function tellGuard(request: GuardRequest): void {
  guard ??= startGuard();
  guard.send(request);
}

/** In a process group of its own, so that ^C does not reach it. It does not keep this process alive. */
function startGuard(): ChildProcess {
  const child = fork(join(import.meta.dirname, 'children/guard.ts'), { detached: true });
  child.unref();
  child.channel?.unref();
  return child;
}

/** Has the guard remove `directory` once this process is gone. */
export function guardDirectory(directory: string): void {
  tellGuard({ kind: 'directory', directory });
}

/** A directory for a Unix socket, whose path may have at most 107 characters; guarded. */
export function socketDirectory(): string {
  const directory = mkdtempSync(join(tmpdir(), 'davit-bench-'));
  guardDirectory(directory);
  return directory;
}

export interface Running {
  child: ChildProcess;
  processId: number;
  /** Sends `signal` (SIGTERM by default), and SIGKILL after 15 s; resolves when the process is gone. */
  stop(signal?: NodeJS.Signals): Promise<void>;
}

/** Starts a program. `lastResort` is the signal by which the guard would end it; SIGKILL follows. */
export function start(
  file: string,
  words: readonly string[],
  { lastResort = 'SIGTERM', ...options }: SpawnOptions & { lastResort?: NodeJS.Signals } = {},
): Running {
  return watch(spawn(file, words, options), lastResort, file);
}

function watch(child: ChildProcess, lastResort: NodeJS.Signals, name: string): Running {
  const { pid } = child;
  const ended = once(child, 'exit').catch(() => undefined);
  if (pid === undefined) throw new Error(`${name} cannot be started`);
  tellGuard({ kind: 'started', processId: pid, signal: lastResort });
  void ended.then(() => tellGuard({ kind: 'ended', processId: pid }));
  return {
    child,
    processId: pid,
    async stop(signal = 'SIGTERM') {
      if (child.exitCode !== null || child.signalCode !== null) return;
      child.kill(signal);
      const patience = setTimeout(() => child.kill('SIGKILL'), 15_000);
      await ended;
      clearTimeout(patience);
    },
  };
}

/** The match of the first line of its output that matches. Throws if it ends before. */
export async function lineOf({ child }: Running, pattern: RegExp): Promise<RegExpExecArray> {
  let text = '';
  const stream = child.stdout;
  if (stream === null) throw new Error('its output is not read');
  const found = Promise.withResolvers<RegExpExecArray>();
  stream.setEncoding('utf8').on('data', (piece: string) => {
    text += piece;
    const match = pattern.exec(text);
    if (match !== null) found.resolve(match);
  });
  stream.on('close', () => found.reject(new Error(`it ended and had only said: ${text.slice(-2000)}`)));
  return await found.promise;
}

/** A program's output, once it has ended with 0. */
export async function outputOf(
  file: string,
  words: readonly string[],
  options: SpawnOptions & { lastResort?: NodeJS.Signals } = {},
): Promise<string> {
  const { child } = start(file, words, { ...options, stdio: ['ignore', 'pipe', 'pipe'] });
  const { stdout, stderr } = child;
  if (stdout === null || stderr === null) throw new Error('its output is not read');
  const [output, errors] = await Promise.all([textOf(stdout), textOf(stderr), once(child, 'close')]);
  const { exitCode } = child;
  if (exitCode !== 0)
    throw new Error(`${file} ${words.join(' ')} ended with ${exitCode}: ${errors.slice(-2000)}`);
  return output;
}

/** A process that runs one of the scripts in children/, and answers requests. */
export interface Child {
  processId: number;
  call<Answer>(request: unknown): Promise<Answer>;
}

/** Starts one, which ends with the measure. Its stderr, such as the log of a service, goes to a file. */
export function childOf({ directory, defer }: Pick<Bench, 'directory' | 'defer'>, name: string): Child {
  const logPath = join(directory, `${name}.log`);
  const log = openSync(logPath, 'a');
  const child = fork(join(import.meta.dirname, 'children', `${name}.ts`), {
    serialization: 'advanced',
    stdio: ['ignore', 'inherit', log, 'ipc'],
  });
  closeSync(log);
  const running = watch(child, 'SIGKILL', name);
  defer(() => running.stop('SIGKILL'));
  const waiting = new Map<number, PromiseWithResolvers<unknown>>();
  let lastId = 0;
  child.on('message', ({ id, answer, problem }: { id: number; answer?: unknown; problem?: string }) => {
    const asked = waiting.get(id);
    waiting.delete(id);
    if (problem === undefined) asked?.resolve(answer);
    else asked?.reject(new Error(`${name}: ${problem}`));
  });
  child.on('exit', () => {
    if (waiting.size === 0) return;
    const problem = new Error(`${name} ended: ${readFileSync(logPath, 'utf8').slice(-2000)}`);
    for (const { reject } of waiting.values()) reject(problem);
  });
  return {
    processId: running.processId,
    call<Answer>(request: unknown) {
      lastId += 1;
      const asked = Promise.withResolvers<unknown>();
      waiting.set(lastId, asked);
      child.send({ id: lastId, request });
      return asked.promise as Promise<Answer>;
    },
  };
}

/** The path of a program in PATH or in one of the `further` directories; undefined: it is in none. */
export function findProgram(name: string, further: readonly string[] = []): string | undefined {
  const directories = [...(process.env['PATH'] ?? '').split(delimiter), ...further];
  return directories.map((directory) => join(directory, name)).find(isExecutable);
}

function isExecutable(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/** Says which of these packages, on which davit does not depend, are not installed; undefined: all are. */
export function packagesMissing(names: readonly string[]): string | undefined {
  const absent = names.filter((name) => !isInstalled(name));
  return absent.length === 0 ? undefined : `not installed: npm install --no-save ${absent.join(' ')}`;
}

function isInstalled(packageName: string): boolean {
  try {
    createRequire(import.meta.url).resolve(packageName);
    return true;
  } catch {
    return false;
  }
}

/** For programs that cannot choose a free port themselves. Another process might take it meanwhile. */
export async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const address = server.address();
  server.close();
  await once(server, 'close');
  if (address === null || typeof address === 'string') throw new Error('no port');
  return address.port;
}

export interface Memory {
  /** RSS of all processes: shared pages count once for each process. */
  residentMb: number;
  /** PSS of all processes: each page counts once. */
  proportionalMb: number;
}

/** The memory of a process and all its descendants, in megabytes of 10^6 bytes. */
export function memoryOf(processId: number): Memory {
  const sum = { residentMb: 0, proportionalMb: 0 };
  for (const id of [processId, ...descendantsOf(processId)]) {
    const text = readFileSync(`/proc/${id}/smaps_rollup`, 'utf8');
    sum.residentMb += kilobytesOf(text, 'Rss') / 976.5625;
    sum.proportionalMb += kilobytesOf(text, 'Pss') / 976.5625;
  }
  return sum;
}

function kilobytesOf(text: string, name: string): number {
  return Number(new RegExp(`^${name}:\\s+(\\d+) kB$`, 'm').exec(text)?.[1]);
}

function descendantsOf(processId: number): number[] {
  return readdirSync(`/proc/${processId}/task`).flatMap((thread) => {
    const children = readFileSync(`/proc/${processId}/task/${thread}/children`, 'utf8');
    const ids = children
      .split(' ')
      .filter((id) => id !== '')
      .map(Number);
    return ids.flatMap((id) => [id, ...descendantsOf(id)]);
  });
}

/** The processor time of a process so far, in user and kernel mode: proc_pid_stat(5), utime and stime. */
export function processorMsOf(processId: number): number {
  const text = readFileSync(`/proc/${processId}/stat`, 'utf8');
  // The name in parentheses may hold anything, so fields are counted from its end: these are 14 and 15, in 1/100 s.
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
  return (Number(fields[11]) + Number(fields[12])) * 10;
}

/** Milliseconds on the monotonic clock, which all processes of the machine share. */
export function monotonicMs(): number {
  return Number(process.hrtime.bigint()) / 1e6;
}

/** Starts one of the servers of children/server.ts. */
export async function serverOf(
  bench: Pick<Bench, 'directory' | 'defer'>,
  request: ServerRequest,
): Promise<{ url: string; processId: number }> {
  const child = childOf(bench, 'server');
  return { url: await child.call<string>(request), processId: child.processId };
}
