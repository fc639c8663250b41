import { readFileSync } from 'node:fs';
import { parseEnv } from 'node:util';
import { variableProblem } from '../deploy/environment.ts';
import { AppError, messageOf } from '../errors.ts';
import { printable } from '../printable.ts';
import type { CommandContext } from './command.ts';

/**
 * The variables of `--env-from` and over them those of `--env`: `NAME=value`, or `NAME` for davit's own value of
 * it, so that a secret need not stand in a command line. Errors never show a value. Throws AppError.
 */
export async function readVariables(
  { env = [], envFrom }: { env?: readonly string[]; envFrom?: string },
  context: CommandContext,
): Promise<Record<string, string>> {
  const variables = new Map(envFrom === undefined ? [] : await entriesOfFile(envFrom, context));
  for (const text of env) variables.set(...entryOf(text, context));
  for (const [name, value] of variables) {
    const problem = variableProblem(name, value);
    if (problem !== undefined) throw refused(`the variable ${printable(name)} ${problem}`);
  }
  return Object.fromEntries(variables);
}

async function entriesOfFile(path: string, { terminal }: CommandContext): Promise<[string, string][]> {
  const text = path === '-' ? (await terminal.readInput()).toString('utf8') : readText(path);
  const entries = Object.entries(parseEnv(text)).map(([name, value]): [string, string] => [
    name,
    value ?? '',
  ]);
  if (entries.length === 0) throw refused(`--env-from ${path} holds no name=value lines`);
  return entries;
}

function readText(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw new AppError('invalid_request', `--env-from: ${messageOf(error)}`, {
      cause: error,
    });
  }
}

function entryOf(text: string, { environment }: CommandContext): [name: string, value: string] {
  const separator = text.indexOf('=');
  if (separator > 0) return [text.slice(0, separator), text.slice(separator + 1)];
  // What stands there may be a value: it is not repeated.
  if (separator === 0) throw refused('--env needs a name before the =, as in --env STAGE=live');
  const value = environment[text];
  if (value === undefined)
    throw refused(`--env ${printable(text)}: no such variable is set here; give it as NAME=value`);
  return [text, value];
}

function refused(message: string): AppError {
  return new AppError('invalid_request', message);
}
