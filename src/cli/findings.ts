import { Refusal } from './command.ts';
import { type Colour, fields, table } from './table.ts';
import type { Terminal } from './terminal.ts';

/** What is checked: by `davit doctor`, or by `davit admin project check` of one project. */
export type Check =
  | 'permissions'
  | 'disk'
  | 'integrity'
  | 'schema'
  | 'references'
  | 'wal'
  | 'writes'
  | 'clock'
  | 'service'
  | 'deployments'
  | 'webhooks'
  | 'projects'
  | 'keys'
  | 'leftovers'
  | 'user'
  | 'status'
  | 'directory'
  | 'command'
  | 'variables'
  | 'limits';

/** The result of one check. */
export interface Finding {
  check: Check;
  /** `problem`: something fails, or will. `note`: worth knowing, but perhaps intended. */
  level: 'ok' | 'note' | 'problem';
  message: string;
  /** What to do; null: nothing. */
  advice: string | null;
}

/** A finding of level `problem`, which needs attention. */
export function problem(check: Check, message: string, advice: string): Finding {
  return { check, level: 'problem', message, advice };
}

/** A finding of level `note`. */
export function note(check: Check, message: string, advice: string | null): Finding {
  return { check, level: 'note', message, advice };
}

/** A finding of level `ok`. */
export function ok(check: Check, message: string): Finding {
  return { check, level: 'ok', message, advice: null };
}

/** These findings, or one of level `ok` if there are none. */
export function orOk(findings: Finding[], check: Check, message: string): Finding[] {
  return findings.length === 0 ? [ok(check, message)] : findings;
}

const LEVEL_COLOURS: Record<Finding['level'], Colour> = { ok: 'green', note: 'yellow', problem: 'red' };

/**
 * A table of all findings, and below it the advice of those that have some. An advice is not wrapped: a command in it, as a
 * file's path makes long, is copied from the terminal, and the shell would take each line for another one.
 */
export function findingsText(
  findings: readonly Finding[],
  terminal: Pick<Terminal, 'columns' | 'colours'>,
): string {
  const all = table(terminal, findings, [
    { title: 'CHECK', of: ({ check }) => check },
    { title: 'RESULT', of: ({ level }) => level, colour: ({ level }) => LEVEL_COLOURS[level] },
    { title: 'FINDING', of: ({ message }) => message, wraps: true },
  ]);
  const advised = findings.flatMap(({ check, advice }) =>
    advice === null ? [] : [[check, advice] as const],
  );
  // The same about several findings is said once.
  const once = [...new Map(advised.map((advice) => [advice.join(' '), advice])).values()];
  return once.length === 0 ? all : `${all}\n\nwhat to do\n${fields({ columns: null }, once)}`;
}

/** If there are problems, prints how many, and throws Refusal. */
export function refuseProblems(findings: readonly Finding[], terminal: Terminal): void {
  const count = findings.filter(isProblem).length;
  if (count === 0) return;
  terminal.note(count === 1 ? 'one thing needs attention' : `${count} things need attention`);
  throw new Refusal('something needs attention');
}

/** Whether a finding needs attention. */
export function isProblem({ level }: Finding): boolean {
  return level === 'problem';
}
