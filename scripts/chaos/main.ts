import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { mountingPrefix } from './faults.ts';
import { FAULT_KINDS, type FaultKind, makePlan } from './plan.ts';
import { reportText } from './report.ts';
import { run } from './run.ts';

/*
 * `npm run chaos -- --minutes 5 --seed 1`: runs build/davit under load, inflicts faults on it, and checks its file
 * against what it acknowledged. Exit code 1 if anything is lost; the data is kept then.
 */

const ROOT = join(import.meta.dirname, '../..');
const EXECUTABLE = join(ROOT, 'build/davit');
const USAGE = `usage: npm run chaos -- [--minutes <n>] [--seed <n>] [--faults <kind,…>] [--directory <dir>] [--json]

  --minutes    how long the load lasts; setting up and settling take some seconds more (default 1)
  --seed       decides what is done when (default: a new one each time)
  --faults     only these: ${FAULT_KINDS.join(', ')}
  --directory  for the data of the run and its report, chaos.json (default build)
  --json       the report as JSON, on stdout`;

/** Tells the process that `againWithin` starts that it may mount. */
const MAY_MOUNT = 'CHAOS_MAY_MOUNT';

process.exitCode = await main();

async function main(): Promise<number> {
  const options = readOptions();
  if (options === undefined) {
    process.stderr.write(`${USAGE}\n`);
    return 2;
  }
  const { seed, minutes, faults, directory, json } = options;
  if (!existsSync(EXECUTABLE)) {
    process.stderr.write('build/davit is missing: run npm run package first\n');
    return 2;
  }
  const mayMount = process.env[MAY_MOUNT] === 'yes';
  const prefix = mayMount || !faults.includes('full-disk') ? undefined : mountingPrefix();
  if (prefix !== undefined) return await againWithin(prefix, seed);

  const plan = makePlan(seed, Math.round(minutes * 60_000), faults);
  const say = (line: string) => (json ? process.stderr : process.stdout).write(`${line}\n`);
  const faultCount = plan.steps.filter((step) => 'fault' in step).length;
  say(
    `seed ${seed}: plan ${plan.hash}, ${plan.steps.length - faultCount} steps of load and ${faultCount} faults in ${plan.durationMs / 1000} s`,
  );
  const { figures, keptIn } = await run({
    plan,
    executable: EXECUTABLE,
    directory: join(directory, `chaos-${seed}-${process.pid}`),
    mayMount,
    onProgress: process.stderr.isTTY ? (line) => process.stderr.write(`\r\x1b[K${line}`) : () => undefined,
  });
  const report = join(directory, 'chaos.json');
  mkdirSync(dirname(report), { recursive: true });
  writeFileSync(report, `${JSON.stringify(figures, null, 2)}\n`);
  say(reportText(figures));
  if (json) process.stdout.write(`${JSON.stringify(figures, null, 2)}\n`);
  if (keptIn !== null) say(`\nthe data is kept in ${keptIn}`);
  return figures.losses === 0 ? 0 : 1;
}

function readOptions() {
  try {
    const { values } = parseArgs({
      options: {
        minutes: { type: 'string', default: '1' },
        seed: { type: 'string', default: String(Date.now() % 1_000_000) },
        faults: { type: 'string', default: FAULT_KINDS.join(',') },
        directory: { type: 'string', default: join(ROOT, 'build') },
        json: { type: 'boolean', default: false },
      },
    });
    const minutes = Number(values.minutes);
    const seed = Number(values.seed);
    const faults = values.faults.split(',').filter(Boolean);
    if (!(minutes > 0) || !Number.isSafeInteger(seed) || !faults.every(isFault)) return undefined;
    return { minutes, seed, faults, directory: resolve(values.directory), json: values.json };
  } catch {
    return undefined;
  }
}

function isFault(name: string): name is FaultKind {
  return FAULT_KINDS.some((kind) => kind === name);
}

/** Runs this script again in a mount namespace of its own. */
async function againWithin([file = '', ...words]: string[], seed: number): Promise<number> {
  const own = [...process.execArgv, import.meta.filename, ...process.argv.slice(2), '--seed', String(seed)];
  const child = spawn(file, [...words, process.execPath, ...own], {
    stdio: 'inherit',
    env: { ...process.env, [MAY_MOUNT]: 'yes' },
  });
  for (const signal of ['SIGINT', 'SIGTERM'] as const) process.on(signal, () => child.kill(signal));
  const [exitCode] = (await once(child, 'exit')) as [number | null];
  return exitCode ?? 1;
}
