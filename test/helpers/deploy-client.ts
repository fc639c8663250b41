import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { watch } from 'node:fs/promises';
import { join } from 'node:path';
import type { Test } from 'tap';
import type { Deployment } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { inFile } from './administration.ts';
import { COMPILE_CACHE, MAIN, place, runHere } from './cli.ts';
import { serve } from './served.ts';
import { KEY, PROJECT } from './store.ts';

/** What a service answers that has created a deployment. */
export const QUEUED = {
  id: 'dpl_1',
  project_id: 'prj_1',
  ref: 'main',
  status: 'queued',
  created_at: '2026-11-21T08:00:00.000Z',
  reason: null,
  message: null,
  duration_ms: null,
  exit_code: null,
  signal: null,
  superseded_by: null,
  queue_position: 1,
};

/** The ref that a test deploys decides what the command does. */
const COMMAND = `
  case "$DEPLOY_REF" in
    good) echo one; echo two >&2; printf three ;;
    bad) echo alas; exit 3 ;;
    long) i=0; while [ $i -lt 2000 ]; do echo "line $i"; i=$((i + 1)); done ;;
    red) printf '\\033[31m'; echo begun; touch started; while kill -0 $PPID; do sleep 0.1; done ;;
    slow) echo begun; touch started
          while kill -0 $PPID; do [ -e end ] && exit; [ -e more ] && rm more && echo more; sleep 0.1; done ;; # nothing outlives its service
  esac`;

export interface DeployOptions {
  url?: string;
  key?: string;
  project?: string;
  env?: Record<string, string>;
}

/** A service with a project that does what COMMAND says, and a key for it. */
export async function runningDeployments(t: Test, ...options: string[]) {
  const service = await servedDeployments(t, ...options);
  return { ...service, ...(await service.another()) };
}

/** A service for projects that do what COMMAND says. */
export async function servedDeployments(t: Test, ...options: string[]) {
  const there = place(t);
  const { davit, json, directory } = there;
  const service = await serve(t, directory, ...options);
  return { ...there, url: service.url, service, another };

  async function another() {
    const { project, key } = await inFile(there, async ({ writer }) => {
      const made = await writer.write('projects.create', {
        ...PROJECT,
        name: 'web',
        command: ['sh', '-c', COMMAND],
        directory,
        timeoutMs: 600_000,
      });
      const { secret } = await writer.write('keys.create', KEY);
      return { project: made.id as string, key: secret };
    });
    const envOf = ({ url = service.url, key: otherKey = key, env = {} }: DeployOptions) => ({
      DAVIT_URL: url,
      DAVIT_KEY: otherKey,
      ...env,
    });
    return {
      project,
      key,
      env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', ...envOf({}) },
      deploy: (words: string[], deployOptions: DeployOptions = {}) =>
        davit(['deploy', deployOptions.project ?? project, ...words], { env: envOf(deployOptions) }),
      /** The same in this process, with timers 20 times as fast. */
      deployHastily: (words: string[], url: string) =>
        runHere(['deploy', project, ...words, '--url', url], {
          environment: { DAVIT_KEY: key },
          effects: { ...realEffects, after: (delayMs, action) => realEffects.after(delayMs / 20, action) },
        }),
      startDeploy: (words: string[], deployOptions: DeployOptions = {}): ChildProcess => {
        const child = spawn(process.execPath, [MAIN, 'deploy', project, ...words], {
          cwd: directory,
          env: { ...COMPILE_CACHE, ...envOf(deployOptions) },
          stdio: ['ignore', 'ignore', 'pipe'],
        });
        t.teardown(() => child.kill('SIGKILL'));
        return child;
      },
      deployments: () => json<Deployment[]>(['admin', 'deployment', 'list', '--project', project]),
    };
  }
}

/** Resolves when there is a file of this name. */
export async function untilFile(directory: string, name: string): Promise<void> {
  const watching = watch(directory);
  if (existsSync(join(directory, name))) return;
  for await (const { filename } of watching) {
    if (filename === name) return;
  }
}
