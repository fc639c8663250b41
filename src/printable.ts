/**
 * What a terminal would obey, or what would be read as another text than it is: control characters, ends of lines and
 * paragraphs, what turns the direction of writing, and what takes no room at all (UTS #39).
 */
const UNSEEN = /[\p{Cc}\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu;

/** The text with all that is not seen shown, as `\x1b` or `\u202e`. */
export function printable(text: string): string {
  return text.replaceAll(UNSEEN, (character) => {
    const code = character.charCodeAt(0);
    return code < 256 ? `\\x${hex(code, 2)}` : `\\u${hex(code, 4)}`;
  });
}

/** The same JSON value: what JSON lets stand as it is, a terminal may obey. */
export function escapedIn(json: string): string {
  return json.replaceAll(UNSEEN, (character) =>
    character === '\n' ? character : `\\u${hex(character.charCodeAt(0), 4)}`,
  );
}

function hex(code: number, digits: number): string {
  return code.toString(16).padStart(digits, '0');
}
