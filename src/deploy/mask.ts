import { createSearch } from './search.ts';

/** Hides secrets in a text that comes in pieces. */
interface Mask {
  /** Returns the masked text so far, but for an end that may be the beginning of a secret. */
  push(bytes: Uint8Array): Buffer;
  /** Returns what was held back. */
  end(): Buffer;
}

/**
 * Shorter values are words such as `true` or `eu-west`: hiding them would make logs unreadable, and reveal the value.
 */
const SECRET_MIN_LENGTH = 8;
/** What a secret is replaced by. */
export const HIDDEN = '***';
const MASKED = Buffer.from(HIDDEN);
const NOTHING = Buffer.alloc(0);

/**
 * Replaces every secret of 8 characters or more by `***`, and secrets that overlap by a single `***`. Each line of a
 * multi-line secret is a secret too, as programs print them one by one. The result does not depend on how the text was
 * cut into pieces.
 */
export function maskFor(secrets: readonly string[]): Mask {
  const needles = needlesOf(secrets);
  if (needles.length === 0) return { push: asBuffer, end: () => NOTHING };
  const search = createSearch(needles);
  let textBytes = 0;
  let held: Buffer = NOTHING;
  /** The secrets found beyond `doneUntil`, in order. All positions count from the beginning of the text. */
  const spans: Span[] = [];
  /** All before it was given out or hidden. */
  let doneUntil = 0;

  return {
    push: (bytes) => giveOut(asBuffer(bytes), search.read(bytes, hide)),
    end() {
      search.restart();
      return giveOut(NOTHING, NOTHING);
    },
  };

  /** Called in the order of the ends of what is found. Spans that overlap are merged. */
  function hide(endsAt: number, length: number): void {
    const to = textBytes + endsAt;
    const from = to - length;
    let last = spans.at(-1);
    if (last === undefined || last.to <= from) {
      spans.push({ from, to });
      return;
    }
    for (let before = spans.at(-2); before !== undefined && from < before.to; before = spans.at(-2)) {
      last = before;
      spans.pop();
    }
    last.from = Math.min(last.from, from);
    last.to = to;
  }

  /** What was held and then `bytes`, but for `kept`, which is their end and is held next. */
  function giveOut(bytes: Buffer, kept: Buffer): Buffer {
    const pieces: Buffer[] = [];
    const heldFrom = textBytes - held.length;
    const keptFrom = textBytes + bytes.length - kept.length;
    let passed = 0;
    for (const { from, to } of spans) {
      if (from >= keptFrom) break;
      // One that begins within what is hidden already extends that.
      if (from >= doneUntil) {
        show(from);
        pieces.push(MASKED);
      }
      doneUntil = to;
      passed += 1;
    }
    show(keptFrom);
    spans.splice(0, passed);
    held = kept;
    textBytes += bytes.length;
    return pieces.length === 1 ? (pieces[0] ?? NOTHING) : Buffer.concat(pieces);

    function show(until: number): void {
      if (doneUntil < Math.min(until, textBytes)) {
        pieces.push(held.subarray(doneUntil - heldFrom, until - heldFrom));
      }
      const from = Math.max(doneUntil, textBytes);
      if (from < until) pieces.push(bytes.subarray(from - textBytes, until - textBytes));
      doneUntil = Math.max(doneUntil, until);
    }
  }
}

interface Span {
  from: number;
  to: number;
}

/**
 * The same for whole texts. Those that are too short for a secret are not searched: that takes some 2 µs each, and an
 * output file of 64 KiB may have 32,768 lines.
 */
export function hiderOf(secrets: readonly string[]): (text: string) => string {
  const mask = maskFor(secrets);
  const hide = (text: string) => Buffer.concat([mask.push(Buffer.from(text)), mask.end()]).toString();
  return (text) => (text.length < SECRET_MIN_LENGTH ? text : hide(text));
}

function needlesOf(secrets: readonly string[]): Buffer[] {
  // A line end after a secret, as many files have one, is not part of it.
  const texts = secrets.flatMap((secret) => [
    secret.replace(/^[\r\n]+|(?<![\r\n])[\r\n]+$/g, ''),
    ...secret.split(/\r?\n/),
  ]);
  return [...new Set(texts)]
    .filter(({ length }) => length >= SECRET_MIN_LENGTH)
    .map((text) => Buffer.from(text));
}

function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
