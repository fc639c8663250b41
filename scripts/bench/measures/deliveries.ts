import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type Sqlite from 'better-sqlite3';
import type { SenderKind, SenderRequest } from '../children/sender.ts';
import { fillOutbox, openFile, serveFor } from '../davit.ts';
import {
  alternate,
  type Bench,
  type Contender,
  figureRow,
  type Measure,
  type Missing,
  rowAgainst,
  rowsAgainst,
  samplesOf,
} from '../measure.ts';
import { startPostgres } from '../peers/postgres.ts';
import { startRedis } from '../peers/redis.ts';
import { childOf, monotonicMs } from '../processes.ts';
import { AUTHORITY_PATH, openReceivers, type Receivers, subscribe } from '../receivers.ts';

const RECEIVERS = 200;
/** For each second of a round. */
const DELIVERIES_PER_SECOND = 10_000;

const DAVIT = 'davit, HTTP';
const DAVIT_TLS = 'davit, HTTPS';
const UNDICI = 'undici, nothing signed or stored, HTTP';
const UNDICI_TLS = 'undici, nothing signed or stored, HTTPS';
const ALWAYS = 'BullMQ, appendfsync always';
const EVERY_SECOND = 'BullMQ, appendfsync everysec';
const PG_BOSS = 'pg-boss';
const GRAPHILE = 'graphile-worker, tuned';

/**
 * Many deliveries are due. A round lasts from the first arrival until all are recorded. All contenders send the same
 * kind of body with the same signatures.
 */
export const deliveries: Measure = {
  name: 'deliveries',
  title: `signed deliveries a second, durable outbox and attempts; ${RECEIVERS} receivers, kept-alive connections`,
  async run(bench) {
    const plain = await openReceivers(bench, RECEIVERS);
    const secure = await openReceivers(bench, RECEIVERS, { tls: true });
    const always = await startRedis(bench, 'always', 'bullmq', 'ioredis');
    const everySecond = await startRedis(bench, 'everysec', 'bullmq', 'ioredis');
    const postgres = await startPostgres(bench, 'pg', 'pg-boss', 'graphile-worker');

    const contenders: (Contender<'perSecond'> | Missing)[] = [
      await davitTo(bench, DAVIT, plain),
      await davitTo(bench, DAVIT_TLS, secure),
      await sendingTo(bench, UNDICI, plain, { peer: 'undici' }),
      await sendingTo(bench, UNDICI_TLS, secure, { peer: 'undici' }),
      await sendingTo(bench, ALWAYS, plain, { peer: 'BullMQ', ...always }),
      await sendingTo(bench, EVERY_SECOND, plain, { peer: 'BullMQ', ...everySecond }),
      await sendingTo(bench, PG_BOSS, plain, { peer: 'pg-boss', ...postgres }),
      await sendingTo(bench, GRAPHILE, plain, { peer: 'graphile-worker', ...postgres }),
    ];
    const results = await alternate(bench, contenders, { rehearse: true });
    const perSecond = (name: string) => samplesOf(results, name, 'perSecond');
    const against = rowsAgainst(results, contenders, DAVIT);
    return [
      figureRow(DAVIT, '/s', perSecond(DAVIT)),
      against(UNDICI, 0.6),
      against(ALWAYS, 2.5),
      against(EVERY_SECOND),
      against(PG_BOSS, 1.5),
      against(GRAPHILE, 1.5),
      figureRow(DAVIT_TLS, '/s', perSecond(DAVIT_TLS)),
      rowAgainst(perSecond(DAVIT_TLS), UNDICI_TLS, '/s', perSecond(UNDICI_TLS), 0.6),
    ];
  },
};

async function davitTo(bench: Bench, name: string, receivers: Receivers): Promise<Contender<'perSecond'>> {
  const directory = join(bench.directory, receivers.tls ? 'davit-tls' : 'davit');
  const file = openFile(directory);
  bench.defer(file.close);
  const { keyId } = await file.key();
  const webhookIds = await subscribe(file, keyId, receivers);
  await serveFor(bench, directory, { options: ['--webhook-ca-file', AUTHORITY_PATH] });
  const somethingPending = file.database
    .prepare(`SELECT 1 FROM deliveries WHERE status = 'pending' LIMIT 1`)
    .pluck();

  return round(bench, name, receivers, {
    fill: async () => undefined,
    async deliver(count) {
      // The service finds them within half a second; the round begins when the first arrives.
      fillOutbox(file.database, webhookIds, count / RECEIVERS);
      while (somethingPending.get() !== undefined) await delay(10);
      checkRecorded(file.database);
    },
  });
}

/** Checks that each has one attempt, which was answered with 200. */
function checkRecorded(database: Sqlite.Database): void {
  const wrong = database
    .prepare(`
      SELECT (SELECT count(*) FROM deliveries) - (SELECT count(*) FROM attempts WHERE status_code = 200)`)
    .pluck()
    .get();
  if (wrong !== 0) throw new Error(`${wrong} deliveries were not delivered at the first attempt`);
}

async function sendingTo(
  bench: Bench,
  name: string,
  receivers: Receivers,
  sender: SenderKind | { missing: string },
): Promise<Contender<'perSecond'> | Missing> {
  if ('missing' in sender) return { name, missing: sender.missing };
  const child = childOf(bench, 'sender');
  const ask = (request: SenderRequest) => child.call<void>(request);
  const ca = receivers.tls ? { caPath: AUTHORITY_PATH } : {};
  await ask({ kind: 'open', sender, urls: receivers.urls, ...ca });
  return round(bench, name, receivers, {
    fill: (count) => ask({ kind: 'fill', count }),
    deliver: () => ask({ kind: 'deliver' }),
  });
}

function round(
  { seconds }: Bench,
  name: string,
  receivers: Receivers,
  sender: { fill(count: number): Promise<void>; deliver(count: number): Promise<void> },
): Contender<'perSecond'> {
  const count = Math.max(1, Math.round((seconds * DELIVERIES_PER_SECOND) / RECEIVERS)) * RECEIVERS;
  return {
    name,
    async run() {
      await sender.fill(count);
      await receivers.reset();
      await sender.deliver(count);
      const endedAtMs = monotonicMs();
      const arrivals = await receivers.arrivals();
      if (arrivals.count !== count) throw new Error(`${name}: ${arrivals.count} arrived of ${count}`);
      return { perSecond: (count / (endedAtMs - arrivals.firstAtMs)) * 1000 };
    },
  };
}
