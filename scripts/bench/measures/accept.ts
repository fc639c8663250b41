import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { LoadResult } from '../children/load.ts';
import type { ServerRequest } from '../children/server.ts';
import { creating, fileToCreateIn, loaded, type Target } from '../creations.ts';
import { serveFor } from '../davit.ts';
import {
  alternate,
  type Bench,
  type Contender,
  figureRow,
  type Measure,
  type Missing,
  type Row,
  rowAtLeast,
  rowBelow,
  rowMissing,
  rowsAgainst,
  samplesOf,
} from '../measure.ts';
import { startPostgres } from '../peers/postgres.ts';
import { childOf, findProgram, outputOf, serverOf } from '../processes.ts';

type Figure = keyof LoadResult | 'processorUs';

const DAVIT = 'davit';
const DAVIT_256 = 'davit, 256 connections';
const NODE = 'bare node:http POST';
const WRK = 'the same, asked by wrk';
const HAPI = 'bare hapi POST route';
const COMMIT_1 = 'SQLite alone, 1 in a commit';
const COMMIT_64 = 'SQLite alone, 64 in a commit';
const PLAIN = 'the plain way: one commit for each request';
const POSTGRES = 'hapi on PostgreSQL, one transaction for each';

/**
 * Creates deployments of a project without a command, so that only accepting them is measured. A disabled webhook
 * subscribes to them: each has an outbox row, but nothing is sent.
 */
export const accept: Measure = {
  name: 'accept',
  title: 'created deployments a second, durable, each with an Idempotency-Key; 64 connections',
  async run(bench) {
    const load = childOf(bench, 'load');
    const davit = await startDavit(bench);
    const plain = await startPlain(bench);
    const answer = await exampleAnswer(davit);
    const bare = async (request: ServerRequest): Promise<Target> => ({
      ...(await serverOf(bench, request)),
      headers: {},
    });
    const node = await bare({ kind: 'node', answer });
    const hapi = await bare({ kind: 'hapi', answer });
    const commits = childOf(bench, 'commits');
    const wrk = wrkAsking(bench, node);
    const postgres = await startPostgres(bench, 'pg');

    const contenders: (Contender<Figure> | Missing)[] = [
      asked(DAVIT, davit),
      asked(HAPI, hapi),
      asked(PLAIN, plain),
      'missing' in postgres
        ? { name: POSTGRES, ...postgres }
        : asked(POSTGRES, await bare({ kind: 'hapi on PostgreSQL', answer, ...postgres })),
      asked(NODE, node),
      wrk,
      asked(DAVIT_256, davit, 256),
      committing(COMMIT_1, 1),
      committing(COMMIT_64, 64),
    ];
    const results = await alternate(bench, contenders, { rehearse: !bench.quick });
    const perSecond = (name: string) => samplesOf(results, name, 'perSecond');
    const against = rowsAgainst(results, contenders, DAVIT);
    return [
      figureRow(DAVIT, '/s', perSecond(DAVIT)),
      figureRow(`${DAVIT}, p50`, 'ms', samplesOf(results, DAVIT, 'p50Ms')),
      rowBelow(`${DAVIT}, p99`, 'ms', samplesOf(results, DAVIT, 'p99Ms'), 15),
      figureRow(`${DAVIT}, longest`, 'ms', samplesOf(results, DAVIT, 'maxMs')),
      figureRow(DAVIT_256, '/s', perSecond(DAVIT_256)),
      rowBelow(`${DAVIT_256}, p99`, 'ms', samplesOf(results, DAVIT_256, 'p99Ms'), 60),
      against(HAPI, 0.6),
      figureRow('davit, processor time for each', 'µs', samplesOf(results, DAVIT, 'processorUs')),
      figureRow(`${HAPI}, processor time for each`, 'µs', samplesOf(results, HAPI, 'processorUs')),
      against(PLAIN, 5),
      figureRow(`${PLAIN}, p99`, 'ms', samplesOf(results, PLAIN, 'p99Ms')),
      against(POSTGRES, 2.5),
      against(NODE),
      ...('missing' in wrk ? [rowMissing(wrk)] : wrkRows(perSecond)),
      against(COMMIT_1),
      against(COMMIT_64),
    ];

    function asked(name: string, target: Target, connections = 64): Contender<Figure> {
      return { name, run: () => loaded(load, target, creating(bench, target, connections)) };
    }

    function committing(name: string, groupSize: number): Contender<Figure> {
      const directory = join(bench.directory, `commits-${groupSize}`);
      mkdirSync(directory);
      return { name, run: () => commits.call({ directory, groupSize, seconds: bench.seconds }) };
    }
  },
};

async function startDavit(bench: Bench): Promise<Target> {
  const directory = join(bench.directory, 'davit');
  const { path, headers } = await fileToCreateIn(directory);
  const davit = await serveFor(bench, directory);
  return { url: `${davit.url}${path}`, headers, processId: davit.processId };
}

async function startPlain(bench: Bench): Promise<Target> {
  const directory = join(bench.directory, 'plain');
  const { path, headers } = await fileToCreateIn(directory);
  const { url, processId } = await serverOf(bench, { kind: 'plain', directory });
  return { url: `${url}${path}`, headers, processId };
}

/** An answer of davit's: the others answer with the same bytes. */
async function exampleAnswer({ url, headers }: Target): Promise<string> {
  const response = await fetch(url, {
    method: 'POST',
    headers: { ...headers, 'Content-Type': 'application/json', 'Idempotency-Key': 'example' },
    body: JSON.stringify({ ref: 'v1.2.3' }),
  });
  if (response.status !== 201) throw new Error(`davit answered ${response.status}`);
  return await response.text();
}

/** wrk is written in C: its figure shows whether our own client is the bottleneck. */
function wrkAsking({ directory, seconds }: Bench, { url }: Target): Contender<'perSecond'> | Missing {
  const wrk = findProgram('wrk');
  if (wrk === undefined) return { name: WRK, missing: 'wrk is not installed: apt-get install wrk' };
  const script = join(directory, 'wrk.lua');
  writeFileSync(
    script,
    `wrk.method = 'POST'\nwrk.body = '{"ref":"v1.2.3"}'\nwrk.headers['Content-Type'] = 'application/json'\n`,
  );
  const words = ['-t1', '-c64', `-d${Math.max(1, Math.round(seconds))}s`, '-s', script, '--latency', url];
  return {
    name: WRK,
    async run() {
      const output = await outputOf(wrk, words);
      return { perSecond: Number(/Requests\/sec:\s+([\d.]+)/.exec(output)?.[1]) };
    },
  };
}

function wrkRows(perSecond: (name: string) => number[]): Row[] {
  const reached = perSecond(WRK);
  const ratios = perSecond(NODE).map((own, round) => own / (reached[round] ?? Number.NaN));
  return [
    figureRow(WRK, '/s', reached),
    // Below 1, as ours also sends an Idempotency-Key with each request; from 0.8 on it is not the bottleneck.
    rowAtLeast('our own client reaches, of what wrk does', 'times', ratios, 0.8),
  ];
}
