import { spawn } from 'node:child_process';
import { statSync } from 'node:fs';
import { dirname } from 'node:path';
import { createInterface } from 'node:readline';
import { text } from 'node:stream/consumers';
import { selfCommand } from '../assets.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import type { FileFacts, Unusable } from '../store/backup.ts';
import type { PartialFile } from '../store/partial-file.ts';
import { formatBytes } from './bytes.ts';
import { type CommandContext, EXIT_CODE_OF_SIGNAL } from './command.ts';
import { FILE_PROCESS, type FileJob, type FileMessage } from './file-process.ts';

const SHOW_EVERY_MS = 200;

/**
 * Gives `action` a new, empty file in the directory, and removes it afterwards in any case, unless `action` gave it
 * a name. SIGINT, SIGTERM and a closed terminal abort `signal` and end davit with the code that goes with them.
 */
export async function withPartial(
  directory: string,
  context: CommandContext,
  action: (partial: PartialFile, signal: AbortSignal) => Promise<void>,
): Promise<void> {
  const { effects, terminal, onSignal, exit } = context;
  const [{ startPartial }, { isAlive, processIdentity }] = await Promise.all([
    import('../store/partial-file.ts'),
    import('../deploy/processes.ts'),
  ]);
  const self = processIdentity(process.pid);
  if (self === undefined) throw new Error('/proc does not show this very process');
  const interruption = new AbortController();
  let partial: PartialFile | undefined;
  const stopListening = onSignal(['SIGINT', 'SIGTERM', 'SIGHUP'], (name) => {
    interruption.abort();
    partial?.discard();
    terminal.note('stopped: nothing was changed');
    exit(EXIT_CODE_OF_SIGNAL[name]);
  });
  partial = startPartial(directory, { self, isAlive, nowMs: effects.now() });
  try {
    await action(partial, interruption.signal);
  } finally {
    partial.discard();
    stopListening();
  }
}

/**
 * Fills and checks the partial file in a process of its own, and shows how far it is. Gives what is in it, for a
 * davit file that is whole. Throws AppError with `name` in it for any other, and when there is no room.
 */
export async function fillPartial(
  job: FileJob,
  from: { path: string; name: string },
  partial: PartialFile,
  signal: AbortSignal,
  { effects, terminal }: CommandContext,
): Promise<FileFacts> {
  const command = selfCommand();
  const words = [FILE_PROCESS, job, from.path, partial.path, String(process.pid)];
  const child = spawn(command.file, [...command.arguments, ...words], {
    stdio: ['ignore', 'pipe', 'pipe'],
    signal,
    killSignal: 'SIGKILL',
  });
  const problems = text(child.stderr);
  const failed = new Promise<never>((_, reject) => child.once('error', reject));
  using progress = showProgress(terminal.progress, partial.path, effects);
  const last = await Promise.race([lastMessage(), failed]);
  const stderr = await Promise.race([problems, failed]);
  if (last === undefined) throw new Error(`the process that copies ended early: ${stderr}`);
  return factsOf(last, from.name, partial);

  async function lastMessage(): Promise<FileMessage | undefined> {
    let message: FileMessage | undefined;
    for await (const line of createInterface({ input: child.stdout })) {
      message = JSON.parse(line) as FileMessage;
      progress.report(message);
    }
    return message;
  }
}

function factsOf(message: FileMessage, name: string, { path }: PartialFile): FileFacts {
  switch (message.kind) {
    case 'done':
      if (message.check.kind !== 'good') throw unusable(message.check, name);
      return message.check.facts;
    case 'noRoom':
      throw new AppError(
        'unavailable',
        `there is no room in ${dirname(path)} for a copy of ${name}: make some; nothing was changed`,
      );
    case 'failed':
      if (message.code === null) throw new Error(message.message);
      throw new AppError(message.code, message.message);
    case 'copying':
    case 'checking':
      throw new Error(`the process that copies ended while ${message.kind}`);
    default:
      return message satisfies never;
  }
}

/** Why a file is of no use, as `name` is called. */
export function unusable(file: Unusable, name: string): AppError {
  switch (file.kind) {
    case 'foreign':
      return new AppError('conflict', `${name} is not a davit file`);
    case 'newer':
      return new AppError(
        'conflict',
        `${name} was written by a newer davit (schema ${file.schemaVersion}): use that version`,
      );
    case 'damaged':
      return new AppError('conflict', `${name} is damaged (${file.problem}): 'davit doctor' tells more`);
    default:
      return file satisfies never;
  }
}

function showProgress(show: (text: string) => void, path: string, effects: Effects) {
  let bytes = 0;
  let isCopying = true;
  let cancel = effects.after(SHOW_EVERY_MS, look);

  return {
    report(message: FileMessage) {
      if (message.kind === 'copying') bytes = message.bytes;
      isCopying = message.kind === 'copying';
      if (message.kind === 'checking') show('checking the copy');
    },
    [Symbol.dispose]: () => cancel(),
  };

  function look(): void {
    if (isCopying && bytes > 0) {
      const copied = Math.min(1, (statSync(path, { throwIfNoEntry: false })?.size ?? 0) / bytes);
      show(`copying: ${Math.floor(copied * 100)} % of ${formatBytes(bytes)}`);
    }
    cancel = effects.after(SHOW_EVERY_MS, look);
  }
}
