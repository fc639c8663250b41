import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { openFile, serveFor } from '../davit.ts';
import {
  alternate,
  type Bench,
  type Contender,
  figureRow,
  type Measure,
  type Missing,
  rowBelow,
  rowMissing,
  samplesOf,
} from '../measure.ts';
import { startWebhook } from '../peers/webhook.ts';
import { percentile } from '../statistics.ts';

const DAVIT = 'davit';
const WEBHOOK = "Debian's webhook";

/** Prints the time as the first thing it does; the time to load it counts. */
const COMMAND = ['/bin/date', '+%s.%N'] as const;

type Figure = 'p50Ms' | 'p99Ms';

export const trigger: Measure = {
  name: 'trigger',
  title: 'from sending the request to the clock that the command reads, one at a time, all else idle',
  async run(bench) {
    const davit = await davitTriggers(bench);
    const webhook = await webhookTriggers(bench);
    const results = await alternate(bench, [davit, webhook], { rehearse: true });
    return [
      figureRow(`${DAVIT}, p50`, 'ms', samplesOf(results, DAVIT, 'p50Ms')),
      rowBelow(`${DAVIT}, p99`, 'ms', samplesOf(results, DAVIT, 'p99Ms'), 15),
      'missing' in webhook
        ? rowMissing(webhook)
        : figureRow(`${WEBHOOK}, p99`, 'ms', samplesOf(results, WEBHOOK, 'p99Ms')),
    ];
  },
};

async function davitTriggers(bench: Bench): Promise<Contender<Figure>> {
  const directory = join(bench.directory, 'davit');
  const file = openFile(directory);
  const { secret } = await file.key();
  const projectId = await file.project('website', [...COMMAND]);
  await file.close();
  const davit = await serveFor(bench, directory);
  const headers = { Authorization: `Bearer ${secret}`, 'Content-Type': 'application/json' };

  return triggering(bench, DAVIT, async () => {
    const body = '{"ref":"v1.2.3"}';
    const answer = await fetch(`${davit.url}/v2/projects/${projectId}/deployments`, {
      method: 'POST',
      headers,
      body,
    });
    const { id } = (await answer.json()) as { id: string };
    const end = await fetch(`${davit.url}/v2/deployments/${id}?wait=30`, { headers });
    const { status } = (await end.json()) as { status: string };
    if (status !== 'succeeded') throw new Error(`a deployment ended as ${status}`);
    return await (await fetch(`${davit.url}/v2/deployments/${id}/logs`, { headers })).text();
  });
}

async function webhookTriggers(bench: Bench): Promise<Contender<Figure> | Missing> {
  const [command, ...words] = COMMAND;
  const webhook = await startWebhook(bench, command, words);
  if ('missing' in webhook) return { name: WEBHOOK, ...webhook };
  return triggering(bench, WEBHOOK, async () => await (await fetch(webhook.url, { method: 'POST' })).text());
}

/** `run` triggers the command and resolves to its output. */
function triggering({ seconds }: Bench, name: string, run: () => Promise<string>): Contender<Figure> {
  return {
    name,
    async run() {
      const latenciesMs: number[] = [];
      const untilMs = performance.now() + seconds * 1000;
      while (performance.now() < untilMs || latenciesMs.length < 50) {
        // The wall clock, as the command reads it too.
        const sentAtMs = performance.timeOrigin + performance.now();
        const startedAtMs = Number(await run()) * 1000;
        latenciesMs.push(startedAtMs - sentAtMs);
        await delay(10); // until everything is idle again
      }
      return { p50Ms: percentile(latenciesMs, 50), p99Ms: percentile(latenciesMs, 99) };
    },
  };
}
