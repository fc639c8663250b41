import type { Command, Option } from 'commander';
import { option, parseCount } from '../options.ts';
import type { ListPage } from '../store/list-page.ts';
import { type CommandContext, misused } from './command.ts';
import { nearest } from './suggest.ts';

const SHOWN = 20;
/** Of a larger page the store would find all items before it leaves out those that are too long for one. */
const PAGE_MAX = 1_000;

/** How many items a list shows. */
export function limitOption(): Option {
  return option('--limit <n>', 'show at most this many').argParser(parseCount).default(SHOWN);
}

/** The first `limit` items of a list, read from as many pages as it takes, and whether that is all. */
export async function latestOf<Item>(
  limit: number,
  page: (beforeSeq: number, limit: number) => ListPage<Item> | Promise<ListPage<Item>>,
): Promise<{ items: Item[]; isAll: boolean }> {
  const found: Item[] = [];
  let beforeSeq: number | null = Number.MAX_SAFE_INTEGER;
  while (beforeSeq !== null && found.length <= limit) {
    const wanted = Math.min(limit + 1 - found.length, PAGE_MAX);
    const { items, goOnAt }: ListPage<Item> = await page(beforeSeq, wanted);
    found.push(...items);
    beforeSeq = goOnAt;
  }
  return { items: found.slice(0, limit), isAll: found.length <= limit };
}

/** Says that a list was cut; of JSON only where no limit was chosen, as a program would take it for all there is. */
export function noteCut(command: Command, shown: number, { terminal }: CommandContext): void {
  if (command.getOptionValue('json') === true && command.getOptionValueSource('limit') !== 'default') return;
  terminal.note(`only the latest ${shown} are shown: --limit shows more`);
}

/** The values of `known` that were given, each once; any other is misuse. */
export function chosenOf<Value extends string>(
  command: Command,
  noun: string,
  names: readonly string[],
  known: readonly Value[],
): Value[] {
  const values = names.map((name) => {
    const value = known.find((one) => one === name);
    if (value !== undefined) return value;
    const meant = nearest(name, known);
    const question = meant === undefined ? '' : ` did you mean ${meant}?`;
    return misused(command, `there is no ${noun} '${name}':${question} choose one of ${known.join(', ')}`);
  });
  return [...new Set(values)];
}
