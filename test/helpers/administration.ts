import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import type { ProjectId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { openStore, type Store } from '../../src/store/store.ts';
import { COMPILE_CACHE, MAIN, type Place } from './cli.ts';

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
  said(text: string): Promise<void>;
  /** Resolves when its stderr contains this. */
  noted(text: string): Promise<void>;
  exitCode: Promise<number | null>;
}

/** A running `davit admin deployment logs -f`. */
export function follow({ directory }: Place, id: string): Follower {
  const child = spawn(process.execPath, [MAIN, 'admin', 'deployment', 'logs', id, '-f'], {
    cwd: directory,
    env: COMPILE_CACHE,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const texts = { stdout: '', stderr: '' };
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (text: string) => {
      texts[name] += text;
    });
  }
  const ended = once(child, 'close');
  const until = async (name: 'stdout' | 'stderr', holds: () => boolean) => {
    while (!holds()) {
      if (child.exitCode !== null) throw new Error(`it ended: ${texts.stderr}`);
      await Promise.race([once(child[name], 'data'), ended]);
    }
  };
  return {
    child,
    output: () => texts.stdout,
    notes: () => texts.stderr,
    said: (text) => until('stdout', () => texts.stdout === text),
    noted: (text) => until('stderr', () => texts.stderr.includes(text)),
    exitCode: ended.then(([exitCode]) => exitCode as number | null),
  };
}
