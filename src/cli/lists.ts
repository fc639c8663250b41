import type { Command, Option } from 'commander';
import { parseCount } from '../config.ts';
import { printable } from '../printable.ts';
import { misused, option } from './command.ts';
import { nearest } from './suggest.ts';

const SHOWN = 20;

/** How much a list shows. */
export function limitOption(): Option {
  return option('--limit <n>', 'show at most so many').argParser(parseCount).default(SHOWN);
}

/** The values of `known` that were named, each once; anything else is misuse. */
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
    return misused(
      command,
      `there is no ${noun} '${printable(name)}':${question} choose of ${known.join(', ')}`,
    );
  });
  return [...new Set(values)];
}
