import type { AnyFinding } from './findings.ts';

export interface DoctorFinding extends AnyFinding {
  check:
    | 'permissions'
    | 'disk'
    | 'integrity'
    | 'schema'
    | 'references'
    | 'wal'
    | 'clock'
    | 'service'
    | 'deployments'
    | 'webhooks'
    | 'projects'
    | 'keys'
    | 'leftovers';
}

/** Something fails, or will. */
export function problem(check: DoctorFinding['check'], message: string, advice: string): DoctorFinding {
  return { check, level: 'problem', message, advice };
}

/** Nothing to say. */
export function ok(check: DoctorFinding['check'], message: string): DoctorFinding {
  return { check, level: 'ok', message, advice: null };
}

/** These, or that there are none. */
export function orOk(
  findings: DoctorFinding[],
  check: DoctorFinding['check'],
  message: string,
): DoctorFinding[] {
  return findings.length === 0 ? [ok(check, message)] : findings;
}
