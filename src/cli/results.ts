import { escapedIn } from '../printable.ts';
import type { CommandContext } from './command.ts';
import { type Column, table } from './table.ts';
import type { Terminal } from './terminal.ts';

/** Prints one JSON value to stdout, with the API's field names, and without control characters. */
export function printJson({ terminal }: { terminal: Pick<Terminal, 'print'> }, value: unknown): void {
  if (!Array.isArray(value) || value.length === 0) {
    terminal.print(jsonOf(value));
    return;
  }
  // Item by item: a million deployments are too long for one string.
  terminal.print('[');
  for (const [index, item] of value.entries()) {
    const indented = `  ${jsonOf(item).replaceAll('\n', '\n  ')}`;
    terminal.print(index === value.length - 1 ? indented : `${indented},`);
  }
  terminal.print(']');
}

function jsonOf(value: unknown): string {
  return escapedIn(JSON.stringify(value, null, 2));
}

/** Prints a table of the rows to stdout; if there are none, `whenEmpty` to stderr. */
export function printTable<Row>(
  { terminal }: CommandContext,
  rows: readonly Row[],
  whenEmpty: string,
  columns: readonly Column<NoInfer<Row>>[],
): void {
  if (rows.length === 0) terminal.note(whenEmpty);
  else terminal.print(table(terminal, rows, columns));
}

/**
 * Prints `word`, the id or the secret of what was made, alone on stdout, so that $(…) takes it; `text`, for people,
 * goes to stderr. With `--json`, prints all of `made` and nothing else.
 */
export function printMade(
  context: CommandContext,
  { json }: { json?: boolean },
  made: unknown,
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
