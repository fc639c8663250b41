const SECOND_MS = 1_000;
export const MINUTE_MS = 60 * SECOND_MS;
export const HOUR_MS = 60 * MINUTE_MS;
export const DAY_MS = 24 * HOUR_MS;

/** A hundred years: whatever is added to it stays a date. */
const DURATION_MAX_MS = 36_500 * DAY_MS;

/** The same as one types it, for messages. */
export const LONGEST_DURATION = formatDuration(DURATION_MAX_MS);

const DURATION_FORM = /^(?=\d)(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,10})s)?$/;

/** `10s`, `30m`, `24h`, `5d`, also `1h45m`, and `0`, in milliseconds; undefined for anything else and beyond 36500 days. */
export function parseDuration(text: string): number | undefined {
  if (text === '0') return 0;
  const parts = DURATION_FORM.exec(text);
  if (parts === null) return undefined;
  const [days = 0, hours = 0, minutes = 0, seconds = 0] = parts.slice(1).map((digits) => Number(digits ?? 0));
  const durationMs = days * DAY_MS + hours * HOUR_MS + minutes * MINUTE_MS + seconds * SECOND_MS;
  return durationMs <= DURATION_MAX_MS ? durationMs : undefined;
}

/** The shortest text that `parseDuration` reads as the same, a part of a second left out: `1h45m`. */
export function formatDuration(durationMs: number): string {
  const units = [
    ['d', Math.floor(durationMs / DAY_MS)],
    ['h', Math.floor((durationMs % DAY_MS) / HOUR_MS)],
    ['m', Math.floor((durationMs % HOUR_MS) / MINUTE_MS)],
    ['s', Math.floor((durationMs % MINUTE_MS) / SECOND_MS)],
  ] as const;
  return units.map(([unit, count]) => (count === 0 ? '' : `${count}${unit}`)).join('') || '0';
}
