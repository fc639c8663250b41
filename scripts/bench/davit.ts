import { closeSync, mkdirSync, openSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type Sqlite from 'better-sqlite3';
import {
  type KeyId,
  newId,
  type ProjectId,
  type Ref,
  SCOPES,
  timestamp,
  type WebhookId,
} from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { openForWriting } from '../../src/store/database.ts';
import { createWriter } from '../../src/store/group-commit.ts';
import { WEBHOOKS_OF_KEY_MAX } from '../../src/store/webhooks.ts';
import type { Bench } from './measure.ts';
import { lineOf, monotonicMs, type Running, start } from './processes.ts';

export const EXECUTABLE = join(import.meta.dirname, '../../build/davit');

/** Every feature is on, and no limit is reached. */
const OPTIONS = [
  ...['--listen', '127.0.0.1:0'],
  ...['--rate-limit', '999999/1s'],
  ...['--max-queued', 'off'],
  ...['--log-level', 'info'],
  ...['--webhook-allow-http', '--webhook-allow-cidr', '127.0.0.0/8'],
];

export interface Davit extends Running {
  url: string;
  /** From its start to its first line. */
  readyMs: number;
}

/** `davit serve` as it is packaged, ready, on `davit.db` in `directory`; its log goes to a file beside that. */
export async function serve(
  directory: string,
  {
    options = [],
    environment = {},
    executable = EXECUTABLE,
  }: { options?: string[]; environment?: Record<string, string>; executable?: string } = {},
): Promise<Davit> {
  const logPath = join(directory, 'davit.log');
  const log = openSync(logPath, 'a');
  const startedAtMs = monotonicMs();
  const running = start(executable, ['serve', '--db', join(directory, 'davit.db'), ...OPTIONS, ...options], {
    env: { PATH: '/usr/bin:/bin', ...environment },
    stdio: ['ignore', 'pipe', log],
  });
  closeSync(log);
  const [, url = ''] = await lineOf(running, /^davit listening on (\S+)$/m);
  const readyMs = monotonicMs() - startedAtMs;
  let stopping = false;
  running.child.on('exit', (exitCode, signal) => {
    // The measure would mean nothing, or wait for ever.
    if (!stopping) throw new Error(`davit ended with ${signal ?? exitCode}: ${tailOf(logPath)}`);
  });
  return {
    ...running,
    url,
    readyMs,
    stop(signal) {
      stopping = true;
      return running.stop(signal);
    },
  };
}

/** The same until the measure has ended. */
export async function serveFor(
  { defer }: Pick<Bench, 'defer'>,
  ...started: Parameters<typeof serve>
): Promise<Davit> {
  const davit = await serve(...started);
  defer(() => davit.stop());
  return davit;
}

function tailOf(path: string): string {
  return readFileSync(path, 'utf8').slice(-2_000);
}

/** Creates a davit file in `directory`, and writes to it as `davit admin` does, also while a service runs. */
export function openFile(directory: string): DavitFile {
  mkdirSync(directory, { recursive: true });
  const path = join(directory, 'davit.db');
  const database = openForWriting(path, realEffects);
  const writer = createWriter(openForWriting(path, realEffects), realEffects);
  /** By the key that was asked for: how many webhooks it was asked for, and which key gets the next ones. */
  const made = new Map<KeyId, number>();
  const successors = new Map<KeyId, KeyId>();
  const newKey = () =>
    writer.write('keys.create', {
      name: 'bench',
      scopes: [...SCOPES],
      allProjects: true,
      projectIds: [],
      expiresInMs: null,
    });

  return {
    database,
    async key() {
      const { key, secret } = await newKey();
      return { keyId: key.id, secret };
    },
    async project(name, command = null) {
      const project = await writer.write('projects.create', {
        name,
        command,
        directory: null,
        timeoutMs: 30 * 60_000,
        idleTimeoutMs: null,
        reportTimeoutMs: null,
        policy: 'queue',
        variables: {},
      });
      return project.id;
    },
    async webhook(keyId, url, events) {
      const count = made.get(keyId) ?? 0;
      made.set(keyId, count + 1);
      // Half the maximum for each key, as a key may have some already.
      const isFull = count > 0 && count % (WEBHOOKS_OF_KEY_MAX / 2) === 0;
      if (isFull) successors.set(keyId, (await newKey()).key.id);
      const owner = successors.get(keyId) ?? keyId;
      const webhook = await writer.write('webhooks.create', { keyId: owner, url, events, description: null });
      return webhook.id;
    },
    enableWebhooks(webhookIds, enabled) {
      const set = database.prepare('UPDATE webhooks SET status = ? WHERE id = ?');
      database
        .transaction(() => {
          for (const id of webhookIds) set.run(enabled ? 'enabled' : 'disabled', id);
        })
        .immediate();
    },
    async deploy(projectId, count) {
      const ref = 'v1.2.3' as Ref;
      const rest = { trigger: 'admin', keyId: null, redeployOf: null, maxQueued: null } as const;
      const one = () => writer.write('deployments.create', { projectId, ref, ...rest });
      await Promise.all(Array.from({ length: count }, one));
    },
    async pause(projectIds, paused) {
      const status = paused ? 'paused' : 'active';
      await Promise.all(projectIds.map((id) => writer.write('projects.setStatus', { id, status })));
    },
    async close() {
      database.close();
      await writer.close();
    },
  };
}

export interface DavitFile {
  database: Sqlite.Database;
  /** A key with all scopes and projects. */
  key(): Promise<{ keyId: KeyId; secret: string }>;
  /** Without a command, another system does the work and reports it. */
  project(name: string, command?: [string, ...string[]] | null): Promise<ProjectId>;
  webhook(
    keyId: KeyId,
    url: string,
    events: ('deployment.created' | 'deployment.canceled')[],
  ): Promise<WebhookId>;
  /** A running service takes it up within half a second. */
  enableWebhooks(webhookIds: readonly WebhookId[], enabled: boolean): void;
  /** Creates so many deployments, as `davit admin deployment create` does. */
  deploy(projectId: ProjectId, count: number): Promise<void>;
  pause(projectIds: readonly ProjectId[], paused: boolean): Promise<void>;
  close(): Promise<void>;
}

/** The event that is delivered in all comparisons, as davit writes it, with an id of its own. */
export function exampleEvent(): { id: string; deploymentId: string; body: string } {
  const id = newId('evt', realEffects);
  const deploymentId = newId('dpl', realEffects);
  const data = { deployment_id: deploymentId, project_id: 'prj_0bTz7XcQmD5fKpW2rVhYn8', ref: 'v1.2.3' };
  const body = JSON.stringify({ id, type: 'deployment.canceled', created_at: timestamp(Date.now()), data });
  return { id, deploymentId, body };
}

/**
 * Adds `perWebhook` events with a pending delivery for each webhook, in one transaction: a running service sees none or
 * all of them.
 */
export function fillOutbox(
  database: Sqlite.Database,
  webhookIds: readonly WebhookId[],
  perWebhook: number,
): void {
  const insertEvent = database.prepare(`
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    VALUES (?, 'deployment.canceled', ?, 'prj_1', ?, ?)`);
  const insertDelivery = database.prepare(`
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at, ladder_started_at,
                            ladder_trigger)
    VALUES (?, ?, 'deployment.canceled', ?, 'pending', ?, ?, ?, 'schedule')`);
  database
    .transaction(() => {
      const atMs = Date.now();
      for (let index = 0; index < perWebhook; index += 1) {
        const event = exampleEvent();
        insertEvent.run(event.id, event.deploymentId, atMs, event.body);
        for (const webhookId of webhookIds) {
          insertDelivery.run(newId('dlv', realEffects), event.id, webhookId, atMs, atMs, atMs);
        }
      }
    })
    .immediate();
}
