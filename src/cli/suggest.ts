/** What was probably meant by `word`: the candidate that is fewest edits away; undefined if even that is too far. */
export function nearest(word: string, candidates: Iterable<string>): string | undefined {
  let best: { candidate: string; edits: number } | undefined;
  for (const candidate of candidates) {
    const edits = editDistance(word.toLowerCase(), candidate.toLowerCase());
    const longest = Math.max(word.length, candidate.length);
    if (edits / longest < 0.4 && (best === undefined || edits < best.edits)) best = { candidate, edits };
  }
  return best?.candidate;
}

/** Levenshtein's distance, row by row, but swapping two neighbouring letters, the most frequent typo, is one edit. */
function editDistance(from: string, to: string): number {
  let twoAbove: number[] = [];
  let above = Array.from({ length: to.length + 1 }, (_, column) => column);
  for (let row = 1; row <= from.length; row++) {
    const current = [row];
    for (let column = 1; column <= to.length; column++) {
      const replaced = (above[column - 1] ?? 0) + (from[row - 1] === to[column - 1] ? 0 : 1);
      const isSwap = from[row - 2] === to[column - 1] && from[row - 1] === to[column - 2];
      const swapped = isSwap ? (twoAbove[column - 2] ?? Infinity) + 1 : Infinity;
      current.push(Math.min(replaced, swapped, (above[column] ?? 0) + 1, (current[column - 1] ?? 0) + 1));
    }
    [twoAbove, above] = [above, current];
  }
  return above[to.length] ?? 0;
}
