import parse from 'parse-prometheus-text-format';

interface Series {
  /** With `_bucket`, `_sum` or `_count` for those of a histogram. */
  name: string;
  labels: Record<string, string>;
  value: number;
}

export interface Scrape {
  series: Series[];
  /** NaN if there is no such series. */
  value(name: string, labels?: Record<string, string>): number;
}

/** What a Prometheus reads in `text`. Throws where it would not, or would not understand it as it was meant. */
export function parseMetrics(text: string): Scrape {
  const families = parse(text);
  // The parser makes one of all histograms of a name, so it is shown their series one by one.
  const series = parse(text.replaceAll(/^# TYPE \S+ histogram\n/gm, '')).flatMap(({ name, metrics }) =>
    metrics.map(({ labels = {}, value }) => ({ name, labels, value: numberOf(name, value) })),
  );
  if (!text.endsWith('\n')) throw new Error('the last line has no end');
  refuseRepeats(families.map(({ name }) => name));
  refuseRepeats(series.map(({ name, labels }) => `${name} ${JSON.stringify(Object.entries(labels).sort())}`));
  for (const { name, help, type } of families) {
    const wrong = (what: string) => new Error(`${name} ${what}`);
    if (!/^(davit|process)_[a-z_]+$/.test(name)) throw wrong('is no name of ours');
    if (help === '' || !['COUNTER', 'GAUGE', 'HISTOGRAM'].includes(type)) throw wrong('has no HELP or TYPE');
    if ((type === 'COUNTER') !== name.endsWith('_total')) throw wrong(`is a ${type}`);
    if (type === 'HISTOGRAM') checkHistogram(name, series);
  }
  return {
    series,
    value: (name, labels = {}) =>
      series.find((each) => each.name === name && same(each.labels, labels))?.value ?? Number.NaN,
  };
}

/** The series of that name that are not 0: the values of their labels, and theirs. */
export function movedOf({ series }: Scrape, name: string): [labels: string, value: number][] {
  return series
    .filter((each) => each.name === name && each.value !== 0)
    .map(({ labels, value }): [string, number] => [Object.values(labels).join(' ').trim(), value])
    .sort();
}

function numberOf(name: string, text = ''): number {
  if (text === '+Inf') return Number.POSITIVE_INFINITY;
  if (!/^-?\d+(\.\d+)?(e[+-]?\d+)?$/.test(text)) throw new Error(`${name} is ${text}`);
  return Number(text);
}

function refuseRepeats(keys: string[]): void {
  const repeated = keys.find((key, index) => keys.indexOf(key) !== index);
  if (repeated !== undefined) throw new Error(`${repeated} comes twice`);
}

function checkHistogram(name: string, all: readonly Series[]): void {
  const series = all.filter((each) => each.name.startsWith(`${name}_`));
  for (const { labels, value } of series.filter((each) => each.name === `${name}_count`)) {
    const buckets = series.filter(
      ({ labels: { le, ...others } }) => le !== undefined && same(others, labels),
    );
    const bounds = buckets.map(({ labels: { le } }) =>
      le === '+Inf' ? Number.POSITIVE_INFINITY : Number(le),
    );
    const grow = (numbers: number[]) =>
      numbers.every((each, at) => at === 0 || each >= (numbers[at - 1] ?? each));
    if (!grow(bounds) || !grow(buckets.map((bucket) => bucket.value)))
      throw new Error(`${name} does not grow`);
    if (bounds.at(-1) !== Number.POSITIVE_INFINITY || buckets.at(-1)?.value !== value) {
      throw new Error(`${name} does not end with all that were counted`);
    }
    if (!series.some((each) => each.name === `${name}_sum` && same(each.labels, labels))) {
      throw new Error(`${name} has no sum`);
    }
  }
}

function same(one: Record<string, string>, other: Record<string, string>): boolean {
  const names = Object.keys(one);
  return names.length === Object.keys(other).length && names.every((name) => one[name] === other[name]);
}
