/**
 * Removes the quotes and backslashes of a word as a shell does, even if a quote is not closed yet. Does not expand
 * variables or command substitutions: nothing may run while the user is still typing.
 */
export function unquote(typed: string): string {
  let meant = '';
  let quote = '';
  for (let at = 0; at < typed.length; at++) {
    const letter = typed.charAt(at);
    const next = typed.charAt(at + 1);
    if (quote === "'") {
      if (letter === "'") quote = '';
      else meant += letter;
    } else if (letter === '\\' && (quote === '' || /["$`\\]/.test(next))) {
      meant += next;
      at += 1;
    } else if (letter === '"') {
      quote = quote === '' ? '"' : '';
    } else if (letter === "'" && quote === '') {
      quote = "'";
    } else {
      meant += letter;
    }
  }
  return meant;
}

/** Quotes `value` as a word for bash; to replace `typed`, in the quotes with which that begins, if any. */
export function quoteForBash(value: string, typed = ''): string {
  switch (typed.charAt(0)) {
    case "'":
      return betweenSingleQuotes(value);
    case '"':
      return value.replaceAll(/["$`\\]/g, '\\$&');
    default:
      return value.replaceAll(/[^\w@%+=:,./\u0080-\uffff-]/g, '\\$&');
  }
}

/** `value` in single quotes, which any shell takes literally. */
export function singleQuoted(value: string): string {
  return `'${betweenSingleQuotes(value)}'`;
}

function betweenSingleQuotes(value: string): string {
  return value.replaceAll("'", "'\\''");
}
