import { join } from 'node:path';
import { loaded, type Target } from '../creations.ts';
import { openFile, serveFor } from '../davit.ts';
import { alternate, figureRow, type Measure, rowAgainst, samplesOf } from '../measure.ts';
import { childOf, serverOf } from '../processes.ts';

const DAVIT = 'davit';
const HAPI = 'bare hapi route, the same bytes';

export const projects: Measure = {
  name: 'projects',
  title: 'GET /v2/projects a second, 50 items; 64 connections',
  async run(bench) {
    const directory = join(bench.directory, 'davit');
    const headers = await fileWithProjects(directory);
    const davit = await serveFor(bench, directory);
    const url = `${davit.url}/v2/projects`;
    const page = await (await fetch(url, { headers })).text();
    if (JSON.parse(page).data.length !== 50) throw new Error('that is not a page of 50 projects');
    const hapi = await serverOf(bench, { kind: 'hapi', answer: page });
    const load = childOf(bench, 'load');
    const reading = (target: Target) => () =>
      loaded(load, target, {
        url: target.url,
        headers: target.headers,
        method: 'GET',
        connections: 64,
        seconds: bench.seconds,
        warmUpSeconds: bench.seconds / 4,
      });

    const results = await alternate(
      bench,
      [
        { name: DAVIT, run: reading({ url, headers, processId: davit.processId }) },
        { name: HAPI, run: reading({ ...hapi, headers: {} }) },
      ],
      { rehearse: !bench.quick },
    );
    const own = samplesOf(results, DAVIT, 'perSecond');
    return [
      figureRow(DAVIT, '/s', own),
      figureRow(`${DAVIT}, p99`, 'ms', samplesOf(results, DAVIT, 'p99Ms')),
      rowAgainst(own, HAPI, '/s', samplesOf(results, HAPI, 'perSecond'), 0.5),
      figureRow('davit, processor time for each', 'µs', samplesOf(results, DAVIT, 'processorUs')),
      figureRow('bare hapi, processor time for each', 'µs', samplesOf(results, HAPI, 'processorUs')),
    ];
  },
};

/** One more than fits on a page, so that there is a cursor too. */
async function fileWithProjects(directory: string): Promise<Record<string, string>> {
  const file = openFile(directory);
  const { secret } = await file.key();
  for (let number = 1; number <= 51; number += 1) await file.project(`website-${number}`);
  await file.close();
  return { Authorization: `Bearer ${secret}` };
}
