import { randomBytes } from 'node:crypto';
import { join } from 'node:path';
import { realEffects } from '../../../src/effects.ts';
import { type Database, openForWriting } from '../../../src/store/database.ts';
import { exampleEvent } from '../davit.ts';
import { answerRequests } from './answer.ts';

/** SQLite with davit's tables and `synchronous=FULL`, and nothing around it. */
interface CommitsRequest {
  directory: string;
  /** Deployments in one commit. */
  groupSize: number;
  seconds: number;
}

const files = new Map<string, ReturnType<typeof open>>();

answerRequests(async ({ directory, groupSize, seconds }: CommitsRequest) => {
  const { insertAll } = files.get(directory) ?? open(directory);
  const fromMs = performance.now();
  let deployments = 0;
  while (performance.now() - fromMs < seconds * 1000) {
    insertAll(groupSize);
    deployments += groupSize;
  }
  return { perSecond: (deployments / (performance.now() - fromMs)) * 1000 };
});

function open(directory: string) {
  const database = openForWriting(join(directory, 'davit.db'), realEffects);
  const insertOne = inserter(database);
  const insertAll = database.transaction((count: number) => {
    for (let index = 0; index < count; index += 1) insertOne();
  });
  const file = { insertAll: insertAll.immediate };
  files.set(directory, file);
  return file;
}

/**
 * Inserts the rows of a created deployment: itself, its event, an outbox row, and the answer to its Idempotency-Key.
 */
function inserter(database: Database): () => void {
  database.exec(`
    INSERT INTO keys (id, name, scopes, all_projects, created_at) VALUES ('key_1', 'bench', '[]', 1, 1);
    INSERT INTO projects (id, name, status, created_at, policy) VALUES ('prj_1', 'website', 'active', 1, 'queue');
    INSERT INTO webhooks (id, key_id, url, events, status, created_at, enabled_at)
    VALUES ('whk_1', 'key_1', 'https://192.0.2.1/hook', '[]', 'disabled', 1, 1)`);
  const insertDeployment = database.prepare(`
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_by_key_id, created_at)
    VALUES (?, 'prj_1', 'v1.2.3', 'queued', 1, 'api', 'key_1', ?)`);
  const insertEvent = database.prepare(`
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    VALUES (?, 'deployment.created', ?, 'prj_1', ?, ?)`);
  const insertDelivery = database.prepare(`
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at, ladder_started_at,
                            ladder_trigger)
    VALUES (?, ?, 'deployment.created', 'whk_1', 'pending', ?, ?, ?, 'schedule')`);
  const remember = database.prepare(`
    INSERT INTO idempotency_keys (key_id, idempotency_key, request_hash, status_code, body, created_at)
    VALUES ('key_1', ?, ?, 201, ?, ?)`);
  const hash = randomBytes(32);
  const answer = 'x'.repeat(560);
  let number = 0;

  return () => {
    number += 1;
    const atMs = Date.now();
    const { id, deploymentId, body } = exampleEvent();
    insertDeployment.run(deploymentId, atMs);
    insertEvent.run(id, deploymentId, atMs, body);
    insertDelivery.run(`dlv_${number}`, id, atMs, atMs, atMs);
    remember.run(`key-${number}`, hash, answer, atMs);
  };
}
