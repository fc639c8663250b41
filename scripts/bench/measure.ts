import { median } from './statistics.ts';

/** One figure that davit has to reach, taken side by side with whatever it is held against. */
export interface Measure {
  /** For `--only`. */
  name: string;
  title: string;
  run(bench: Bench): Promise<Row[]>;
}

/** What a measure is given. */
export interface Bench {
  rounds: number;
  /** How long one round of one contender lasts, about. */
  seconds: number;
  quick: boolean;
  /** Of this measure alone, on a real disk; removed after it. */
  directory: string;
  /** Says on the terminal what is going on. */
  progress(what: string): void;
  /** Is called when the measure has ended, however it did; the last comes first. */
  defer(cleanUp: () => unknown): void;
}

/** A line of the table. */
export interface Row {
  name: string;
  unit: Unit;
  /** One number for each round. */
  samples: number[];
  /** Why there are none. */
  missing?: string;
  /** Davit's figure divided by this one, or whatever the target says. */
  ratio?: number;
  target?: { text: string; reached: boolean };
}

export type Unit = '/s' | 'ms' | 'µs' | 'MB' | 'times';

/** What is held against others in the same rounds: `run` is one round of it, and names its figures. */
export interface Contender<Figure extends string> {
  name: string;
  run(): Promise<Partial<Record<Figure, number>>>;
}

/** One that cannot take part, and what to do about it. */
export interface Missing {
  name: string;
  missing: string;
}

export type Results<Figure extends string> = ReadonlyMap<string, Partial<Record<Figure, number[]>>>;

/**
 * A B C A B C …: whatever else the machine does meets all of them alike. The first round of each is a rehearsal
 * where `rehearse` says so, and does not count.
 */
export async function alternate<Figure extends string>(
  { rounds, progress }: Pick<Bench, 'rounds' | 'progress'>,
  contenders: readonly Contender<Figure>[],
  { rehearse = false } = {},
): Promise<Results<Figure>> {
  const results = new Map<string, Partial<Record<Figure, number[]>>>();
  for (let round = rehearse ? 0 : 1; round <= rounds; round += 1) {
    for (const { name, run } of contenders) {
      progress(round === 0 ? `rehearsal: ${name}` : `round ${round} of ${rounds}: ${name}`);
      const figures = await run();
      if (round > 0) note(results, name, figures);
    }
  }
  return results;
}

function note<Figure extends string>(
  results: Map<string, Partial<Record<Figure, number[]>>>,
  name: string,
  figures: Partial<Record<Figure, number>>,
): void {
  const samples: Partial<Record<Figure, number[]>> = results.get(name) ?? {};
  for (const [figure, value] of Object.entries(figures) as [Figure, number][]) {
    samples[figure] = [...(samples[figure] ?? []), value];
  }
  results.set(name, samples);
}

/** One figure of one contender, of all rounds. */
export function samplesOf<Figure extends string>(
  results: Results<Figure>,
  name: string,
  figure: Figure,
): number[] {
  const samples = results.get(name)?.[figure];
  if (samples === undefined) throw new Error(`${name} has no ${figure}`);
  return samples;
}

/** A row that is not held against anything. */
export function figureRow(name: string, unit: Unit, samples: number[]): Row {
  return { name, unit, samples };
}

/** Davit's own figure, which has to stay below `limit`. */
export function rowBelow(name: string, unit: Unit, samples: number[], limit: number): Row {
  return { name, unit, samples, target: { text: `< ${limit} ${unit}`, reached: median(samples) < limit } };
}

/** A figure that has to be `limit` or more. */
export function rowAtLeast(name: string, unit: Unit, samples: number[], limit: number): Row {
  return { name, unit, samples, target: { text: `≥ ${limit}`, reached: median(samples) >= limit } };
}

/** What davit is held against: its own median has to be at least `atLeast` times this one's. Without: for information. */
export function rowAgainst(
  davit: readonly number[],
  name: string,
  unit: Unit,
  samples: number[],
  atLeast?: number,
): Row {
  const ratio = median(davit) / median(samples);
  const row = { name, unit, samples, ratio };
  return atLeast === undefined
    ? row
    : { ...row, target: { text: `≥ ${atLeast}`, reached: ratio >= atLeast } };
}

/** The same figure under other circumstances: it may be at most `atMost` times what it is without them. */
export function rowAtMost(
  without: readonly number[],
  name: string,
  unit: Unit,
  samples: number[],
  atMost: number,
): Row {
  const ratio = median(samples) / median(without);
  return { name, unit, samples, ratio, target: { text: `≤ ${atMost}`, reached: ratio <= atMost } };
}

export function rowMissing({ name, missing }: Missing): Row {
  return { name, unit: '/s', samples: [], missing };
}
