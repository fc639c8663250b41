import { InvalidArgumentError, Option } from 'commander';
import { LONGEST_DURATION, parseDuration } from './durations.ts';

/* How the options of the command line are declared and parsed. */

/** An option that its DAVIT_ environment variable can set too. */
export function option(flags: string, description: string): Option {
  return withVariable(new Option(flags, description));
}

/** Lets an environment variable set the option too: DAVIT_TLS_CERT for `--tls-cert`. */
export function withVariable(option: Option): Option {
  const name = (option.long ?? '').replace(/^--/, '');
  return option.env(`DAVIT_${name.replaceAll('-', '_').toUpperCase()}`);
}

/** The parser of an option that may be repeated. */
export function repeated(text: string, before: string[] = []): string[] {
  return [...before, text];
}

/** As `repeated`, but each text may be a list with commas, so that an environment variable can hold several items. */
export function appending<Item>(parse: (text: string) => Item): (text: string, before?: Item[]) => Item[] {
  return (text, before = []) => [...before, ...text.split(',').map((item) => parse(item.trim()))];
}

/** The parser of an option that may be `off`. It cannot return null, of which commander makes an empty string. */
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

/** The value of an option that `orOff` parsed; null: off. */
export function nullIfOff<Value>(value: Value | 'off'): Value | null {
  return value === 'off' ? null : value;
}

/** The parser of an option with one of these values. Throws InvalidArgumentError. */
export function oneOf<Value extends string>(values: readonly Value[]): (text: string) => Value {
  return (text) => {
    const value = values.find((known) => known === text);
    if (value !== undefined) return value;
    throw new InvalidArgumentError(`It must be ${values.slice(0, -1).join(', ')} or ${values.at(-1)}.`);
  };
}

/** Parses a duration greater than zero. Throws InvalidArgumentError. */
export function durationMsOf(text: string): number {
  const durationMs = parseDuration(text);
  if (durationMs === undefined || durationMs === 0) {
    throw new InvalidArgumentError(
      `It must be a duration such as 10s, 30m, 24h or 5d, and at most ${LONGEST_DURATION}.`,
    );
  }
  return durationMs;
}

/** Parses a duration, which may be 0. Throws InvalidArgumentError. */
export function durationMsOrNone(text: string): number {
  const durationMs = parseDuration(text);
  if (durationMs === undefined)
    throw new InvalidArgumentError(
      `It must be a duration such as 30m or 24h, and at most ${LONGEST_DURATION}, or 0.`,
    );
  return durationMs;
}

/** Parses a whole number of at least 1. Throws InvalidArgumentError. */
export function parseCount(text: string): number {
  if (!/^[1-9]\d{0,5}$/.test(text))
    throw new InvalidArgumentError('It must be a whole number from 1 to 999999.');
  return Number(text);
}
