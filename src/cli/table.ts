import { styleText } from 'node:util';
import { printable } from '../printable.ts';
import type { Terminal } from './terminal.ts';

export type Colour = 'red' | 'green' | 'yellow' | 'gray';

export interface Column<Row> {
  title: string;
  of(row: Row): string;
  /** Never tells more than the text. */
  colour?(row: Row): Colour | undefined;
  /** Whether it may be cut on a narrow terminal. Ids may not, as people copy them. */
  shrinks?: boolean;
}

const GAP = '  ';
const SMALLEST_WIDTH = 6;

/**
 * Aligned columns under their titles, without empty columns. On a terminal, columns that may shrink are cut to fit its
 * width. If even that is too wide, each row becomes a block of `name  value` lines.
 */
export function table<Row>(
  { columns: width, colours }: Pick<Terminal, 'columns' | 'colours'>,
  rows: readonly Row[],
  columns: readonly Column<Row>[],
): string {
  const filled = columns
    .map((column) => ({ ...column, cells: rows.map((row) => printable(column.of(row))) }))
    .filter(({ cells }) => cells.some((cell) => cell !== ''));
  const widths = fitted(
    filled.map(({ title, cells, shrinks = false }) => ({
      width: cells.reduce((widest, cell) => Math.max(widest, displayWidth(cell)), displayWidth(title)),
      shrinks,
    })),
    width,
  );
  if (widths === null) {
    const records = rows.map((row) => filled.map(({ title, of }) => [title, of(row) || null] as const));
    return records.map((record) => fields({ columns: width }, record)).join('\n\n');
  }
  const lines = [
    filled.map(({ title }) => ({ text: title, colour: undefined })),
    ...rows.map((row, index) =>
      filled.map(({ cells, colour }) => ({
        text: cells[index] ?? '',
        colour: colours ? colour?.(row) : undefined,
      })),
    ),
  ];
  return lines
    .map((cells) =>
      cells
        .map(({ text, colour }, index) => pad(text, widths[index] ?? 0, colour))
        .join(GAP)
        .trimEnd(),
    )
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

/** Narrows the widest column that may shrink, again and again, until all fit; null: they cannot. */
function fitted(columns: { width: number; shrinks: boolean }[], limit: number | null): number[] | null {
  const widths = columns.map(({ width }) => width);
  if (limit === null) return widths;
  const total = () => widths.reduce((sum, width) => sum + width, GAP.length * (widths.length - 1));
  while (total() > limit) {
    let widest = -1;
    columns.forEach(({ shrinks }, index) => {
      if (shrinks && (widths[index] ?? 0) > (widths[widest] ?? SMALLEST_WIDTH)) widest = index;
    });
    if (widest < 0) return null;
    widths[widest] = (widths[widest] ?? 0) - 1;
  }
  return widths;
}

function pad(text: string, width: number, colour: Colour | undefined): string {
  const cut = displayWidth(text) <= width ? text : `${cutTo(text, width - 1)}…`;
  const shown = colour === undefined || cut === '' ? cut : styleText(colour, cut, { validateStream: false });
  return shown + ' '.repeat(width - displayWidth(cut));
}

function cutTo(text: string, width: number): string {
  let kept = '';
  let keptWidth = 0;
  for (const segment of graphemesOf(text)) {
    keptWidth += graphemeWidth(segment);
    if (keptWidth > width) break;
    kept += segment;
  }
  return kept;
}

/** How many columns of a terminal the text takes. */
function displayWidth(text: string): number {
  if (/^[\x20-\x7e\u2026]*$/.test(text)) return text.length;
  return graphemesOf(text).reduce((width, grapheme) => width + graphemeWidth(grapheme), 0);
}

let segmenter: Intl.Segmenter | undefined;

/**
 * What a reader takes for one character. The segmenter is made on first use, as that takes longer than the rest of a
 * list.
 */
function graphemesOf(text: string): string[] {
  segmenter ??= new Intl.Segmenter('en', { granularity: 'grapheme' });
  return Array.from(segmenter.segment(text), ({ segment }) => segment);
}

/** Characters of two columns: East Asian letters, full-width forms and emoji (UAX #11, UTS #51). */
const WIDE =
  /\p{Script=Han}|\p{Script=Hiragana}|\p{Script=Katakana}|\p{Script=Hangul}|[\u3000-\u303e\uff01-\uff60\uffe0-\uffe6]|\p{Emoji_Presentation}|\ufe0f/u;

/** Characters of the same scripts that take one column. */
const HALF_WIDTH = /^[\uff61-\uffdc]/;

function graphemeWidth(grapheme: string): number {
  return WIDE.test(grapheme) && !HALF_WIDTH.test(grapheme) ? 2 : 1;
}
