import { type Colour, fields, table } from './table.ts';
import type { Terminal } from './terminal.ts';

/** Something that was looked at, and what there is to say of it. */
export interface AnyFinding {
  check: string;
  /** `problem`: something fails, or will. `note`: it may be meant so, but is worth knowing. */
  level: 'ok' | 'note' | 'problem';
  message: string;
  /** What to do; null: nothing. */
  advice: string | null;
}

const LEVEL_COLOURS: Record<AnyFinding['level'], Colour> = { ok: 'green', note: 'yellow', problem: 'red' };

/** All findings, one below the other, and what to do about those that say so. */
export function findingsText(findings: readonly AnyFinding[], terminal: Terminal): string {
  const all = table(
    findings,
    [
      { title: 'CHECK', of: ({ check }) => check },
      { title: 'RESULT', of: ({ level }) => level, colour: ({ level }) => LEVEL_COLOURS[level] },
      { title: 'FINDING', of: ({ message }) => message },
    ],
    // Nothing is cut: a path is of use only as a whole.
    null,
    terminal.colours,
  );
  const advised = findings.flatMap(({ check, advice }) =>
    advice === null ? [] : [[check, advice] as const],
  );
  return advised.length === 0 ? all : `${all}\n\nwhat to do\n${fields(terminal, advised)}`;
}
