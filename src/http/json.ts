import { isUtf8 } from 'node:buffer';
import { type AppError, invalid } from '../errors.ts';

/** Deep enough for every body of this API, shallow enough for recursive functions. */
const BODY_MAX_DEPTH = 32;

/**
 * In one list or object; those of this API have 100 at most, and what is little more is refused by the name of its field.
 * joi describes what is wrong with each item: 1,000 numbers in place of event types take 9 ms, so 300 such bodies of one
 * key at once delayed all others by 1.9 s; 128 take 0.4.
 */
const ITEMS_MAX = 128;

/**
 * Parses JSON as strictly as I-JSON (RFC 7493) asks: UTF-8 without a byte order mark, no duplicate names in an object,
 * no lone surrogates; and no NUL. Throws `invalid_request`, which never echoes the input.
 */
export function parseJson(bytes: Buffer): unknown {
  if (!isUtf8(bytes)) throw invalidBody('must be UTF-8');
  const text = bytes.toString('utf8');
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw invalidBody(`is not valid JSON${positionIn(error)}`);
  }
  const names = checkedNames(value, 1);
  if (names !== writtenNames(text)) throw invalidBody('must not repeat a name in one object');
  return value;
}

function invalidBody(reason: string): AppError {
  return invalid('body', 'body', reason);
}

/** V8's message quotes the body, so only the position is passed on. */
function positionIn(error: unknown): string {
  const position = error instanceof Error ? /at position (\d+)/.exec(error.message)?.[1] : undefined;
  return position === undefined ? '' : `, at character ${Number(position) + 1}`;
}

/**
 * Counts the names in all objects of `value`; throws if a name or text is not allowed. `field`: the body's top-level
 * field that `value` is in.
 */
function checkedNames(value: unknown, depth: number, field = 'body'): number {
  if (typeof value === 'string') {
    checkText(value, field);
    return 0;
  }
  if (typeof value !== 'object' || value === null) return 0;
  if (depth > BODY_MAX_DEPTH) throw invalidBody(`must not be nested deeper than ${BODY_MAX_DEPTH}`);
  const entries = Object.entries(value);
  if (entries.length > ITEMS_MAX) {
    throw invalidBody(`must have at most ${ITEMS_MAX} items in one list or object`);
  }
  if (Array.isArray(value)) {
    return value.reduce((names: number, item: unknown) => names + checkedNames(item, depth + 1, field), 0);
  }
  let names = 0;
  for (const [name, item] of entries) {
    checkText(name, field);
    if (reachesPrototype(name, item)) throw invalidBody('must not have a name that reaches for a prototype');
    names += 1 + checkedNames(item, depth + 1, depth === 1 && PLAIN_NAME.test(name) ? name : field);
  }
  return names;
}

/** Unknown names are the client's text: an error message echoes only names that look like those of this API. */
const PLAIN_NAME = /^[a-z_]{1,64}$/;

function checkText(text: string, field: string): void {
  if (text.includes('\0')) throw invalid('body', field, 'must not contain NUL');
  if (!text.isWellFormed()) throw invalid('body', field, 'must not contain a lone surrogate');
}

/** The two names that allow prototype pollution (CVE-2018-3728). hapi's own parser uses Bourne against them. */
function reachesPrototype(name: string, value: unknown): boolean {
  if (name === '__proto__') return true;
  return name === 'constructor' && typeof value === 'object' && value !== null && 'prototype' in value;
}

/** Counts the colons outside of strings in valid JSON: one for each name, also for duplicates that JSON.parse drops. */
function writtenNames(text: string): number {
  let names = 0;
  let inString = false;
  for (let index = 0; index < text.length; index++) {
    const character = text.charCodeAt(index);
    if (inString && character === BACKSLASH) index++;
    else if (character === QUOTE) inString = !inString;
    else if (!inString && character === COLON) names++;
  }
  return names;
}

const QUOTE = 0x22;
const COLON = 0x3a;
const BACKSLASH = 0x5c;
