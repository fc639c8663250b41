import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { statSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { listeningUrl } from './listening-url.ts';

const CODE_WRITER = join(import.meta.dirname, 'write-code.cjs');

/** The files on which it depends what code is recorded. */
export const RECORDER = [import.meta.filename, CODE_WRITER];

/** Long enough for an emulated processor, which is some twenty times slower. */
const PATIENCE_MS = 120_000;

/** Without davit's own variables, which would be taken for options. */
const ENVIRONMENT = { PATH: process.env['PATH'], TMPDIR: process.env['TMPDIR'] };

/** The file of the code that was recorded of a bundle. */
export function codeName(bundle: string): string {
  return `${bundle}.code`;
}

/**
 * Runs the service for a moment, and has its threads write the code that V8 has compiled of their bundles to `directory`.
 * V8 compiles a function when it is first called, so davit is used before: with code recorded right after the start, its
 * first request took 16 ms, not 10.
 */
export async function recordCode(
  executable: string,
  directory: string,
  bundles: readonly string[],
): Promise<void> {
  const database = join(directory, 'davit.db');
  const used = join(directory, 'used');
  const child = spawn(
    executable,
    [
      ...['serve', '--db', database, '--listen', '127.0.0.1:0', '--log-level', 'warn'],
      ...['--webhook-allow-http', '--webhook-allow-cidr', '127.0.0.0/8'],
    ],
    {
      stdio: ['ignore', 'pipe', 'inherit'],
      env: {
        ...ENVIRONMENT,
        NODE_OPTIONS: `--require=${JSON.stringify(CODE_WRITER)}`,
        CODE_DIRECTORY: directory,
        USED: used,
      },
      timeout: PATIENCE_MS,
    },
  );
  const ended = once(child, 'exit');
  try {
    const url = await listeningUrl(child);
    if (url === undefined) throw new Error('the davit whose code is recorded did not start');
    await use(url, (...words) => admin(executable, database, words));
    writeFileSync(used, '');
    while (bundles.some((name) => statSync(join(directory, codeName(name))).size === 0)) {
      if (child.exitCode !== null || child.signalCode !== null)
        throw new Error('the davit whose code is recorded has ended');
      await delay(50);
    }
  } finally {
    child.kill('SIGTERM');
    await ended;
  }
}

/** Returns what the command prints for scripts: an id or, for a new key, its secret. */
function admin(executable: string, database: string, [noun = '', verb = '', ...words]: string[]): string {
  const output = execFileSync(executable, ['admin', noun, verb, '--db', database, ...words], {
    env: ENVIRONMENT,
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'pipe'], // stderr only becomes part of an error
  });
  return output.trim();
}

/** Does what davit is there for: a deployment is created, carried out, looked at, and told to a receiver. */
async function use(url: string, run: (...words: string[]) => string): Promise<void> {
  const project = run('project', 'create', '--name', 'project', '--', '/bin/true');
  const key = run('key', 'create', '--name', 'key', '--all-projects', '--all-scopes');
  const receiver = createServer((_request, response) => response.end());
  const told = once(receiver, 'request', { signal: AbortSignal.timeout(PATIENCE_MS) });
  await once(receiver.listen(0, '127.0.0.1'), 'listening');
  try {
    const { port } = receiver.address() as AddressInfo;
    await call('POST', '/v2/webhooks', {
      url: `http://127.0.0.1:${port}/`,
      events: ['deployment.succeeded'],
    });
    const created = await call('POST', `/v2/projects/${project}/deployments`, { ref: 'main' });
    const { id } = JSON.parse(created) as { id: string };
    await call('GET', `/v2/deployments/${id}?wait=60`);
    await told;
    for (const path of ['/v2/projects', '/v2/deployments', `/v2/deployments/${id}/logs`])
      await call('GET', path);
  } finally {
    receiver.close();
  }

  async function call(method: 'GET' | 'POST', path: string, body?: unknown): Promise<string> {
    const response = await fetch(url + path, {
      method,
      headers: {
        Authorization: `Bearer ${key}`,
        'Content-Type': 'application/json',
        'Idempotency-Key': crypto.randomUUID(),
      },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    const text = await response.text();
    if (!response.ok) throw new Error(`${method} ${path} answered ${response.status}: ${text}`);
    return text;
  }
}
