import { InvalidArgumentError, Option } from 'commander';
import { LONGEST_DURATION, parseDuration } from './durations.ts';

/* How every option of the command line is declared, and what its text is read as. */

/** An option as all are: with its DAVIT_ variable. */
export function option(flags: string, description: string): Option {
  return withVariable(new Option(flags, description));
}

/** Lets an option be given by the environment too: `--tls-cert` by DAVIT_TLS_CERT. */
export function withVariable(option: Option): Option {
  const name = (option.long ?? '').replace(/^--/, '');
  return option.env(`DAVIT_${name.replaceAll('-', '_').toUpperCase()}`);
}

/** For an option that may be repeated. */
export function repeated(text: string, before: string[] = []): string[] {
  return [...before, text];
}

/** The same, each a list with commas: so its variable can hold several. */
export function appending<Item>(parse: (text: string) => Item): (text: string, before?: Item[]) => Item[] {
  return (text, before = []) => [...before, ...text.split(',').map((item) => parse(item.trim()))];
}

/** For an option that may be switched off: commander would make an empty text of a parser's null. */
export function orOff<Value>(parse: (text: string) => Value): (text: string) => Value | 'off' {
  return (text) => {
    if (text === 'off') return 'off';
    try {
      return parse(text);
    } catch (error) {
      if (!(error instanceof InvalidArgumentError)) throw error;
      throw new InvalidArgumentError(error.message.replace(/\.$/, ', or off.'));
    }
  };
}

/** The value of such an option; null: off. */
export function nullIfOff<Value>(value: Value | 'off'): Value | null {
  return value === 'off' ? null : value;
}

/** As durations.ts reads it, in milliseconds; longer than nothing. Throws InvalidArgumentError. */
export function durationMsOf(text: string): number {
  const durationMs = parseDuration(text);
  if (durationMs === undefined || durationMs === 0) {
    throw new InvalidArgumentError(
      `It must be a duration such as 10s, 30m, 24h or 5d, and at most ${LONGEST_DURATION}.`,
    );
  }
  return durationMs;
}

/** The same, or 0 for none. */
export function durationMsOrNone(text: string): number {
  const durationMs = parseDuration(text);
  if (durationMs === undefined)
    throw new InvalidArgumentError(
      `It must be a duration such as 30m or 24h, and at most ${LONGEST_DURATION}, or 0.`,
    );
  return durationMs;
}

/** A whole number from 1. Throws InvalidArgumentError. */
export function parseCount(text: string): number {
  if (!/^[1-9]\d{0,5}$/.test(text))
    throw new InvalidArgumentError('It must be a whole number from 1 to 999999.');
  return Number(text);
}
