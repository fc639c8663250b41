import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type { LoadRequest, LoadResult } from '../children/load.ts';
import { fileToCreateIn } from '../creations.ts';
import { openFile, serveFor } from '../davit.ts';
import { figureRow, type Measure, rowBelow } from '../measure.ts';
import { childOf, type Memory, memoryOf } from '../processes.ts';
import { openReceivers } from '../receivers.ts';
import { median } from '../statistics.ts';

const SETTLED_AFTER_SECONDS = 6;
const IDLE_SECONDS = 3;
const MINUTES = 10;
/** Limited, as at full speed ten minutes would make a file of 10 GB. */
const CREATIONS_PER_SECOND = 1_500;

/**
 * The memory of all processes of the service, idle and then under load: deployments at a steady rate, a delivery of
 * each, and pages of them as fast as 32 connections can read.
 */
export const memory: Measure = {
  name: 'memory',
  title: 'resident memory of the service, idle and under load',
  async run(bench) {
    const directory = join(bench.directory, 'davit');
    const { path, headers, keyId } = await fileToCreateIn(directory);
    const receivers = await openReceivers(bench, 1);
    const file = openFile(directory);
    await file.webhook(keyId, receivers.urls[0] ?? '', ['deployment.created']);
    await file.close();
    const davit = await serveFor(bench, directory);
    bench.progress('idle');
    // By then the service has given back the memory of its start.
    await delay(SETTLED_AFTER_SECONDS * 1000);
    const idle = await watch(davit.processId, delay(IDLE_SECONDS * 1000));

    const seconds = bench.quick ? 10 * bench.seconds : MINUTES * 60;
    bench.progress(`${seconds} s of load`);
    const url = `${davit.url}${path}`;
    const common = { url, headers, seconds, warmUpSeconds: 0 };
    const creations = childOf(bench, 'load').call<LoadResult>({
      ...common,
      method: 'POST',
      body: '{"ref":"v1.2.3"}',
      connections: 64,
      idempotencyKeys: true,
      requestsPerSecond: CREATIONS_PER_SECOND,
    } satisfies LoadRequest);
    const pages = childOf(bench, 'load').call<LoadResult>({
      ...common,
      method: 'GET',
      connections: 32,
    } satisfies LoadRequest);
    const load = Promise.all([creations, pages]);
    const loaded = await watch(davit.processId, load);
    const [{ perSecond: created }, { perSecond: read }] = await load;
    return rows(idle, loaded, { seconds, created, read });
  },
};

function rows(idle: Memory[], loaded: Memory[], load: { seconds: number; created: number; read: number }) {
  const proportional = (samples: Memory[]) => samples.map(({ proportionalMb }) => proportionalMb);
  const resident = (samples: Memory[]) => samples.map(({ residentMb }) => residentMb);
  const secondQuarter = loaded.slice(Math.floor(loaded.length / 4), Math.floor(loaded.length / 2));
  const lastQuarter = loaded.slice(Math.floor((loaded.length * 3) / 4));
  const growth = median(proportional(lastQuarter)) / median(proportional(secondQuarter));
  const under = `after ${load.seconds} s of load`;
  return [
    rowBelow('idle (PSS)', 'MB', proportional(idle), 120),
    figureRow('idle, what processes share counted for each (RSS)', 'MB', resident(idle)),
    rowBelow(`${under} (PSS)`, 'MB', proportional(lastQuarter), 250),
    figureRow(`${under}, what processes share counted for each (RSS)`, 'MB', resident(lastQuarter)),
    rowBelow('last quarter of it to the second', 'times', [growth], 1.1),
    figureRow('created meanwhile', '/s', [load.created]),
    figureRow('pages of 50 read meanwhile', '/s', [load.read]),
  ];
}

/** Samples the resident memory every second until `end`. */
async function watch(processId: number, end: Promise<unknown>): Promise<Memory[]> {
  const samples: Memory[] = [];
  let ended = false;
  const over = end.finally(() => {
    ended = true;
  });
  while (!ended) {
    await Promise.race([over, delay(1_000)]);
    samples.push(memoryOf(processId));
  }
  return samples;
}
