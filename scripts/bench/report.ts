import { stripVTControlCharacters } from 'node:util';
import type { Row, Unit } from './measure.ts';
import { summarize } from './statistics.ts';

const HEADINGS = ['', 'median', 'min – max', 'ratio', 'to reach', ''];

/** A measure as a table of its rows, their targets, and whether they are reached. */
export function table(title: string, rows: readonly Row[]): string {
  const cells = [HEADINGS, ...rows.map(cellsOf)];
  const widths = HEADINGS.map((_, column) => Math.max(...cells.map((row) => width(row[column] ?? ''))));
  const lines = cells.map((row) =>
    `  ${row.map((cell, column) => align(cell, widths[column] ?? 0, column)).join('  ')}`.trimEnd(),
  );
  const missing = rows.flatMap((row) => (row.missing === undefined ? [] : `  ${row.name}: ${row.missing}`));
  return [title, ...lines, ...missing].join('\n');
}

function cellsOf({ name, unit, samples, missing, ratio, target }: Row): string[] {
  if (missing !== undefined || samples.length === 0) return [name, 'skipped', '', '', '', ''];
  const { median, min, max } = summarize(samples);
  return [
    name,
    quantity(median, unit),
    samples.length === 1 ? '' : `${amount(min)} – ${amount(max)}`,
    ratio === undefined ? '' : ratio.toFixed(2),
    target?.text ?? '',
    target === undefined ? '' : target.reached ? 'reached' : 'falls short',
  ];
}

function quantity(value: number, unit: Unit): string {
  return unit === '/s' ? `${amount(value)}/s` : unit === 'times' ? amount(value) : `${amount(value)} ${unit}`;
}

/** Three significant digits, or all before the decimal point. */
function amount(value: number): string {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Aligns names and targets to the left, and numbers to the right. */
function align(cell: string, length: number, column: number): string {
  const padding = ' '.repeat(length - width(cell));
  return column === 0 || column >= 4 ? cell + padding : padding + cell;
}

function width(cell: string): number {
  return stripVTControlCharacters(cell).length;
}
