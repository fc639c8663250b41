import { execFile, execFileSync } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { COMMAND_TIMEOUT, writeCommand } from './commands.ts';
import type { ApiKey } from './load.ts';
import { COMMAND_PROJECTS, REPORTED_PROJECTS } from './plan.ts';

const execute = promisify(execFile);

/** Where a run has its files. Only `databasePath` and `backupDirectory` are on davit's own disk, if it has one. */
export interface Place {
  /** In the environment of every command, by which its processes are found. */
  runName: string;
  databasePath: string;
  backupDirectory: string;
  command: string;
  /** Commands append their deployment's id to it. */
  runsFile: string;
  ledgerFile: string;
  /** Where davit's own small disk is mounted; null: it has none. */
  disk: string | null;
}

/** Creates the directory of a run. `diskBytes`: the size of davit's own disk; null: it gets none. */
export function makePlace(directory: string, runName: string, diskBytes: number | null): Place {
  const data = join(directory, 'data');
  mkdirSync(data, { recursive: true });
  if (diskBytes !== null) execFileSync('mount', ['-t', 'tmpfs', '-o', `size=${diskBytes}`, 'none', data]);
  const place: Place = {
    runName,
    databasePath: join(data, 'davit.db'),
    backupDirectory: data,
    command: join(directory, 'command.sh'),
    runsFile: join(directory, 'runs'),
    ledgerFile: join(directory, 'ledger.jsonl'),
    disk: diskBytes === null ? null : data,
  };
  writeCommand(place.command);
  writeFileSync(place.runsFile, '');
  writeFileSync(place.ledgerFile, '');
  return place;
}

/**
 * Creates the projects and keys of a run by `davit admin`, before the service runs. Those with a command come first.
 */
export async function makeProjectsAndKeys(
  executable: string,
  place: Place,
): Promise<{ projectIds: string[]; keys: ApiKey[] }> {
  const admin = async <Made>(noun: string, name: string, ...words: string[]) => {
    const all = ['admin', noun, 'create', '--json', '--db', place.databasePath, '--name', name, ...words];
    const { stdout } = await execute(executable, all, { env: { PATH: '/usr/bin:/bin' } });
    return JSON.parse(stdout) as Made;
  };
  const variables = [`CHAOS_RUNS=${place.runsFile}`, `CHAOS_RUN=${place.runName}`];
  const settings = [...variables.flatMap((one) => ['--env', one]), '--timeout', COMMAND_TIMEOUT];
  const projectIds: string[] = [];
  for (let number = 0; number < COMMAND_PROJECTS + REPORTED_PROJECTS; number += 1) {
    const words =
      number < COMMAND_PROJECTS
        ? [...settings, '--policy', number % 4 === 3 ? 'latest' : 'queue', '--', place.command]
        : // One never expects a report, the other expects it soon.
          ['--report-timeout', number === COMMAND_PROJECTS ? 'off' : '4s'];
    projectIds.push((await admin<{ id: string }>('project', `project ${number}`, ...words)).id);
  }
  const some = projectIds.filter((_, number) => number % 2 === 0);
  const all = await admin<{ id: string; secret: string }>('key', 'all', '--all-scopes', '--all-projects');
  const narrow = await admin<{ id: string; secret: string }>(
    'key',
    'some',
    '--all-scopes',
    ...some.flatMap((id) => ['--project', id]),
  );
  return {
    projectIds,
    keys: [
      { ...all, projectIds: null },
      { ...narrow, projectIds: new Set(some) },
    ],
  };
}
