import { execFileSync } from 'node:child_process';
import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { join, relative, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { describeMachine, machineText } from './machine.ts';
import { type Bench, type Measure, type Row, rowMissing } from './measure.ts';
import { accept } from './measures/accept.ts';
import { claim } from './measures/claim.ts';
import { commands, commandsByDefault } from './measures/commands.ts';
import { deliveries } from './measures/deliveries.ts';
import { executable } from './measures/executable.ts';
import { firstByte } from './measures/first-byte.ts';
import { memory } from './measures/memory.ts';
import { mixed } from './measures/mixed.ts';
import { projects } from './measures/projects.ts';
import { start } from './measures/start.ts';
import { trigger } from './measures/trigger.ts';
import { guardDirectory } from './processes.ts';
import { table } from './report.ts';
import { summarize } from './statistics.ts';

/*
 * `npm run bench`: davit's figures beside the limits of the machine, a plain implementation, and other programs with
 * the same purpose. Client, servers and receivers share the machine, so it is the ratios that count.
 */

const ROOT = join(import.meta.dirname, '../..');

const MEASURES: readonly Measure[] = [
  accept,
  projects,
  deliveries,
  mixed,
  firstByte,
  claim,
  commands,
  commandsByDefault,
  trigger,
  start,
  memory,
  executable,
];

const USAGE = `npm run bench -- [options]
  --quick            few short rounds, two or three minutes in all
  --only <name>      only this measure; may be repeated
  --rounds <n>       how often each contender has its turn (5; 2 with --quick)
  --seconds <n>      how long a turn takes, roughly (4; 1 with --quick)
  --data-dir <dir>   where files are created and removed, on a real disk (build/bench)
  --output <file>    all figures of all rounds as JSON (build/bench.json)
  --list             the names of all measures`;

await main();

async function main(): Promise<void> {
  const options = readOptions();
  if (options.list) {
    say(MEASURES.map(({ name, title }) => `${name.padEnd(12)}${title}`).join('\n'));
    return;
  }
  mkdirSync(options.dataDir, { recursive: true });
  const machine = describeMachine(options.dataDir);
  const terminal = progressOn(process.stderr);
  terminal.show('making build/davit, if the sources are newer');
  execFileSync(process.execPath, [join(ROOT, 'scripts/package.ts')], {
    stdio: ['ignore', 'ignore', 'inherit'],
  });

  const directory = mkdtempSync(join(options.dataDir, 'run-'));
  guardDirectory(directory);
  chmodSync(directory, 0o755); // PostgreSQL may run as another user
  const startedAt = new Date().toISOString();
  terminal.clear();
  say(`${machineText(machine)}
medians of ${options.rounds} rounds of ${options.seconds} s, in turn; client, servers and receivers share this machine
ratio: davit's figure divided by the line's, or what the line says`);

  const results: { name: string; title: string; rows: Row[] }[] = [];
  for (const [index, measure] of options.measures.entries()) {
    const { name, title } = measure;
    const rows = await runOrTell(measure, {
      ...options,
      directory: join(directory, name),
      progress: (what) => terminal.show(`[${index + 1}/${options.measures.length}] ${name}: ${what}`),
    });
    terminal.clear();
    say(`\n${table(title, rows)}`);
    results.push({ name, title, rows });
  }

  rmSync(directory, { recursive: true });
  const { rounds, seconds, quick } = options;
  const measures = results.map(({ rows, ...measure }) => ({ ...measure, rows: rows.map(withSummary) }));
  writeFileSync(
    options.output,
    `${JSON.stringify({ startedAt, machine, rounds, seconds, quick, measures }, null, 2)}\n`,
  );
  say(
    `\n${verdict(results.flatMap(({ rows }) => rows))}; all figures of all rounds: ${relative(process.cwd(), options.output)}`,
  );
}

interface Options extends Pick<Bench, 'rounds' | 'seconds' | 'quick'> {
  measures: readonly Measure[];
  dataDir: string;
  output: string;
  list: boolean;
}

function readOptions(): Options {
  try {
    const { values } = parseArgs({
      options: {
        quick: { type: 'boolean', default: false },
        only: { type: 'string', multiple: true },
        rounds: { type: 'string' },
        seconds: { type: 'string' },
        'data-dir': { type: 'string', default: join(ROOT, 'build/bench') },
        output: { type: 'string', default: join(ROOT, 'build/bench.json') },
        list: { type: 'boolean', default: false },
      },
    });
    const { quick, only, list } = values;
    return {
      quick,
      list,
      rounds: positive('--rounds', values.rounds, quick ? 2 : 5),
      seconds: positive('--seconds', values.seconds, quick ? 1 : 4),
      dataDir: values['data-dir'],
      output: resolve(values.output),
      measures: only === undefined ? MEASURES : only.map(measureCalled),
    };
  } catch (error) {
    process.stderr.write(`${error instanceof Error ? error.message : error}\n\n${USAGE}\n`);
    process.exit(2);
  }
}

function positive(option: string, text: string | undefined, otherwise: number): number {
  const value = text === undefined ? otherwise : Number(text);
  if (!(value > 0)) throw new Error(`${option} takes a number above 0`);
  return value;
}

function measureCalled(name: string): Measure {
  const measure = MEASURES.find((known) => known.name === name);
  if (measure === undefined) throw new Error(`there is no measure ${name}: see --list`);
  return measure;
}

/** If a measure fails, the others are still made. */
async function runOrTell(measure: Measure, bench: Omit<Bench, 'defer'>): Promise<Row[]> {
  try {
    return await runMeasure(measure, bench);
  } catch (error) {
    process.exitCode = 1;
    process.stderr.write(`\n${measure.name}: ${error instanceof Error ? error.stack : error}\n`);
    return [rowMissing({ name: measure.name, missing: 'it failed, see above' })];
  }
}

/** Runs it in a directory of its own. What it deferred is done in reverse order, even if it fails. */
async function runMeasure(measure: Measure, bench: Omit<Bench, 'defer'>): Promise<Row[]> {
  mkdirSync(bench.directory);
  await using started = new AsyncDisposableStack();
  started.defer(() => rmSync(bench.directory, { recursive: true, force: true, maxRetries: 10 }));
  return await measure.run({
    ...bench,
    defer: (cleanUp) => started.defer(async () => void (await cleanUp())),
  });
}

function withSummary(row: Row) {
  return row.samples.length === 0 ? row : { ...row, ...summarize(row.samples) };
}

function verdict(rows: readonly Row[]): string {
  const judged = rows.flatMap(({ target }) => target ?? []);
  const skipped = rows.filter(({ missing }) => missing !== undefined).length;
  const reached = judged.filter((target) => target.reached).length;
  return `${reached} reached, ${judged.length - reached} fall short, ${skipped} skipped`;
}

/** A line that changes, on a terminal only. */
function progressOn(stream: NodeJS.WriteStream): { show(text: string): void; clear(): void } {
  const clear = () => void (stream.isTTY && stream.write('\r\x1b[K'));
  return {
    clear,
    show(text) {
      if (stream.isTTY) stream.write(`\r\x1b[K${text.slice(0, stream.columns - 1)}`);
    },
  };
}

function say(text: string): void {
  process.stdout.write(`${text}\n`);
}
