import { existsSync } from 'node:fs';
import { join } from 'node:path';
import type { Effects } from '../effects.ts';
import { ADMINISTRATOR } from '../store/administrator.ts';
import type { Reads } from '../store/store.ts';
import type { Candidate, NamedNoun } from './complete.ts';
import { statusText } from './deployment-status.ts';
import { projectNames } from './names.ts';

const NEWEST = 50;

/** How long a lock on the file, or its service, is waited for: the shell is silent meanwhile. */
const WAIT_MAX_MS = 300;

/**
 * The projects, keys, webhooks or latest deployments in the file: by name, or by id where a name is not unique or
 * `start` begins an id. Never a secret. Makes no file, and changes nothing in one. Throws where it cannot be read.
 */
export async function namesIn(
  dbPath: string,
  noun: NamedNoun,
  start: string,
  effects: Effects,
): Promise<Candidate[]> {
  if (!existsSync(dbPath)) return [];
  const [{ openForExamination }, { refuseMovedHere }, { refuseRemoved }] = await Promise.all([
    import('../store/doctor.ts'),
    import('../store/other-names.ts'),
    import('../store/may-open.ts'),
  ]);
  // To open a file that was moved or replaced under a service would make a -wal and a -shm beside it.
  refuseMovedHere(dbPath);
  refuseRemoved(dbPath, effects, WAIT_MAX_MS);
  const examined = openForExamination(dbPath, WAIT_MAX_MS);
  if ('kind' in examined) return [];
  try {
    return await candidatesOf(noun, start, examined.reads, effects.now());
  } finally {
    examined.close();
  }
}

async function candidatesOf(
  noun: NamedNoun,
  start: string,
  reads: Reads,
  nowMs: number,
): Promise<Candidate[]> {
  switch (noun) {
    case 'project':
      return named(reads.projects.list(), start);
    case 'key':
      return named(
        reads.keys.list().filter(({ revoked_at }) => revoked_at === null),
        start,
      );
    case 'webhook':
      // Only its host: the path of a URL may be secret.
      return reads.backlog
        .webhooks(nowMs)
        .map(({ id, url }) => ({ value: id, description: URL.parse(url)?.host ?? '' }));
    case 'deployment':
      return latestDeployments(reads);
    default:
      return noun satisfies never;
  }
}

interface Named {
  id: string;
  name: string;
  status?: string;
}

function named(all: readonly Named[], start: string): Candidate[] {
  const isId = /^(?:prj|key)_/.test(start);
  const counts = new Map<string, number>();
  for (const { name } of all) counts.set(name, (counts.get(name) ?? 0) + 1);
  return all.map(({ id, name, status }) => {
    const [value, other] = isId || counts.get(name) !== 1 ? [id, name] : [name, id];
    return { value, description: status === undefined ? other : `${other}, ${status}` };
  });
}

async function latestDeployments(reads: Reads): Promise<Candidate[]> {
  const names = projectNames(reads);
  const filter = { projectId: null, statuses: null, ref: null, createdAfterMs: null, createdBeforeMs: null };
  const { items } = await reads.deployments.page(ADMINISTRATOR, filter, Number.MAX_SAFE_INTEGER, NEWEST);
  return items.map((deployment) => ({
    value: deployment.id,
    description: `${names.get(deployment.project_id) ?? ''} ${deployment.ref}: ${statusText(deployment)}`,
  }));
}

/** The path that a shell would make of what was typed: `~/` is the home directory. */
export function pathMeant(typed: string, home: string | undefined): string {
  return home !== undefined && typed.startsWith('~/') ? join(home, typed.slice(2)) : typed;
}
