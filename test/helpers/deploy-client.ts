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
import { KEY, PROJECT, temporaryDirectory } from './store.ts';

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
    slow) echo begun; touch started
          while kill -0 $PPID; do [ -e end ] && exit; [ -e more ] && rm more && echo more; sleep 0.1; done ;; # nothing outlives its service
  esac`;

export interface DeployOptions {
  url?: string;
  key?: string;
  project?: string;
  /** Of davit itself; options are read from that of the process. */
  environment?: Record<string, string>;
  /** Makes it a process of its own. */
  env?: Record<string, string>;
}

/** A service for projects that do what COMMAND says. */
export async function servedDeployments(t: Test, ...options: string[]) {
  const there = place(t);
  const { davit, json } = there;
  const service = await serve(t, there.directory, ...options);
  return { ...there, url: service.url, service, another };

  /** Such a project in a directory of its own, and a key for it. */
  async function another(t: Test) {
    const directory = temporaryDirectory(t);
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
    const env = { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', DAVIT_URL: service.url, DAVIT_KEY: key };
    return {
      directory,
      project,
      key,
      env,
      deploy(words: string[], changes: DeployOptions = {}) {
        const { url = service.url, key: DAVIT_KEY = key, environment = {} } = changes;
        const all = ['deploy', changes.project ?? project, ...words, '--url', url];
        return changes.env === undefined
          ? runHere(all, { environment: { DAVIT_KEY, ...environment } })
          : davit(all, { env: { DAVIT_KEY, ...changes.env } });
      },
      /** The same with timers 20 times as fast. */
      deployHastily: (words: string[], url: string) =>
        runHere(['deploy', project, ...words, '--url', url], {
          environment: { DAVIT_KEY: key },
          effects: { ...realEffects, after: (delayMs, action) => realEffects.after(delayMs / 20, action) },
        }),
      startDeploy: (
        words: string[],
        url = service.url,
        stdout: 'ignore' | 'pipe' = 'ignore',
      ): ChildProcess => {
        const child = spawn(process.execPath, [MAIN, 'deploy', project, ...words, '--url', url], {
          env,
          stdio: ['ignore', stdout, 'pipe'],
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
