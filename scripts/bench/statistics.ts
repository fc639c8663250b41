/** A summary of several rounds: of at least one sample. */
export function summarize(samples: readonly number[]) {
  return { median: median(samples), min: Math.min(...samples), max: Math.max(...samples) };
}

/** Of an even number of samples, the mean of the middle two. */
export function median(samples: readonly number[]): number {
  const sorted = samples.toSorted((a, b) => a - b);
  const middle = (sorted.length - 1) / 2;
  return ((sorted[Math.floor(middle)] ?? Number.NaN) + (sorted[Math.ceil(middle)] ?? Number.NaN)) / 2;
}

/** The nearest-rank percentile: the smallest sample that `percent` of all samples do not exceed. */
export function percentile(samples: ArrayLike<number>, percent: number): number {
  const sorted = Float64Array.from(samples).sort();
  const rank = Math.max(1, Math.ceil((percent / 100) * sorted.length));
  return sorted[rank - 1] ?? Number.NaN;
}
