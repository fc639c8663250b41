import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { PassThrough, Writable } from 'node:stream';
import { buffer } from 'node:stream/consumers';
import type { Test } from 'tap';
import { runCommandLine } from '../../src/cli/commands.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { dumpFile } from './files.ts';
import { temporaryDirectory } from './store.ts';

export const MAIN = join(import.meta.dirname, '../../src/main.ts');

/** Node's compile cache: a run takes a third of the time with it. */
export const COMPILE_CACHE = {
  NODE_COMPILE_CACHE: join(import.meta.dirname, '../../node_modules/.cache/compiled'),
};

export interface CliResult {
  stdout: string;
  stderr: string;
  exitCode: number | null;
}

export interface CliOptions {
  /** Makes it a process of its own, as options are read from the environment of the process. */
  env?: Record<string, string>;
  /** What davit reads itself, where it is no process of its own. */
  environment?: Record<string, string>;
  stdin?: string | Uint8Array;
  /** Where it runs; `./davit.db` is there. */
  cwd?: string;
}

/** Runs `davit` with these words: `runHere` where it needs no environment of its own, else `runProcess`. */
export async function run(words: readonly string[], options: CliOptions = {}): Promise<CliResult> {
  return options.env === undefined ? runHere(words, options) : runProcess(words, options);
}

export interface HereOptions extends Omit<CliOptions, 'env'> {
  effects?: Effects;
}

/**
 * All of davit but src/main.ts, in this process: starting one takes 20 times as long. It has no terminal, and nobody
 * can interrupt it.
 */
export async function runHere(
  words: readonly string[],
  { stdin = '', cwd = HOME, environment = {}, effects = realEffects }: HereOptions = {},
): Promise<CliResult> {
  const [stdout, stderr] = [collector(), collector()];
  const input = new PassThrough();
  input.end(stdin);
  const exited = Promise.withResolvers<number>();
  await enter(cwd);
  try {
    const running = runCommandLine({
      terminal: createTerminal({ stdin: input, stdout, stderr }, exited.reject),
      commandLine: words,
      environment,
      startEnvironment: environment,
      effects,
      onSignal: () => () => undefined,
      exit: exited.resolve,
      exitWithThreads: exited.resolve,
      leaveDirectory: () => undefined, // other runs may need it
    });
    const exitCode = await Promise.race([running, exited.promise]);
    return { stdout: stdout.text(), stderr: stderr.text(), exitCode };
  } finally {
    leave();
  }
}

// Variables of whoever runs the tests must not set options, and child processes use the compile cache too.
for (const name of Object.keys(process.env)) {
  if (/^(?:DAVIT_|NODE_OPTIONS$)/.test(name)) delete process.env[name];
}
Object.assign(process.env, COMPILE_CACHE);

const HOME = process.cwd();
let runningCount = 0;
let left = Promise.withResolvers<void>();

/** A process has one working directory: runs in another one are waited for. */
async function enter(directory: string): Promise<void> {
  while (runningCount > 0 && process.cwd() !== directory) await left.promise;
  if (runningCount === 0) process.chdir(directory);
  runningCount += 1;
}

function leave(): void {
  runningCount -= 1;
  if (runningCount > 0) return;
  process.chdir(HOME); // the other one may be removed now
  left.resolve();
  left = Promise.withResolvers();
}

function collector() {
  const chunks: Buffer[] = [];
  const stream = new Writable({
    write(chunk: Buffer, _encoding, done) {
      chunks.push(chunk);
      done();
    },
  });
  return Object.assign(stream, { text: () => Buffer.concat(chunks).toString() });
}

/** The same as a process of its own, in an environment with nothing of ours in it but `env`. */
export async function runProcess(
  words: readonly string[],
  { env = {}, stdin = '', cwd }: CliOptions = {},
): Promise<CliResult> {
  const child = spawn(process.execPath, [MAIN, ...words], {
    env: { ...COMPILE_CACHE, ...env },
    cwd,
    stdio: 'pipe',
  });
  child.stdin.on('error', () => undefined); // it may end without having read all
  child.stdin.end(stdin);
  const [stdout, stderr, [exitCode]] = await Promise.all([
    buffer(child.stdout),
    buffer(child.stderr),
    once(child, 'close') as Promise<[number | null]>,
  ]);
  return { stdout: stdout.toString(), stderr: stderr.toString(), exitCode };
}

export interface Place {
  directory: string;
  dbPath: string;
  /** `run` in this directory. */
  davit(words: readonly string[], options?: Omit<CliOptions, 'cwd'>): Promise<CliResult>;
  /** The same, and the JSON value that it printed; throws if it did not exit with 0. */
  json<Value>(words: readonly string[]): Promise<Value>;
  /** Every row of every table; no table where there is no file. */
  dump(): Record<string, unknown[]>;
  /** `davit` with these words is refused: nothing on stdout, one line on stderr, nothing changed in the file. */
  refused(
    words: readonly string[],
    options?: Omit<CliOptions, 'cwd'>,
  ): Promise<{ message: string; exitCode: number | null }>;
}

/** A temporary directory for `./davit.db`, and davit in it. `how`: `runProcess` where a real process matters. */
export function place(t: Test, how: typeof run = run): Place {
  const directory = temporaryDirectory(t);
  const dbPath = join(directory, 'davit.db');
  const davit: Place['davit'] = (words, options) => how(words, { ...options, cwd: directory });

  return {
    directory,
    dbPath,
    davit,
    dump,
    async json(words) {
      const { stdout, stderr, exitCode } = await davit([...words, '--json']);
      if (exitCode !== 0) throw new Error(`davit ${words.join(' ')} exited with ${exitCode}: ${stderr}`);
      return JSON.parse(stdout);
    },
    async refused(words, options) {
      const before = dump();
      const { stdout, stderr, exitCode } = await davit(words, options);
      const after = dump();
      if (stdout !== '') throw new Error(`a refusal printed ${stdout}`);
      if (!/^error: [^\n]+\n$/.test(stderr))
        throw new Error(`not one line that begins with error: ${stderr}`);
      if (JSON.stringify(before) !== JSON.stringify(after)) throw new Error('a refusal changed the file');
      return { message: stderr.trim(), exitCode };
    },
  };

  function dump(): Record<string, unknown[]> {
    return existsSync(dbPath) ? dumpFile(dbPath) : {};
  }
}
