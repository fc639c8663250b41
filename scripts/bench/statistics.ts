/** A summary of several rounds. */
export interface Summary {
  median: number;
  min: number;
  max: number;
}

/** Of at least one sample. */
export function summarize(samples: readonly number[]): Summary {
  const sorted = ascending(samples);
  return { median: quantileOf(sorted, 0.5), min: sorted[0] ?? Number.NaN, max: sorted.at(-1) ?? Number.NaN };
}

export function median(samples: readonly number[]): number {
  return quantileOf(ascending(samples), 0.5);
}

/** The nearest-rank percentile: the smallest sample that `percent` of all samples do not exceed. */
export function percentile(samples: ArrayLike<number>, percent: number): number {
  const sorted = Float64Array.from(samples).sort();
  const rank = Math.max(1, Math.ceil((percent / 100) * sorted.length));
  return sorted[rank - 1] ?? Number.NaN;
}

function ascending(samples: readonly number[]): number[] {
  return samples.toSorted((a, b) => a - b);
}

/** Interpolates between neighbours, so that the median of an even number of samples is the mean of the middle two. */
function quantileOf(sorted: readonly number[], fraction: number): number {
  const position = (sorted.length - 1) * fraction;
  const below = sorted[Math.floor(position)] ?? Number.NaN;
  const above = sorted[Math.ceil(position)] ?? Number.NaN;
  return below + (above - below) * (position - Math.floor(position));
}
