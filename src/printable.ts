/**
 * Characters that a terminal would obey, or that make a text look like another one: control characters, line and
 * paragraph separators, and default ignorable code points (UAX #44), among which are those that change the direction of
 * writing. Joiners and variation selectors are allowed: they join letters and choose their form.
 */
const UNSAFE =
  /(?!\p{Join_Control}|\p{Variation_Selector})[\p{Cc}\u2028\u2029\p{Default_Ignorable_Code_Point}]/gu;

/** The text with unsafe characters escaped, as `\x1b`, `\u202e` or `\u{e0041}`. */
export function printable(text: string): string {
  return text.replaceAll(UNSAFE, (character) => {
    const code = character.codePointAt(0) ?? 0;
    if (code < 0x100) return `\\x${hex(code, 2)}`;
    return code < 0x10000 ? `\\u${hex(code, 4)}` : `\\u{${hex(code, 5)}}`;
  });
}

/** The same JSON value with unsafe characters escaped, some of which JSON allows unescaped. */
export function escapedIn(json: string): string {
  return json.replaceAll(UNSAFE, (character) =>
    character === '\n'
      ? character
      : character
          .split('')
          .map((half) => `\\u${hex(half.charCodeAt(0), 4)}`)
          .join(''),
  );
}

function hex(code: number, digits: number): string {
  return code.toString(16).padStart(digits, '0');
}
