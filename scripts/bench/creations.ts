import { mkdirSync } from 'node:fs';
import type { KeyId } from '../../src/domain.ts';
import type { LoadRequest, LoadResult } from './children/load.ts';
import { openFile } from './davit.ts';
import type { Bench } from './measure.ts';
import { type Child, processorMsOf } from './processes.ts';

/** A server under load: its address, the headers to send, and its process. */
export interface Target {
  url: string;
  headers: Record<string, string>;
  processId: number;
}

/**
 * One round of load. The result also has the server's processor time per request, which depends least on what else the
 * machine does.
 */
export async function loaded(
  client: Child,
  { processId }: Target,
  request: LoadRequest,
): Promise<LoadResult & { processorUs: number }> {
  const beforeMs = processorMsOf(processId);
  const result = await client.call<LoadResult>(request);
  return { ...result, processorUs: ((processorMsOf(processId) - beforeMs) / result.requests) * 1000 };
}

/** Creates a file with a project, each deployment of which makes an outbox row. */
export async function fileToCreateIn(
  directory: string,
): Promise<{ path: string; headers: Record<string, string>; keyId: KeyId }> {
  mkdirSync(directory);
  const file = openFile(directory);
  const { keyId, secret } = await file.key();
  const projectId = await file.project('website');
  const webhookId = await file.webhook(keyId, 'https://192.0.2.1/hook', ['deployment.created']);
  file.enableWebhooks([webhookId], false);
  await file.close();
  return {
    path: `/v2/projects/${projectId}/deployments`,
    headers: { Authorization: `Bearer ${secret}` },
    keyId,
  };
}

/** The load of creating deployments, after a warm-up of a quarter of the time. */
export function creating(
  { seconds }: Bench,
  target: Pick<Target, 'url' | 'headers'>,
  connections: number,
): LoadRequest {
  return {
    url: target.url,
    headers: target.headers,
    connections,
    seconds,
    warmUpSeconds: seconds / 4,
    method: 'POST',
    body: JSON.stringify({ ref: 'v1.2.3' }),
    idempotencyKeys: true,
  };
}
