import { Refusal } from './command.ts';
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
    // Nothing is cut: a path is of use only as a whole.
    { columns: null, colours: terminal.colours },
    findings,
    [
      { title: 'CHECK', of: ({ check }) => check },
      { title: 'RESULT', of: ({ level }) => level, colour: ({ level }) => LEVEL_COLOURS[level] },
      { title: 'FINDING', of: ({ message }) => message },
    ],
  );
  const advised = findings.flatMap(({ check, advice }) =>
    advice === null ? [] : [[check, advice] as const],
  );
  return advised.length === 0 ? all : `${all}\n\nwhat to do\n${fields(terminal, advised)}`;
}

/** Says how many of them are problems, and throws Refusal if there are any. */
export function refuseProblems(findings: readonly AnyFinding[], terminal: Terminal): void {
  const count = findings.filter(isProblem).length;
  if (count === 0) return;
  terminal.note(count === 1 ? 'one thing needs attention' : `${count} things need attention`);
  throw new Refusal('something needs attention');
}

/** Something fails, or will. */
export function isProblem({ level }: AnyFinding): boolean {
  return level === 'problem';
}
