import type { Test } from 'tap';
import { type Place, place } from './cli.ts';

export interface Finding {
  check: string;
  level: 'ok' | 'note' | 'problem';
  message: string;
  advice: string | null;
}

export interface Report {
  ok: boolean;
  service: { process_id: number } | null;
  disk_free_bytes: number;
  findings: Finding[];
  tables: { name: string; rows: number; bytes: number }[];
}

/** A place with a sound project and a key. */
export async function withProject(t: Test): Promise<Place> {
  const there = place(t);
  await there.davit(['admin', 'project', 'create', '--name', 'website', '--', '/bin/true']);
  await there.davit(['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects']);
  return there;
}

/** The report of `davit doctor`; asserts its exit code and the summary on stderr. */
export async function reportOf(t: Test, { davit }: Place, expectedExitCode: number): Promise<Report> {
  const { stdout, stderr, exitCode } = await davit(['doctor', '--json']);
  t.equal(exitCode, expectedExitCode);
  t.match(stderr, expectedExitCode === 0 ? /^$/ : /^(one thing needs|\d+ things need) attention\n$/);
  return JSON.parse(stdout);
}

/** The finding of this check; a problem if there are several. */
export function findingOf({ findings }: Report, check: string): Finding | undefined {
  const found = findings.filter((finding) => finding.check === check);
  return found.find(({ level }) => level === 'problem') ?? found[0];
}
