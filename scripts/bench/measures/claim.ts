import { join } from 'node:path';
import type { WebhookId } from '../../../src/domain.ts';
import { openForReading } from '../../../src/store/database.ts';
import { outboxReads } from '../../../src/store/outbox.ts';
import { fillOutbox, openFile } from '../davit.ts';
import {
  alternate,
  type Bench,
  type Contender,
  figureRow,
  type Measure,
  rowAtMost,
  rowBelow,
  samplesOf,
} from '../measure.ts';

const WEBHOOKS = 1_000;
const BATCH = 256;

const FEW = '1,000 pending';
const MANY = '1,000,000 pending';
const FOUR = '1,000,000 pending, four of each webhook';

/**
 * Calls the function by which the dispatcher claims, on a file of its own: webhooks in turn, one delivery of each.
 * Nothing is settled, so that the same deliveries are claimed again and again.
 */
export const claim: Measure = {
  name: 'claim',
  title: `fair claim for ${WEBHOOKS.toLocaleString('en')} webhooks, ${BATCH} deliveries at a time, for each`,
  async run(bench) {
    const few = await fileWith(bench, 'few', 1);
    const many = await fileWith(bench, 'many', 1_000);
    const results = await alternate(
      bench,
      [claiming(bench, FEW, few, 1), claiming(bench, MANY, many, 1), claiming(bench, FOUR, many, 4)],
      { rehearse: true },
    );
    const microseconds = (name: string) => samplesOf(results, name, 'microseconds');
    return [
      figureRow(FEW, 'µs', microseconds(FEW)),
      rowBelow(MANY, 'µs', microseconds(MANY), 2),
      rowAtMost(microseconds(FEW), `${MANY}, to ${FEW}`, 'µs', microseconds(MANY), 2),
      figureRow(FOUR, 'µs', microseconds(FOUR)),
    ];
  },
};

interface OutboxFile {
  path: string;
  webhookIds: WebhookId[];
}

async function fileWith(bench: Bench, name: string, perWebhook: number): Promise<OutboxFile> {
  const directory = join(bench.directory, name);
  const file = openFile(directory);
  const { keyId } = await file.key();
  const webhookIds: WebhookId[] = [];
  for (let number = 1; number <= WEBHOOKS; number += 1) {
    webhookIds.push(await file.webhook(keyId, `https://192.0.2.1/${number}`, ['deployment.canceled']));
  }
  bench.progress(`making a file with ${(WEBHOOKS * perWebhook).toLocaleString('en')} pending deliveries`);
  fillOutbox(file.database, webhookIds, perWebhook);
  await file.close();
  return { path: join(directory, 'davit.db'), webhookIds };
}

function claiming(
  { seconds, defer }: Bench,
  name: string,
  { path, webhookIds }: OutboxFile,
  limit: number,
): Contender<'microseconds'> {
  const database = openForReading(path);
  defer(() => database.close());
  const reads = outboxReads(database);
  const requests = webhookIds.map((webhookId) => ({ webhookId, limit, underWay: [], ahead: [] }));
  let turn = 0;
  return {
    name,
    async run() {
      const fromMs = performance.now();
      let claimed = 0;
      while (performance.now() - fromMs < seconds * 1000) {
        // The next webhooks in turn.
        const batch = Array.from({ length: BATCH / limit }, () => requests[turn++ % WEBHOOKS] ?? never());
        for (const { due } of reads.claim(batch, Date.now())) claimed += due.length;
      }
      return { microseconds: ((performance.now() - fromMs) / claimed) * 1000 };
    },
  };
}

function never(): never {
  throw new Error('there are as many requests as webhooks');
}
