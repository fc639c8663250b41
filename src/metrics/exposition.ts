import type { Labels, Metric, Sample } from '../metric-cells.ts';

export const CONTENT_TYPE = 'text/plain; version=0.0.4; charset=utf-8';

/** Prometheus' text format 0.0.4. Metrics with the same name form one family, at the place of the first of them. */
export function exposition(metrics: readonly Metric[]): string {
  return [...Map.groupBy(metrics, ({ name }) => name).values()].map(familyText).join('');
}

function familyText(metrics: readonly Metric[]): string {
  const [first] = metrics;
  const samples = metrics.flatMap((metric) => metric.samples());
  if (first === undefined || samples.length === 0) return '';
  const { name, help, type } = first;
  const head = `# HELP ${name} ${escaped(help)}\n# TYPE ${name} ${type}\n`;
  return head + samples.map((sample) => sampleText(name, sample)).join('');
}

function sampleText(name: string, { suffix, labels, value }: Sample): string {
  return `${name}${suffix}${labelsText(labels)} ${numberText(value)}\n`;
}

function labelsText(labels: Labels): string {
  const pairs = Object.entries(labels).map(
    ([name, value]) => `${name}="${escaped(value).replaceAll('"', '\\"')}"`,
  );
  return pairs.length === 0 ? '' : `{${pairs.join(',')}}`;
}

function escaped(text: string): string {
  return text.replaceAll('\\', '\\\\').replaceAll('\n', '\\n');
}

/** As Go writes floats, which differs from JavaScript only for infinity; nothing measured is negative infinity. */
function numberText(value: number): string {
  return value === Number.POSITIVE_INFINITY ? '+Inf' : String(value);
}
