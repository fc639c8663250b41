import type { Command } from 'commander';
import { type CommandContext, misused, Refusal } from './command.ts';

/** The options of a command that asks before it changes anything. */
export interface ConfirmedOptions {
  yes?: boolean;
  json?: boolean;
}

/**
 * Returns only after `--yes`, or when the user says yes. Otherwise ends with exit code 1, or 2 if there is no terminal
 * to ask on.
 */
export async function confirm(
  command: Command,
  question: string,
  yes: boolean | undefined,
  { terminal }: CommandContext,
): Promise<void> {
  if (yes === true) return;
  const answer = await terminal.ask(`${question} [y/N] `);
  if (answer === null) {
    misused(command, 'this must be confirmed, but there is no terminal to ask on: give --yes');
  }
  if (isYes(answer)) return;
  terminal.note('nothing was changed');
  throw new Refusal('not confirmed');
}

/** Whether an answer is yes. */
export function isYes(answer: string): boolean {
  return /^y(es)?$/i.test(answer);
}
