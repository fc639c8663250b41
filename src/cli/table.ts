import { styleText } from 'node:util';
import { printable } from '../printable.ts';
import { displayWidth, type Shorten } from './shorten.ts';
import type { Terminal } from './terminal.ts';

export type Colour = 'red' | 'green' | 'yellow' | 'gray';

export interface Column<Row> {
  title: string;
  of(row: Row): string;
  /** Never tells more than the text. */
  colour?(row: Row): Colour | undefined;
  /** How it is shortened on a narrow terminal. Without it never: ids, which people copy, statuses and numbers. */
  shorten?: Shorten;
  /** For the last column: it is broken between words, under itself, and nothing of it is left out. */
  wraps?: boolean;
}

const GAP = '  ';
const WRAPPED_MIN_WIDTH = 16;

/**
 * Aligned columns under their titles, without empty columns. On a terminal, columns that can be shortened are, the
 * widest first, to fit its width. If even that is too wide, each row becomes a block of `name  value` lines.
 */
export function table<Row>(
  { columns: width, colours }: Pick<Terminal, 'columns' | 'colours'>,
  rows: readonly Row[],
  columns: readonly Column<Row>[],
): string {
  const filled = columns
    .map((column) => ({ ...column, cells: rows.map((row) => printable(column.of(row))) }))
    .filter(({ cells }) => cells.some((cell) => cell !== ''));
  const widths = fitted(filled, width);
  if (widths === null) {
    const records = rows.map((row) => filled.map(({ title, of }) => [title, of(row) || null] as const));
    return records.map((record) => fields({ columns: width }, record)).join('\n\n');
  }
  const shown = filled.map((column, index) => {
    const cells = column.cells.map((cell) => linesOf(column, cell, widths[index] ?? 0));
    return { ...column, cells, width: widestOf([column.title, ...cells.flat()]) };
  });
  const lines = rows.flatMap((row, index) => {
    const height = Math.max(...shown.map(({ cells }) => cells[index]?.length ?? 0));
    return Array.from({ length: height }, (_, at) =>
      shown.map((column) =>
        pad(column.cells[index]?.[at] ?? '', column.width, colours ? column.colour?.(row) : undefined),
      ),
    );
  });
  return [shown.map((column) => pad(column.title, column.width, undefined)), ...lines]
    .map((cells) => cells.join(GAP).trimEnd())
    .join('\n');
}

/**
 * `name  value` lines, with aligned values; null values are left out. On a terminal, values that are too long for a
 * line are wrapped.
 */
export function fields(
  { columns }: Pick<Terminal, 'columns'>,
  entries: readonly (readonly [name: string, value: string | null])[],
): string {
  const shown = entries.filter((entry): entry is readonly [string, string] => entry[1] !== null);
  const indent = Math.max(...shown.map(([name]) => name.length)) + GAP.length;
  return shown
    .flatMap(([name, value]) => {
      const [first = '', ...more] = wrap(printable(value), columns === null ? null : columns - indent);
      return [`${name.padEnd(indent)}${first}`.trimEnd(), ...more.map((line) => ' '.repeat(indent) + line)];
    })
    .join('\n');
}

/** Breaks lines between words; a word that is too long for a line gets one of its own. */
function wrap(text: string, width: number | null): string[] {
  if (width === null || displayWidth(text) <= width) return [text];
  const lines: string[] = [];
  for (const word of text.split(' ')) {
    const last = lines.at(-1);
    if (last === undefined || displayWidth(`${last} ${word}`) > width) lines.push(word);
    else lines[lines.length - 1] = `${last} ${word}`;
  }
  return lines;
}

type Filled = Pick<Column<never>, 'title' | 'shorten' | 'wraps'> & { cells: readonly string[] };

/** Narrows the widest column that can be narrower, again and again, until all fit; null: they cannot. */
function fitted(columns: readonly Filled[], limit: number | null): number[] | null {
  const widths = columns.map(({ title, cells }) => widestOf([title, ...cells]));
  const total = () => widths.reduce((sum, width) => sum + width, GAP.length * (widths.length - 1));
  if (limit === null || total() <= limit) return widths;
  const minWidths = columns.map((column, index) => minWidthOf(column, widths[index] ?? 0));
  while (total() > limit) {
    let widest = -1;
    widths.forEach((width, index) => {
      if (width > (minWidths[index] ?? 0) && width > (widths[widest] ?? 0)) widest = index;
    });
    if (widest < 0) return null;
    widths[widest] = (widths[widest] ?? 0) - 1;
  }
  return widths;
}

/** How narrow a column of this width can be. */
function minWidthOf({ title, shorten, wraps, cells }: Filled, width: number): number {
  if (wraps === true) return Math.min(width, WRAPPED_MIN_WIDTH);
  return shorten === undefined ? width : widestOf([title, ...cells.map((cell) => shorten(cell, 0))]);
}

function linesOf(
  { shorten, wraps }: Pick<Filled, 'shorten' | 'wraps'>,
  cell: string,
  width: number,
): string[] {
  if (displayWidth(cell) <= width) return [cell];
  return wraps === true ? wrap(cell, width) : [shorten?.(cell, width) ?? cell];
}

function widestOf(texts: readonly string[]): number {
  return texts.reduce((widest, text) => Math.max(widest, displayWidth(text)), 0);
}

function pad(text: string, width: number, colour: Colour | undefined): string {
  const shown =
    colour === undefined || text === '' ? text : styleText(colour, text, { validateStream: false });
  return shown + ' '.repeat(width - displayWidth(text));
}
