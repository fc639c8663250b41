export const SECOND_MS = 1_000;
export const MINUTE_MS = 60 * SECOND_MS;
export const HOUR_MS = 60 * MINUTE_MS;
export const DAY_MS = 24 * HOUR_MS;

const ENDS_SOON_MS = 14 * DAY_MS;

/**
 * From when on what is valid for this time must be replaced soon: in its last 14 days or, if it is not meant to live long,
 * the last quarter of its life.
 */
export function endsSoonFrom(fromMs: number, toMs: number): number {
  return toMs - Math.min(ENDS_SOON_MS, (toMs - fromMs) / 4);
}

/** A hundred years: adding it to any time of today still gives a valid date. */
export const DURATION_MAX_MS = 36_500 * DAY_MS;

/** The same as it would be typed, for messages. */
export const LONGEST_DURATION = formatDuration(DURATION_MAX_MS);

const DURATION_FORM = /^(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$/;

/** Milliseconds of `10s`, `30m`, `24h`, `5d`, `1h45m` or `0`; undefined for other texts and more than 36500 days. */
export function parseDuration(text: string): number | undefined {
  if (text === '0') return 0;
  const parts = DURATION_FORM.exec(text);
  if (parts === null) return undefined;
  const [days = 0, hours = 0, minutes = 0, seconds = 0] = parts.slice(1).map((digits) => Number(digits ?? 0));
  const durationMs = days * DAY_MS + hours * HOUR_MS + minutes * MINUTE_MS + seconds * SECOND_MS;
  return durationMs <= DURATION_MAX_MS ? durationMs : undefined;
}

/** The shortest text that `parseDuration` reads as this duration, rounded down to seconds: `1h45m`. */
export function formatDuration(durationMs: number): string {
  const units = [
    ['d', Math.floor(durationMs / DAY_MS)],
    ['h', Math.floor((durationMs % DAY_MS) / HOUR_MS)],
    ['m', Math.floor((durationMs % HOUR_MS) / MINUTE_MS)],
    ['s', Math.floor((durationMs % MINUTE_MS) / SECOND_MS)],
  ] as const;
  return units.map(([unit, count]) => (count === 0 ? '' : `${count}${unit}`)).join('') || '0';
}
