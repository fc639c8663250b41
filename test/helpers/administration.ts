import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import type { ProjectId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { openStore, type Store } from '../../src/store/store.ts';
import { COMPILE_CACHE, MAIN, type Place } from './cli.ts';
import { collected } from './collected.ts';

/** Runs `action` on the store of this place, as a service would. */
export async function inFile<Result>(
  { dbPath }: Place,
  action: (store: Store) => Promise<Result>,
): Promise<Result> {
  const store = openStore(dbPath, realEffects);
  try {
    return await action(store);
  } finally {
    await store.close();
  }
}

/** A project whose command is this script. */
export async function scriptProject({ davit }: Place, name: string, script: string): Promise<ProjectId> {
  const { stdout } = await davit([
    'admin',
    'project',
    'create',
    '--name',
    name,
    '--',
    '/bin/sh',
    '-c',
    script,
  ]);
  return stdout.trim() as ProjectId;
}

export interface Follower {
  child: ChildProcess;
  output(): string;
  notes(): string;
  /** Resolves when its stdout is exactly this. */
  said(text: string): Promise<string>;
  /** Resolves when its stderr contains this. */
  noted(text: string): Promise<string>;
  exitCode: Promise<number | null>;
}

/** A running `davit admin deployment logs -f`. */
export function follow({ directory }: Place, id: string): Follower {
  const child = spawn(process.execPath, [MAIN, 'admin', 'deployment', 'logs', id, '-f'], {
    cwd: directory,
    env: COMPILE_CACHE,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const output = collected(child);
  const notes = collected(child, 'stderr');
  return {
    child,
    output: output.text,
    notes: notes.text,
    said: (text) => output.until((all) => all === text),
    noted: (text) => notes.until((all) => all.includes(text)),
    exitCode: once(child, 'close').then(([exitCode]) => exitCode as number | null),
  };
}
