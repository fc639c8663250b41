import { copyFileSync, existsSync, readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type { ProjectId } from '../../../src/domain.ts';
import { heedNodeOptions } from '../../../test/helpers/executable.ts';
import type { LoadRequest, LoadResult } from '../children/load.ts';
import type { SpawnsRequest } from '../children/spawns.ts';
import { EXECUTABLE, openFile, serveFor } from '../davit.ts';
import {
  alternate,
  type Bench,
  type Contender,
  figureRow,
  type Measure,
  type Missing,
  rowBelow,
  rowsAgainst,
  samplesOf,
} from '../measure.ts';
import { laminar } from '../peers/laminar.ts';
import { startWebhook } from '../peers/webhook.ts';
import { childOf, findProgram, outputOf } from '../processes.ts';

const PROJECTS = 16;
const RESIDENT_BYTES = 250e6;
/** For each second of a round, and each project. */
const DEPLOYMENTS_PER_SECOND = 25;

const DAVIT = 'davit at 250 MB';
const POSIX = 'bare posix_spawn from C';
const NODE_SMALL = "Node's spawn";
const NODE = "Node's spawn at 250 MB";
const LAMINAR = 'laminar';
const WEBHOOK = "Debian's webhook, keeps no record";

type Figure = 'perSecond' | 'loopP99Ms' | 'residentMb';

export const commands = commandsAtATime('commands', 8);

/** As many as davit runs by default. There the chain of one command's steps decides, more than what they cost. */
export const commandsByDefault = commandsAtATime('commands-2', 2);

/**
 * Deployments of /bin/true wait in paused projects, which are then resumed. A round lasts from the first start to the
 * last end that davit recorded. `concurrency`: commands at a time, the same for all contenders.
 */
function commandsAtATime(name: string, concurrency: number): Measure {
  return {
    name,
    title: `commands a second, /bin/true, ${concurrency} at a time, with the service at 250 MB resident`,
    async run(bench) {
      const spawns = childOf(bench, 'spawns');
      const large = childOf(bench, 'spawns');
      const contenders: (Contender<Figure> | Missing)[] = [
        await davitAt250Mb(bench, concurrency),
        await posixSpawn(bench, concurrency),
        spawning(NODE_SMALL, spawns, 0),
        spawning(NODE, large, RESIDENT_BYTES),
        await laminar(bench, LAMINAR, concurrency),
        await debiansWebhook(bench, concurrency),
      ];
      const results = await alternate(bench, contenders, { rehearse: !bench.quick });
      const against = rowsAgainst(results, contenders, DAVIT);
      return [
        figureRow(DAVIT, '/s', samplesOf(results, DAVIT, 'perSecond')),
        rowBelow(`${DAVIT}, event loop delay, p99`, 'ms', samplesOf(results, DAVIT, 'loopP99Ms'), 10),
        figureRow(`${DAVIT}, resident (RSS)`, 'MB', samplesOf(results, DAVIT, 'residentMb')),
        against(POSIX, 0.5),
        against(LAMINAR, 5),
        against(WEBHOOK),
        against(NODE_SMALL),
        against(NODE),
      ];

      function spawning(contender: string, child: typeof spawns, residentBytes: number): Contender<Figure> {
        const request = { seconds: bench.seconds, concurrency, residentBytes };
        return { name: contender, run: () => child.call(request satisfies SpawnsRequest) };
      }
    },
  };
}

async function davitAt250Mb(bench: Bench, concurrency: number): Promise<Contender<Figure>> {
  const directory = join(bench.directory, 'davit');
  const file = openFile(directory);
  bench.defer(file.close);
  const projectIds: ProjectId[] = [];
  for (let number = 1; number <= PROJECTS; number += 1) {
    projectIds.push(await file.project(`website-${number}`, ['/bin/true']));
  }
  await file.pause(projectIds, true);
  const probeFile = join(directory, 'probe.json');
  const executable = join(directory, 'davit');
  copyFileSync(EXECUTABLE, executable);
  heedNodeOptions(executable);
  const davit = await serveFor(bench, directory, {
    executable,
    options: ['--max-concurrent', String(concurrency)],
    environment: {
      NODE_OPTIONS: `--require ${JSON.stringify(join(import.meta.dirname, '../children/probe.cjs'))}`,
      BENCH_RESIDENT_BYTES: String(RESIDENT_BYTES),
      BENCH_PROBE_FILE: probeFile,
    },
  });
  await delay(1_000); // until the probe has made it that large
  const lastSeq = file.database.prepare<[], number>('SELECT coalesce(max(seq), 0) FROM deployments').pluck();
  const waiting = file.database
    .prepare('SELECT 1 FROM deployments WHERE finished_at IS NULL LIMIT 1')
    .pluck();
  const outcome = file.database.prepare<[number], { succeeded: number; durationMs: number }>(`
    SELECT count(*) FILTER (WHERE status = 'succeeded') AS succeeded, max(finished_at) - min(started_at) AS durationMs
      FROM deployments WHERE seq > ?`);

  return {
    name: DAVIT,
    async run() {
      const before = lastSeq.get() ?? 0;
      const each = Math.ceil(bench.seconds * DEPLOYMENTS_PER_SECOND);
      for (const projectId of projectIds) await file.deploy(projectId, each);
      await probe();
      await file.pause(projectIds, false);
      while (waiting.get() !== undefined) await delay(20);
      const loop = await probe();
      await file.pause(projectIds, true);
      const { succeeded = 0, durationMs = 0 } = outcome.get(before) ?? {};
      if (succeeded !== each * PROJECTS) throw new Error(`${succeeded} of ${each * PROJECTS} succeeded`);
      return {
        perSecond: (succeeded / durationMs) * 1000,
        loopP99Ms: loop.p99Ms,
        residentMb: loop.residentMb,
      };
    },
  };

  /** The delays of davit's event loop since the last call. */
  async function probe(): Promise<{ p99Ms: number; residentMb: number }> {
    rmSync(probeFile, { force: true });
    davit.child.kill('SIGUSR2');
    while (!existsSync(probeFile)) await delay(5);
    return JSON.parse(readFileSync(probeFile, 'utf8')) as { p99Ms: number; residentMb: number };
  }
}

async function posixSpawn(
  { directory, seconds }: Bench,
  concurrency: number,
): Promise<Contender<Figure> | Missing> {
  const compiler = findProgram('gcc');
  if (compiler === undefined)
    return { name: POSIX, missing: 'gcc is not installed: apt-get install gcc libc6-dev' };
  const program = join(directory, 'posix-spawn');
  await outputOf(compiler, ['-O2', '-o', program, join(import.meta.dirname, '../children/posix-spawn.c')]);
  const words = [String(seconds), String(concurrency)];
  return { name: POSIX, run: async () => ({ perSecond: Number(await outputOf(program, words)) }) };
}

async function debiansWebhook(bench: Bench, concurrency: number): Promise<Contender<Figure> | Missing> {
  const webhook = await startWebhook(bench, '/bin/true');
  if ('missing' in webhook) return { name: WEBHOOK, ...webhook };
  const load = childOf(bench, 'load');
  const request: LoadRequest = {
    url: webhook.url,
    method: 'POST',
    headers: {},
    body: '{"ref":"v1.2.3"}',
    connections: concurrency,
    seconds: bench.seconds,
    warmUpSeconds: 0,
  };
  return {
    name: WEBHOOK,
    run: async () => ({ perSecond: (await load.call<LoadResult>(request)).perSecond }),
  };
}
