import { Refusal } from './command.ts';
import { type Colour, fields, table } from './table.ts';
import type { Terminal } from './terminal.ts';

/** Something that was looked at, and what there is to say of it. */
export interface FindingOf<Check extends string = string> {
  check: Check;
  /** `problem`: something fails, or will. `note`: it may be meant so, but is worth knowing. */
  level: 'ok' | 'note' | 'problem';
  message: string;
  /** What to do; null: nothing. */
  advice: string | null;
}

/** One of level `problem`: to be seen to, as `advice` says. */
export function problem<Check extends string>(
  check: Check,
  message: string,
  advice: string,
): FindingOf<Check> {
  return { check, level: 'problem', message, advice };
}

/** One of level `note`. */
export function note<Check extends string>(
  check: Check,
  message: string,
  advice: string | null,
): FindingOf<Check> {
  return { check, level: 'note', message, advice };
}

/** One of level `ok`: what was found in order. */
export function ok<Check extends string>(check: Check, message: string): FindingOf<Check> {
  return { check, level: 'ok', message, advice: null };
}

/** These findings; where there are none, that all is in order. */
export function orOk<Check extends string>(
  findings: FindingOf<Check>[],
  check: Check,
  message: string,
): FindingOf<Check>[] {
  return findings.length === 0 ? [ok(check, message)] : findings;
}

const LEVEL_COLOURS: Record<FindingOf['level'], Colour> = { ok: 'green', note: 'yellow', problem: 'red' };

/** All findings, one below the other, and what to do about those that say so. */
export function findingsText(findings: readonly FindingOf[], terminal: Terminal): string {
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
export function refuseProblems(findings: readonly FindingOf[], terminal: Terminal): void {
  const count = findings.filter(isProblem).length;
  if (count === 0) return;
  terminal.note(count === 1 ? 'one thing needs attention' : `${count} things need attention`);
  throw new Refusal('something needs attention');
}

/** Whether it is one that needs attention. */
export function isProblem({ level }: FindingOf): boolean {
  return level === 'problem';
}
