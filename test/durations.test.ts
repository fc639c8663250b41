import fc from 'fast-check';
import t from 'tap';
import { formatDuration, parseDuration } from '../src/durations.ts';

const SECONDS_MAX = 36_500 * 86_400;

t.test('durations are read as people write them', async (t) => {
  const cases = {
    '0': 0,
    '10s': 10_000,
    '30m': 1_800_000,
    '24h': 86_400_000,
    '5d': 432_000_000,
    '1h45m': 6_300_000,
    '1d2h3m4s': 93_784_000,
    '90s': 90_000,
    '0s': 0,
  };
  for (const [text, durationMs] of Object.entries(cases)) t.equal(parseDuration(text), durationMs, text);
});

t.test('a formatted duration is read as the same', async (t) => {
  fc.assert(
    fc.property(fc.integer({ min: 0, max: SECONDS_MAX }), (seconds) => {
      t.equal(parseDuration(formatDuration(seconds * 1_000)), seconds * 1_000);
    }),
  );
});

t.test('a duration is formatted as short as it can be', async (t) => {
  const cases = {
    '0': 0,
    '1s': 1_999,
    '1h45m': 6_300_000,
    '1d1s': 86_401_000,
    '36500d': SECONDS_MAX * 1_000,
  };
  for (const [text, durationMs] of Object.entries(cases)) t.equal(formatDuration(durationMs), text);
  t.equal(formatDuration(999), '0');
});

t.test('the units of a duration add up', async (t) => {
  const count = fc.integer({ min: 0, max: 5_000 });
  fc.assert(
    fc.property(count, count, count, count, (days, hours, minutes, seconds) => {
      const expected = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000;
      t.equal(parseDuration(`${days}d${hours}h${minutes}m${seconds}s`), expected);
    }),
  );
});

t.test('no other text is a duration, nor is one above 36,500 days', async (t) => {
  const wrong = [
    '',
    ' ',
    '10',
    '1',
    '-5m',
    '+5m',
    '5 m',
    '5M',
    '10ms',
    '1.5h',
    '1e3s',
    '5m1h',
    '5m5m',
    's',
    'm5',
    'off',
    '٥m',
    '5m\n',
  ];
  for (const text of wrong) t.equal(parseDuration(text), undefined, JSON.stringify(text));
  t.equal(parseDuration('36500d'), SECONDS_MAX * 1_000);
  t.equal(parseDuration('36501d'), undefined);
  t.equal(parseDuration(`${SECONDS_MAX}s`), SECONDS_MAX * 1_000);
  t.equal(parseDuration('99999999999999999999s'), undefined);
});

t.test('any text is read as a whole number of seconds or as undefined', async (t) => {
  const text = fc.oneof(fc.string(), fc.stringMatching(/^\d{1,12}[smhd]?\d{0,12}[smhd]?$/));
  fc.assert(
    fc.property(text, (anything) => {
      const durationMs = parseDuration(anything);
      t.ok(
        durationMs === undefined ||
          (Number.isSafeInteger(durationMs / 1_000) && durationMs >= 0 && durationMs <= SECONDS_MAX * 1_000),
      );
    }),
  );
});
