import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import type { Test } from 'tap';
import { startService } from '../../src/app.ts';
import type { ServeConfig } from '../../src/config.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { openForWriting } from '../../src/store/database.ts';
import { type Store, storeOn } from '../../src/store/store.ts';
import { cidr } from './cidr.ts';
import { type Contract, contractAt } from './contract.ts';
import { type Makers, makers, temporaryDirectory } from './store.ts';

export interface WholeService extends Makers {
  url: string;
  metricsUrl: string | null;
  /** Before the test ends. */
  stop(): Promise<void>;
  /** What it promises at `/v2/openapi.json`. */
  contract: Contract;
  /** Another connection to its file, as `davit admin` has. */
  admin: Store;
  /** What the file holds, asked on a connection of its own. */
  query<Row = Record<string, unknown>>(sql: string, ...parameters: unknown[]): Row[];
}

/**
 * All of davit in this process and its threads: HTTP, writer, executor with its spawner, dispatcher. Its webhooks
 * may lead to receivers on this machine. Stopped when the test ends; fails the test if a part of it dies.
 */
export async function startWholeService(
  t: Test,
  changes: Partial<ServeConfig> = {},
  effects: Effects = realEffects,
): Promise<WholeService> {
  const dbPath = changes.dbPath ?? join(temporaryDirectory(t), 'davit.db');
  const service = await startService({ ...CONFIG, ...changes, dbPath }, effects, (error) =>
    t.fail('the service died', { error }),
  );
  const admin = storeOn(openForWriting(dbPath, realEffects), realEffects);
  const reader = new Sqlite(dbPath, { readonly: true });
  t.teardown(async () => {
    reader.close();
    await service.stop();
    await admin.close();
  });
  return {
    ...makers(admin),
    url: service.url,
    metricsUrl: service.metricsUrl,
    stop: service.stop,
    contract: await contractAt(service.url),
    admin,
    query: <Row>(sql: string, ...parameters: unknown[]) => reader.prepare(sql).all(...parameters) as Row[],
  };
}

export const CONFIG: Omit<ServeConfig, 'dbPath'> = {
  listen: { host: '127.0.0.1', port: 0 },
  tls: null,
  trustProxyCidrs: [],
  rateLimit: null,
  maxConcurrent: 2,
  maxQueued: 100,
  webhookTimeoutMs: 10_000,
  webhookRetryDelaysMs: [5_000, 30_000],
  webhookRetryWindowMs: 24 * 60 * 60_000,
  webhookAllowCidrs: [cidr('127.0.0.0/8')],
  webhookAllowHttp: true,
  webhookCaFile: null,
  metricsListen: null,
  retentionMs: null,
  logLevel: 'silent',
  shutdownGraceMs: 1_000,
};
