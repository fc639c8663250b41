/**
 * What a shell would make of a word, also of one whose quotes are not closed yet; variables and commands in it stay as
 * they were typed, as nothing may run while somebody is still typing.
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

/** As it may stand in a command line of bash in place of `typed`, which may have begun with a quote. */
export function quoteForBash(value: string, typed: string): string {
  switch (typed.charAt(0)) {
    case "'":
      return value.replaceAll("'", "'\\''");
    case '"':
      return value.replaceAll(/["$`\\]/g, '\\$&');
    default:
      return value.replaceAll(/[^\w@%+=:,./\u0080-\uffff-]/g, '\\$&');
  }
}
