import { join } from 'node:path';
import type { KeyId, WebhookId } from '../../src/domain.ts';
import type { Arrivals, ReceiversRequest } from './children/receivers.ts';
import type { DavitFile } from './davit.ts';
import type { Bench } from './measure.ts';
import { childOf } from './processes.ts';

/** A certificate for localhost and 127.0.0.1, and ca.pem, which signed it. */
const CERTIFICATES = join(import.meta.dirname, '../../test/fixtures/tls');
export const AUTHORITY_PATH = join(CERTIFICATES, 'ca.pem');

/** Receivers of deliveries, all in one process. */
export interface Receivers {
  urls: string[];
  tls: boolean;
  /** Starts counting from 0. */
  reset(): Promise<void>;
  arrivals(): Promise<Arrivals>;
}

/** Opens receivers, which are closed with the measure. */
export async function openReceivers(bench: Bench, count: number, { tls = false } = {}): Promise<Receivers> {
  const child = childOf(bench, 'receivers');
  const ask = <Answer>(request: ReceiversRequest) => child.call<Answer>(request);
  const certificate = {
    certPath: join(CERTIFICATES, 'localhost.pem'),
    keyPath: join(CERTIFICATES, 'localhost.key'),
  };
  return {
    urls: await ask({ kind: 'open', count, ...(tls ? { tls: certificate } : {}) }),
    tls,
    reset: () => ask({ kind: 'reset' }),
    arrivals: () => ask({ kind: 'arrivals' }),
  };
}

/** Creates a webhook for each receiver, which subscribes to the events of `fillOutbox`. */
export async function subscribe(file: DavitFile, keyId: KeyId, { urls }: Receivers): Promise<WebhookId[]> {
  const webhookIds: WebhookId[] = [];
  for (const url of urls) webhookIds.push(await file.webhook(keyId, url, ['deployment.canceled']));
  return webhookIds;
}
