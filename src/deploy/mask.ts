/** Hides secrets in a text that comes in pieces. */
interface Mask {
  /** What is certain so far; keeps back what may be the beginning of a secret. */
  push(bytes: Uint8Array): Buffer;
  /** What was kept back. */
  end(): Buffer;
}

/** Shorter values are words such as `true` or `eu-west`: hiding them would make logs unreadable and tell the value. */
const SECRET_MIN_LENGTH = 8;
/** What stands in the place of a secret. */
export const HIDDEN = '***';
const MASKED = Buffer.from(HIDDEN);
const NOTHING = Buffer.alloc(0);

/**
 * Replaces every secret of 8 characters or more by `***`, and those that overlap by one. The lines of a secret of
 * several lines are secrets too, as programs print them one by one. What comes out does not depend on how the text was
 * cut.
 */
export function maskFor(secrets: readonly string[]): Mask {
  const needles = needlesOf(secrets);
  if (needles.length === 0) return { push: asBuffer, end: () => NOTHING };
  const { placeFrom, matchAt, beginningIn } = createSearch(needles);
  let held: Buffer = NOTHING;
  /** Of what is held, so much is hidden already. */
  let hiddenBytes = 0;

  return {
    push: (bytes) => replace(joined(held, bytes), false),
    end: () => replace(held, true),
  };

  function replace(text: Buffer, isLast: boolean): Buffer {
    const pieces: Buffer[] = [];
    const begun = isLast ? text.length : beginningIn(text);
    let from = hiddenBytes;
    for (let at = placeFrom(text, 0); at < begun; at = placeFrom(text, at + 1)) {
      const length = matchAt(text, at);
      if (length === 0) continue;
      // One that begins within another is hidden with it: as far as it goes beyond, nothing else would hide it.
      if (at >= from) pieces.push(text.subarray(from, at), MASKED);
      from = Math.max(from, at + length);
    }
    if (from < begun) pieces.push(text.subarray(from, begun));
    held = text.subarray(begun);
    hiddenBytes = Math.max(0, from - begun);
    return pieces.length === 1 ? (pieces[0] ?? NOTHING) : Buffer.concat(pieces);
  }
}

/** The same for texts that are all at hand. */
export function hiderOf(secrets: readonly string[]): (text: string) => string {
  const mask = maskFor(secrets);
  return (text) => Buffer.concat([mask.push(Buffer.from(text)), mask.end()]).toString();
}

function needlesOf(secrets: readonly string[]): Buffer[] {
  // The line end behind a secret, which many files have, is not a part of it.
  const texts = secrets.flatMap((secret) => [
    secret.replace(/^[\r\n]+|[\r\n]+$/g, ''),
    ...secret.split(/\r?\n/),
  ]);
  return [...new Set(texts)]
    .filter(({ length }) => length >= SECRET_MIN_LENGTH)
    .map((text) => Buffer.from(text))
    .sort(Buffer.compare);
}

/**
 * Looks for many needles at once, in their order: 14,000 lines of one secret in a log that prints them all took 16 s
 * with a look for each.
 */
function createSearch(needles: readonly Buffer[]) {
  const longest = needles.reduce((most, { length }) => Math.max(most, length), 0); // too many to be arguments
  const prefixes = longestPrefixes(needles);
  // By their first four bytes: almost all of a text is passed over by that.
  const begins = new Uint8Array(0x10000);
  for (const needle of needles) begins[slotOf(needle.readInt32BE(0))] = 1;

  return { placeFrom, matchAt, beginningIn };

  /** The next place where a whole needle may stand; the text's length if there is none. */
  function placeFrom(text: Buffer, from: number): number {
    let bytes = ((text[from] ?? 0) << 16) | ((text[from + 1] ?? 0) << 8) | (text[from + 2] ?? 0);
    for (let last = from + 3; last < text.length; last++) {
      bytes = (bytes << 8) | (text[last] ?? 0);
      if (begins[slotOf(bytes)] === 1) return last - 3;
    }
    return text.length;
  }

  /** The length of the longest needle that stands at this place; 0: none does. */
  function matchAt(text: Buffer, at: number): number {
    // A needle that stands here is the last that does not come after the text, or a beginning of that one.
    for (let index = countUpTo(text, at) - 1; index >= 0; index = prefixes[index] ?? -1) {
      const needle = needles[index] ?? NOTHING;
      if (compareAt(text, at, needle) === 0) return needle.length;
    }
    return 0;
  }

  /** Where the text ends with the beginning of a needle, the leftmost of such places; the text's end if with none. */
  function beginningIn(text: Buffer): number {
    for (let at = Math.max(0, text.length - longest + 1); at < text.length; at++) {
      const rest = text.length - at;
      if (rest >= 4 && begins[slotOf(text.readInt32BE(at))] === 0) continue;
      const next = needles[countUpTo(text, at)];
      if (next !== undefined && next.length > rest && text.compare(next, 0, rest, at) === 0) return at;
    }
    return text.length;
  }

  /** How many needles do not come after the text from this place on. */
  function countUpTo(text: Buffer, at: number): number {
    let low = 0;
    let high = needles.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (compareAt(text, at, needles[middle] ?? NOTHING) < 0) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** For each needle which other one it begins with, the longest such; -1: none. They are in order. */
function longestPrefixes(needles: readonly Buffer[]): Int32Array {
  const prefixes = new Int32Array(needles.length);
  const chain: number[] = [];
  for (const [index, needle] of needles.entries()) {
    while (chain.length > 0 && compareAt(needle, 0, needles[chain.at(-1) ?? 0] ?? NOTHING) !== 0) chain.pop();
    prefixes[index] = chain.at(-1) ?? -1;
    chain.push(index);
  }
  return prefixes;
}

/** Spreads four bytes over 65,536 slots: Knuth's multiplicative hash. */
function slotOf(bytes: number): number {
  return Math.imul(bytes, 0x9e3779b1) >>> 16;
}

/** How as much of the text as the needle is long compares with it. */
function compareAt(text: Buffer, at: number, needle: Buffer): number {
  return text.compare(needle, 0, needle.length, at, Math.min(at + needle.length, text.length));
}

function joined(held: Buffer, bytes: Uint8Array): Buffer {
  return held.length === 0 ? asBuffer(bytes) : Buffer.concat([held, bytes]);
}

function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
