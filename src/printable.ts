/**
 * What a terminal would obey, or what would be read as another text than it is: control characters, ends of lines and
 * paragraphs, and what displays ignore or turn the direction of writing by (UAX #44, Default_Ignorable_Code_Point), but
 * for what joins letters and chooses their form.
 */
const UNSEEN =
  /(?!\p{Join_Control}|\p{Variation_Selector})[\p{Cc}\u2028\u2029\p{Default_Ignorable_Code_Point}]/gu;

/** The text with all that is not seen shown, as `\x1b`, `\u202e` or `\u{e0041}`. */
export function printable(text: string): string {
  return text.replaceAll(UNSEEN, (character) => {
    const code = character.codePointAt(0) ?? 0;
    if (code < 0x100) return `\\x${hex(code, 2)}`;
    return code < 0x10000 ? `\\u${hex(code, 4)}` : `\\u{${hex(code, 5)}}`;
  });
}

/** The same JSON value: what JSON lets stand as it is, a terminal may obey. */
export function escapedIn(json: string): string {
  return json.replaceAll(UNSEEN, (character) =>
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
