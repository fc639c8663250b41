import { isUtf8 } from 'node:buffer';
import type { Command } from 'commander';
import { variableProblem } from '../deploy/environment.ts';
import { AppError } from '../errors.ts';
import { readOptionFile } from '../option-files.ts';
import { type CommandContext, holdsReplaced, misused } from './command.ts';

/**
 * The variables of `--env-from`, overridden by those of `--env`: `NAME=value`, or `NAME` for its value in the current
 * environment, so that a secret need not be in a command line. Errors never show a value. Throws AppError; a bad
 * `--env` is misuse.
 */
export async function readVariables(
  command: Command,
  { env = [], envFrom }: { env?: readonly string[]; envFrom?: string },
  context: CommandContext,
): Promise<Record<string, string>> {
  const variables = new Map(envFrom === undefined ? [] : await entriesOfFile(envFrom, context));
  for (const text of env) variables.set(...entryOf(command, text, context));
  return Object.fromEntries(variables);
}

async function entriesOfFile(path: string, { terminal }: CommandContext): Promise<[string, string][]> {
  const bytes = path === '-' ? await terminal.readInput() : readOptionFile('--env-from', path);
  // One character for each byte, as each line is checked before it is decoded as UTF-8.
  const lines = bytes.toString('latin1').replace(BYTE_ORDER_MARK, '').split(/\r?\n/);
  const entries = lines.flatMap((line, index): [string, string][] =>
    /^[ \t]*(?:#|$)/.test(line)
      ? []
      : [entryOfLine(Buffer.from(line, 'latin1'), `--env-from ${path}: line ${index + 1}`)],
  );
  if (entries.length === 0) throw refused(`--env-from ${path} holds no name=value lines`);
  return entries;
}

/** Some editors begin a file with it, invisibly. */
const BYTE_ORDER_MARK = /^\xef\xbb\xbf/;

/** Errors show nothing of a line: one that is not `name=value` may be part of a secret. */
function entryOfLine(bytes: Buffer, where: string): [name: string, value: string] {
  if (!isUtf8(bytes)) throw refused(`${where} is not valid UTF-8`);
  const line = bytes.toString();
  if (/^\s*export\s/.test(line)) throw refused(`${where} begins with export: leave that word out`);
  const separator = line.indexOf('=');
  if (separator < 0) {
    throw refused(`${where} has no =: write name=value; a name alone is only for --env`);
  }
  const value = line.slice(separator + 1);
  // One pair of quotes around the whole value is removed; what is between them is left as it is.
  const quoted = /^(["'])(.*)\1$/s.exec(value)?.[2];
  if (quoted === undefined && /^["']/.test(value)) {
    throw refused(
      `${where} has a quote that is not closed on that line: give a value of several lines by --env NAME`,
    );
  }
  const entry: [string, string] = [line.slice(0, separator), quoted ?? value];
  const problem = variableProblem(...entry);
  if (problem !== undefined) throw refused(`${where}: the variable ${problem}`);
  return entry;
}

function entryOf(
  command: Command,
  text: string,
  { startEnvironment }: CommandContext,
): [name: string, value: string] {
  const separator = text.indexOf('=');
  const name = separator < 0 ? text : text.slice(0, separator);
  // The text is not shown, as it may be a secret.
  if (name === '') misused(command, '--env needs a name before the =, as in --env STAGE=live');
  // Not `constructor` of every object.
  const own = Object.hasOwn(startEnvironment, name) ? startEnvironment[name] : undefined;
  const value = separator < 0 ? own : text.slice(separator + 1);
  const problem = variableProblem(name, value ?? '');
  if (problem !== undefined) misused(command, `the variable ${name} ${problem}`);
  if (value === undefined)
    throw refused(`--env ${name}: no such variable is set here; give it as NAME=value`);
  if (holdsReplaced(value)) throw refused(`--env ${name}: its value here is not valid UTF-8`);
  return [name, value];
}

function refused(message: string): AppError {
  return new AppError('invalid_request', message);
}
