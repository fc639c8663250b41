import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { watch } from 'node:fs/promises';
import { join } from 'node:path';
import type { Test } from 'tap';
import type { Deployment, Key } from '../../src/domain.ts';
import { COMPILE_CACHE, MAIN, type Place, place } from './cli.ts';
import { serve } from './served.ts';

/** What a test deploys is what its command does. */
const COMMAND = `
  case "$DEPLOY_REF" in
    good) echo one; echo two >&2; printf three ;;
    bad) echo alas; exit 3 ;;
    long) i=0; while [ $i -lt 2000 ]; do echo "line $i"; i=$((i + 1)); done ;;
    slow) echo begun; touch started; exec sleep 600 ;;
  esac`;

export interface DeployOptions {
  url?: string;
  key?: string;
  project?: string;
  env?: Record<string, string>;
}

/** A service with a project that does what COMMAND says, and a key for it. */
export async function runningDeployments(t: Test, options: string[] = []) {
  const there: Place = place(t);
  const { davit, json, directory } = there;
  const made = await davit([
    'admin',
    'project',
    'create',
    '--name',
    'web',
    '--dir',
    '.',
    '--',
    'sh',
    '-c',
    COMMAND,
  ]);
  const project = made.stdout.trim();
  const { secret } = await json<Key & { secret: string }>([
    ...['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects'],
  ]);
  const service = await serve(t, directory, ...options);
  const envOf = ({ url = service.url, key = secret, env = {} }: DeployOptions) => ({
    DAVIT_URL: url,
    DAVIT_KEY: key,
    ...env,
  });
  return {
    ...there,
    url: service.url,
    service,
    project,
    key: secret,
    env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', ...envOf({}) },
    deploy: (words: string[], deployOptions: DeployOptions = {}) =>
      davit(['deploy', deployOptions.project ?? project, ...words], { env: envOf(deployOptions) }),
    startDeploy: (words: string[]): ChildProcess => {
      const child = spawn(process.execPath, [MAIN, 'deploy', project, ...words], {
        cwd: directory,
        env: { ...COMPILE_CACHE, ...envOf({}) },
        stdio: ['ignore', 'ignore', 'pipe'],
      });
      t.teardown(() => child.kill('SIGKILL'));
      return child;
    },
    deployments: () => json<Deployment[]>(['admin', 'deployment', 'list']),
  };
}

/** Resolves when there is a file of this name. */
export async function untilFile(directory: string, name: string): Promise<void> {
  const watching = watch(directory);
  if (existsSync(join(directory, name))) return;
  for await (const { filename } of watching) {
    if (filename === name) return;
  }
}
