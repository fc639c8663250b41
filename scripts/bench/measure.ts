import { median } from './statistics.ts';

/** A benchmark of davit beside what it is compared with. */
export interface Measure {
  /** For `--only`. */
  name: string;
  title: string;
  run(bench: Bench): Promise<Row[]>;
}

/** What a measure is given. */
export interface Bench {
  rounds: number;
  /** How long one round of one contender lasts, roughly. */
  seconds: number;
  quick: boolean;
  /** The measure's own, on a real disk; removed after it. */
  directory: string;
  /** Shows on the terminal what is going on. */
  progress(what: string): void;
  /** Calls `cleanUp` when the measure has ended, even if it failed; the last one first. */
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
  /** davit's figure divided by this one, or as the target says. */
  ratio?: number;
  target?: { text: string; reached: boolean };
}

export type Unit = '/s' | 'ms' | 'µs' | 'MB' | 'times';

/** One of those that are compared. `run` is a round of it, and returns its figures. */
export interface Contender<Figure extends string> {
  name: string;
  run(): Promise<Partial<Record<Figure, number>>>;
}

/** A contender that cannot take part, and why. */
export interface Missing {
  name: string;
  missing: string;
}

export type Results<Figure extends string> = ReadonlyMap<string, Partial<Record<Figure, number[]>>>;

/**
 * Runs the contenders that are not missing in turn, A B C A B C …, so that whatever else the machine does affects all
 * alike. With `rehearse`, an additional first round does not count.
 */
export async function alternate<Figure extends string>(
  { rounds, progress }: Pick<Bench, 'rounds' | 'progress'>,
  contenders: readonly (Contender<Figure> | Missing)[],
  { rehearse = false } = {},
): Promise<Results<Figure>> {
  const results = new Map<string, Partial<Record<Figure, number[]>>>();
  for (let round = rehearse ? 0 : 1; round <= rounds; round += 1) {
    for (const { name, run } of contenders.filter((contender) => 'run' in contender)) {
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

/** A figure of a contender, of all rounds. */
export function samplesOf<Figure extends string>(
  results: Results<Figure>,
  name: string,
  figure: Figure,
): number[] {
  const samples = results.get(name)?.[figure];
  if (samples === undefined) throw new Error(`${name} has no ${figure}`);
  return samples;
}

/** A row without a target. */
export function figureRow(name: string, unit: Unit, samples: number[]): Row {
  return { name, unit, samples };
}

/** A figure of davit's that must stay below `limit`. */
export function rowBelow(name: string, unit: Unit, samples: number[], limit: number): Row {
  return { name, unit, samples, target: { text: `< ${limit} ${unit}`, reached: median(samples) < limit } };
}

/** A figure that must be `limit` or more. */
export function rowAtLeast(name: string, unit: Unit, samples: number[], limit: number): Row {
  return { name, unit, samples, target: { text: `≥ ${limit}`, reached: median(samples) >= limit } };
}

/**
 * A contender of davit's, whose median must be at least `atLeast` times this one's. Without `atLeast`: for information.
 */
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

/** Gives a function that makes such a row of a contender by its figure `perSecond`, or says why it is missing. */
export function rowsAgainst<Figure extends string>(
  results: Results<Figure | 'perSecond'>,
  contenders: readonly (Contender<Figure> | Missing)[],
  davit: string,
): (name: string, atLeast?: number) => Row {
  const perSecond = (name: string) => samplesOf(results, name, 'perSecond');
  return (name, atLeast) => {
    const contender = contenders.find((known) => known.name === name);
    return contender !== undefined && 'missing' in contender
      ? rowMissing(contender)
      : rowAgainst(perSecond(davit), name, '/s', perSecond(name), atLeast);
  };
}

/** A figure under some load, which may be at most `atMost` times the same figure `without` it. */
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
