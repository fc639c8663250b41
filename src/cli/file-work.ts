import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { statSync } from 'node:fs';
import { dirname } from 'node:path';
import { createInterface } from 'node:readline';
import { text } from 'node:stream/consumers';
import { selfCommand } from '../assets.ts';
import type { Effects } from '../effects.ts';
import { AppError, NO_ROOM } from '../errors.ts';
import { quoteForBash } from '../shell-words.ts';
import type { FileFacts, Unusable } from '../store/check.ts';
import { newer } from '../store/newer.ts';
import type { PartialFile } from '../store/partial-file.ts';
import { formatBytes } from './bytes.ts';
import { type CommandContext, EXIT_CODE_OF_SIGNAL } from './command.ts';
import {
  type CopyJob,
  FILE_PROCESS,
  type FileJob,
  type FileJobOptions,
  type FileMessage,
  type Room,
} from './file-process.ts';

const SHOW_EVERY_MS = 200;

/** Said when davit was stopped before it had changed anything. */
export const NOTHING_CHANGED = 'stopped: nothing was changed';

/**
 * Gives `action` a new, empty file in the directory, and removes it afterwards unless `action` has given it a name.
 * SIGINT, SIGTERM and SIGHUP abort `signal`, print what `stoppedNote` returns, and end davit with their exit code.
 */
export async function withPartial<Result>(
  directory: string,
  context: CommandContext,
  action: (partial: PartialFile, signal: AbortSignal) => Promise<Result>,
  stoppedNote = () => NOTHING_CHANGED,
): Promise<Result> {
  const { effects, terminal, onSignal, exit } = context;
  const { startPartial } = await import('../store/partial-file.ts');
  const interruption = new AbortController();
  let partial: PartialFile | undefined;
  const stopListening = onSignal(['SIGINT', 'SIGTERM', 'SIGHUP'], (name) => {
    interruption.abort();
    partial?.discard();
    terminal.note(stoppedNote());
    exit(EXIT_CODE_OF_SIGNAL[name]);
  });
  partial = startPartial(directory, effects.now());
  try {
    return await action(partial, interruption.signal);
  } finally {
    partial.discard();
    stopListening();
  }
}

/**
 * Fills and checks the partial file in another process, and shows its progress. Returns the facts of a sound davit
 * file. Throws AppError with `name` in it for any other file, and when there is no room.
 */
export async function fillPartial(
  job: CopyJob,
  from: { path: string; name: string },
  partial: PartialFile,
  signal: AbortSignal,
  context: CommandContext,
): Promise<FileFacts> {
  const last = await runJob(job, { from: from.path, to: partial.path }, signal, context);
  if (last.kind !== 'done') throw jobProblem(last, `a copy of ${from.name}`, partial.path);
  if (last.check.kind !== 'good') throw unusable(last.check, from.name);
  return last.check.facts;
}

/**
 * Migrates an older file in another process, and shows its progress. `onMessage` is called for each step. Throws
 * AppError, and the file is as it was, when there is no room, another process has it open, or one has written to it since
 * `lastWrite`: see `migrateFile`.
 */
export async function migrateInPlace(
  file: { path: string; name: string; lastWrite?: string },
  signal: AbortSignal,
  context: CommandContext,
  onMessage?: (message: FileMessage) => void,
): Promise<void> {
  const { path, name, lastWrite } = file;
  const last = await runJob('migrate', { from: path, to: path, lastWrite }, signal, context, onMessage);
  if (last.kind !== 'migrated') throw jobProblem(last, `the migration of ${name}`, path);
}

/** Resolves to the last message of the process. */
async function runJob(
  job: FileJob,
  { from, to, lastWrite }: FileJobOptions,
  signal: AbortSignal,
  { effects, terminal }: CommandContext,
  onMessage?: (message: FileMessage) => void,
): Promise<FileMessage> {
  const command = selfCommand();
  const words = [FILE_PROCESS, job, from, to, String(process.pid)];
  if (lastWrite !== undefined) words.push(lastWrite);
  const child = spawn(command.file, [...command.arguments, ...words], {
    stdio: ['ignore', 'pipe', 'pipe'],
    signal,
    killSignal: 'SIGKILL',
  });
  const stderr = text(child.stderr);
  using progress = showProgress(terminal.progress, job, to, effects);
  // Rejects if the process cannot be started, and once `signal` has ended it.
  const [last, [, killedBy]] = await Promise.all([lastMessage(), once(child, 'close')]);
  if (killedBy !== null) {
    const what = job === 'migrate' ? 'migrates the file' : 'makes the copy';
    throw new AppError(
      'unavailable',
      `the process that ${what} was killed (${killedBy}), perhaps as memory ran out: try again`,
    );
  }
  if (last === undefined) throw new Error(`the process for ${job} ended early: ${await stderr}`);
  return last;

  async function lastMessage(): Promise<FileMessage | undefined> {
    let message: FileMessage | undefined;
    for await (const line of createInterface({ input: child.stdout })) {
      message = JSON.parse(line) as FileMessage;
      progress.report(message);
      onMessage?.(message);
    }
    return message;
  }
}

/** Why the job failed; `what` was to be made. */
function jobProblem(message: FileMessage, what: string, path: string): Error {
  if (message.kind === 'failed') return new AppError('internal_error', message.message);
  if (message.kind !== 'noRoom') return new Error(`the process for ${what} ended while ${message.kind}`);
  const why = message.room === undefined ? NO_ROOM.get(message.code) : shortageText(message.room);
  return new AppError(
    'unavailable',
    `there is no room in ${dirname(path)} for ${what}${why ? ` (${why})` : ''}: make some; nothing was changed`,
  );
}

function shortageText({ neededBytes, spareBytes, freeBytes }: Room): string {
  const [needed, spare, free] = [neededBytes, spareBytes, freeBytes].map(formatBytes);
  return `it needs ${needed} with ${spare} to spare, and ${free} are free`;
}

/** Why a file cannot be used; `name` is how the message calls it. */
export function unusable(file: Unusable, name: string): AppError {
  switch (file.kind) {
    case 'foreign':
      return new AppError('conflict', `${name} is not a davit file`);
    case 'newer':
      return newer(name, file);
    case 'damaged':
      return new AppError(
        'conflict',
        `${name} is damaged (${file.problem}): 'davit doctor --db ${quoteForBash(name)}' tells more`,
      );
    default:
      return file satisfies never;
  }
}

function showProgress(show: (text: string) => void, job: FileJob, path: string, effects: Effects) {
  /** How large the copy is that is being made; 0: none is. */
  let bytes = 0;
  let cancel = effects.after(SHOW_EVERY_MS, showAgain);

  return {
    report(message: FileMessage) {
      bytes = message.kind === 'copying' ? message.bytes : 0;
      if (message.kind === 'migrating') show(`migrating to schema ${message.version}`);
      else if (message.kind === 'checking')
        show(job === 'migrate' ? 'checking the result' : 'checking the copy');
      else showCopied();
    },
    [Symbol.dispose]: () => cancel(),
  };

  function showAgain(): void {
    showCopied();
    cancel = effects.after(SHOW_EVERY_MS, showAgain);
  }

  function showCopied(): void {
    if (bytes === 0) return;
    const copied = Math.min(1, (statSync(path, { throwIfNoEntry: false })?.size ?? 0) / bytes);
    show(`copying: ${Math.floor(copied * 100)} % of ${formatBytes(bytes)}`);
  }
}
