import { mkdirSync } from 'node:fs';
import type { KeyId } from '../../src/domain.ts';
import type { LoadRequest, LoadResult } from './children/load.ts';
import { openFile } from './davit.ts';
import type { Bench } from './measure.ts';
import { type Child, processorMsOf } from './processes.ts';

/** Where to ask, as whom, and which process answers. */
export interface Target {
  url: string;
  headers: Record<string, string>;
  processId: number;
}

/**
 * One round of load. What the server computed for each request depends least on what else the machine does: it
 * is told besides.
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

/** A file with one project, whose deployments each have an outbox row. */
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

/** The load of creating deployments; a quarter of the time goes by first. */
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
