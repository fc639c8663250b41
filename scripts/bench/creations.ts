import { mkdirSync } from 'node:fs';
import type { KeyId } from '../../src/domain.ts';
import type { LoadRequest } from './children/load.ts';
import { openFile } from './davit.ts';
import type { Bench } from './measure.ts';

/** Where to POST, and as whom. */
export interface Target {
  url: string;
  headers: Record<string, string>;
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

/** A quarter of the time goes by first. */
export function creating({ seconds }: Bench, target: Target, connections: number): LoadRequest {
  return {
    ...target,
    connections,
    seconds,
    warmUpSeconds: seconds / 4,
    method: 'POST',
    body: JSON.stringify({ ref: 'v1.2.3' }),
    idempotencyKeys: true,
  };
}
