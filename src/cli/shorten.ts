/**
 * A form of the text of this width, or a wider one, if less of the text would be of no use. Different texts may get the
 * same one: rows are told apart by their ids.
 */
export type Shorten = (text: string, width: number) => string;

/** Less of a name, or of the end of a URL, is of no use. */
const NAME_MIN_WIDTH = 8;
/** The beginning of a reason says which one it is. */
const SENTENCE_MIN_WIDTH = 16;
/** No scope or event type is longer, so that these are never cut. */
const ITEM_MIN_WIDTH = 24;

/** For names and commands: without their end. */
export function shortName(text: string, width: number): string {
  return cutEnd(text, Math.max(width, NAME_MIN_WIDTH));
}

/** For sentences: the same, but not as short. */
export function shortSentence(text: string, width: number): string {
  return cutEnd(text, Math.max(width, SENTENCE_MIN_WIDTH));
}

/** For refs, many of which differ at their end only: without their middle. */
export function shortRef(text: string, width: number): string {
  const shown = Math.max(width, NAME_MIN_WIDTH) - 1;
  return cutMiddle(text, Math.ceil(shown / 2), Math.floor(shown / 2));
}

/** For URLs: the host and the end. */
export function shortUrl(text: string, width: number): string {
  const [origin = ''] = /^\w+:\/\/[^/?#]*/.exec(text) ?? [];
  const originWidth = displayWidth(origin);
  return cutMiddle(text, originWidth, Math.max(width - originWidth - 1, NAME_MIN_WIDTH));
}

/** For the status of a deployment: whole words and numbers of it, and the beginning of other reasons. */
export function shortStatus(text: string, width: number): string {
  return shortSentence(text.replace(', number ', ' #').replace('exit code', 'exit'), width);
}

/** For event types, or a list of some: without what all begin with. */
export function shortEvents(text: string, width: number): string {
  return shortList(' ')(text.replaceAll('deployment.', ''), width);
}

/**
 * For lists, so that none is taken for a shorter one: whole items, and how many more there are. Of a single item that is
 * too long, the beginning.
 */
export function shortList(separator: string): Shorten {
  return (text, width) => {
    if (displayWidth(text) <= width) return text;
    const items = text.split(separator);
    const withRest = (kept: number, shown: string) =>
      kept < items.length ? `${shown} +${items.length - kept}` : shown;
    for (let kept = items.length - 1; kept > 1; kept--) {
      const shown = withRest(kept, items.slice(0, kept).join(separator));
      if (displayWidth(shown) <= width) return shown;
    }
    const restWidth = withRest(1, '').length;
    return withRest(1, cutEnd(items[0] ?? '', Math.max(width - restWidth, ITEM_MIN_WIDTH)));
  };
}

function cutEnd(text: string, width: number): string {
  return displayWidth(text) <= width ? text : `${firstOf(text, width - 1)}…`;
}

function cutMiddle(text: string, firstWidth: number, lastWidth: number): string {
  if (displayWidth(text) <= firstWidth + 1 + lastWidth) return text;
  return `${firstOf(text, firstWidth)}…${lastOf(text, lastWidth)}`;
}

/** Its first characters, as many as fit: no more of a long text is looked at. */
function firstOf(text: string, width: number): string {
  if (isNarrow(text)) return text.slice(0, width);
  let keptWidth = 0;
  for (const { segment, index } of graphemesOf(text)) {
    keptWidth += graphemeWidth(segment);
    if (keptWidth > width) return text.slice(0, index);
  }
  return text;
}

/** Its last characters, as many as fit. */
function lastOf(text: string, width: number): string {
  if (isNarrow(text)) return text.slice(-width);
  let restWidth = displayWidth(text);
  for (const { segment, index } of graphemesOf(text)) {
    if (restWidth <= width) return text.slice(index);
    restWidth -= graphemeWidth(segment);
  }
  return '';
}

/** How many columns of a terminal the text takes. */
export function displayWidth(text: string): number {
  if (isNarrow(text)) return text.length;
  let width = 0;
  for (const { segment } of graphemesOf(text)) width += graphemeWidth(segment);
  return width;
}

/** Whether each of its UTF-16 code units is a character of one column. */
function isNarrow(text: string): boolean {
  return /^[\x20-\x7e\u2026]*$/.test(text);
}

let segmenter: Intl.Segmenter | undefined;

/**
 * What a reader takes for one character. The segmenter is made on first use, as that takes longer than the rest of a
 * list.
 */
function graphemesOf(text: string): Intl.Segments {
  segmenter ??= new Intl.Segmenter('en', { granularity: 'grapheme' });
  return segmenter.segment(text);
}

/** Characters of two columns: East Asian letters, full-width forms and emoji (UAX #11, UTS #51). */
const WIDE =
  /\p{Script=Han}|\p{Script=Hiragana}|\p{Script=Katakana}|\p{Script=Hangul}|[\u3000-\u303e\uff01-\uff60\uffe0-\uffe6]|\p{Emoji_Presentation}|\ufe0f/u;

/** Characters of the same scripts that take one column. */
const HALF_WIDTH = /^[\uff61-\uffdc]/;

function graphemeWidth(grapheme: string): number {
  return WIDE.test(grapheme) && !HALF_WIDTH.test(grapheme) ? 2 : 1;
}
