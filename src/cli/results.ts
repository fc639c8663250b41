import { escapedIn } from '../printable.ts';
import type { CommandContext } from './command.ts';

/** Prints one JSON value to stdout, with the API's field names, and without control characters. */
export function printJson({ terminal }: CommandContext, value: unknown): void {
  terminal.print(escapedIn(JSON.stringify(value, null, 2)));
}

/**
 * Prints `word`, the id or the secret of what was made, alone on stdout, so that $(…) takes it; `text`, for people,
 * goes to stderr. With `--json`, prints all of `made` and nothing else.
 */
export function printMade<Made>(
  context: CommandContext,
  { json }: { json?: boolean },
  made: Made,
  text: string,
  word: string,
): void {
  if (json === true) {
    printJson(context, made);
    return;
  }
  context.terminal.note(text);
  context.terminal.print(word);
}
