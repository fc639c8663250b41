import type { Test } from 'tap';
import type { DeploymentId, KeyId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { type DeploymentsHttp, startDeploymentsHttp } from './deploying.ts';
import { appendTo, endOf, newDeployment, type TestStore, testStore } from './store.ts';

interface Running {
  http: DeploymentsHttp;
  id: DeploymentId;
  key: string;
  keyId: KeyId;
}

/** A deployment with the status running, but no process: the test writes its log. */
export async function running(
  t: Test,
  effects = realEffects,
  store = testStore(t, effects),
): Promise<Running> {
  const http = await startDeploymentsHttp(t, { effects, store });
  const { secret: key, keyId } = await store.key();
  const { id } = await store.writer.write('deployments.create', newDeployment(await store.project()));
  await store.writer.write('deployments.claim', undefined);
  return { http, id, key, keyId };
}

export async function print(store: TestStore, id: DeploymentId, text: string | Buffer): Promise<void> {
  const bytes = Buffer.from(text);
  const start = store.reads.deployments.existing(id).log_bytes;
  await append(store, id, start, bytes, start + bytes.length);
}

export async function append(
  store: TestStore,
  id: DeploymentId,
  start: number,
  bytes: Buffer,
  logBytes: number,
): Promise<void> {
  const chunks = [];
  for (let at = 0; at < bytes.length; at += 65_536) {
    chunks.push({ start: start + at, bytes: bytes.subarray(at, at + 65_536) });
  }
  await store.writer.write('logs.append', appendTo(id, chunks, { logBytes }));
}

export async function finish(store: TestStore, id: DeploymentId): Promise<void> {
  await store.writer.write('deployments.finish', endOf(id));
}

export function getLog(
  { port }: DeploymentsHttp,
  id: string,
  key: string,
  query: string,
  headers: Record<string, string> = {},
): Promise<Response> {
  return fetch(`http://127.0.0.1:${port}/v2/deployments/${id}/logs${query}`, {
    headers: { authorization: `Bearer ${key}`, ...headers },
  });
}

export async function textAt(http: DeploymentsHttp, id: string, key: string, query: string): Promise<string> {
  return await (await getLog(http, id, key, query)).text();
}
