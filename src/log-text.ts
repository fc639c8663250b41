import { styleText } from 'node:util';
import { printable } from './printable.ts';

type Style = Parameters<typeof styleText>[0];

const STYLES: Record<string, Style> = {
  debug: 'gray',
  info: 'green',
  warn: 'yellow',
  error: 'red',
  fatal: ['bold', 'red'],
};

const INDENT = '    ';

/**
 * A JSON log line as text for a terminal: time, level, message, fields, and an error's stack below. Why not pino-pretty:
 * it passes terminal escape sequences through. A line that is not JSON is shown unchanged but for such sequences.
 */
export function logText(line: string, colours: boolean): string {
  const style = (how: Style, text: string) =>
    colours ? styleText(how, text, { validateStream: false }) : text;
  const parsed = parse(line);
  if (parsed === undefined) return `${printable(line.trimEnd())}\n`;
  const { time, level, msg, err, ...fields } = parsed;
  const name = textOf(level);
  const words = [
    style('gray', textOf(time)),
    style(STYLES[name] ?? 'bold', name.toUpperCase().padEnd(5)),
    textOf(msg),
    ...Object.entries(fields).map(([key, value]) => `${style('cyan', `${printable(key)}=`)}${shown(value)}`),
  ];
  return [words.join(' '), ...errorLines(err), ''].join('\n');
}

function parse(line: string): Record<string, unknown> | undefined {
  try {
    const value: unknown = JSON.parse(line);
    return typeof value === 'object' && value !== null ? { ...value } : undefined;
  } catch {
    return undefined;
  }
}

/** A field's value: as it is if it is a single word, otherwise as JSON. */
function shown(value: unknown): string {
  if (typeof value === 'string' && /^[^\s"=]+$/.test(value)) return printable(value);
  return printable(JSON.stringify(value));
}

function textOf(value: unknown): string {
  return typeof value === 'string' ? printable(value) : shown(value ?? null);
}

function errorLines(error: unknown): string[] {
  if (typeof error !== 'object' || error === null) return [];
  const { message, stack, cause } = error as Record<string, unknown>;
  const text = typeof stack === 'string' ? stack : textOf(message);
  const lines = text.split('\n').map((line) => INDENT + printable(line));
  if (cause === undefined) return lines;
  return [...lines, `${INDENT}caused by`, ...errorLines(cause)];
}
