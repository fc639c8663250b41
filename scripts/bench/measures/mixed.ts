import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type { WebhookId } from '../../../src/domain.ts';
import type { LoadResult } from '../children/load.ts';
import { creating, fileToCreateIn } from '../creations.ts';
import { fillOutbox, openFile, serveFor } from '../davit.ts';
import { alternate, figureRow, type Measure, rowAtMost, samplesOf } from '../measure.ts';
import { childOf } from '../processes.ts';
import { openReceivers, subscribe } from '../receivers.ts';

const RECEIVERS = 200;

const WITHOUT = 'accepting, no deliveries';
const WITH = 'accepting while deliveries run flat out';

/** More than can be delivered in a second, for each receiver. */
const PER_RECEIVER_AND_SECOND = 150;

/** The same load on one service, in every other round with more deliveries for each receiver than can be sent. */
export const mixed: Measure = {
  name: 'mixed',
  title: 'accepting a deployment with and without deliveries; 64 connections',
  async run(bench) {
    const directory = join(bench.directory, 'davit');
    const { path, headers, keyId } = await fileToCreateIn(directory);
    const receivers = await openReceivers(bench, RECEIVERS);
    const file = openFile(directory);
    bench.defer(file.close);
    const webhookIds = await subscribe(file, keyId, receivers);
    file.enableWebhooks(webhookIds, false);
    const davit = await serveFor(bench, directory);
    const load = childOf(bench, 'load');
    const accept = () => load.call<LoadResult>(creating(bench, { url: `${davit.url}${path}`, headers }, 64));
    const waiting = file.database
      .prepare<[WebhookId], number>(
        `SELECT 1 FROM deliveries WHERE webhook_id = ? AND status = 'pending' LIMIT 1`,
      )
      .pluck();

    const results = await alternate<'p50Ms' | 'p99Ms' | 'perSecond' | 'delivered'>(
      bench,
      [
        { name: WITHOUT, run: accept },
        { name: WITH, run: acceptWhileDelivering },
      ],
      { rehearse: !bench.quick },
    );
    const figure = (name: string, of: 'p50Ms' | 'p99Ms' | 'perSecond' | 'delivered') =>
      samplesOf(results, name, of);
    return [
      figureRow(`${WITHOUT}, p99`, 'ms', figure(WITHOUT, 'p99Ms')),
      rowAtMost(figure(WITHOUT, 'p99Ms'), `${WITH}, p99`, 'ms', figure(WITH, 'p99Ms'), 3),
      figureRow(`${WITHOUT}, p50`, 'ms', figure(WITHOUT, 'p50Ms')),
      figureRow(`${WITH}, p50`, 'ms', figure(WITH, 'p50Ms')),
      figureRow(WITHOUT, '/s', figure(WITHOUT, 'perSecond')),
      figureRow(WITH, '/s', figure(WITH, 'perSecond')),
      figureRow('deliveries meanwhile', '/s', figure(WITH, 'delivered')),
    ];

    async function acceptWhileDelivering() {
      const seconds = bench.seconds * 1.25 + 2;
      fillOutbox(file.database, webhookIds, Math.ceil(seconds * PER_RECEIVER_AND_SECOND));
      file.enableWebhooks(webhookIds, true);
      await receivers.reset();
      while ((await receivers.arrivals()).count < webhookIds.length) await delay(20);
      const before = await receivers.arrivals();
      const result = await accept();
      const after = await receivers.arrivals();
      if (webhookIds.some((id) => waiting.get(id) === undefined)) {
        throw new Error('all was delivered before the round had ended');
      }
      file.enableWebhooks(webhookIds, false);
      await delay(1_000); // until the service has noticed that
      const delivered = ((after.count - before.count) / (after.lastAtMs - before.lastAtMs)) * 1000;
      return { ...result, delivered };
    }
  },
};
