import fc from 'fast-check';
import t from 'tap';
import { type FailedAttempt, nextAttempt, parseRetryAfter } from '../../src/deliver/retry.ts';
import { HOUR_MS } from '../../src/durations.ts';
import { DEFAULT_SCHEDULE } from '../helpers/schedule.ts';

const START_MS = Date.parse('2026-11-21T08:00:00.000Z');

function failed(changes: Partial<FailedAttempt>): FailedAttempt {
  return {
    ladderStartedAtMs: START_MS,
    isStartDoubtful: false,
    ladderAttempts: 1,
    nowMs: START_MS,
    retryAfter: null,
    randomFraction: 0,
    schedule: DEFAULT_SCHEDULE,
    ...changes,
  };
}

/** When each attempt of a ladder is made, in milliseconds after its start, if every one fails at once. */
function ladder(changes: Partial<FailedAttempt> = {}): number[] {
  const attemptsMs = [0];
  for (;;) {
    const sinceStartMs = attemptsMs.at(-1) ?? 0;
    const next = nextAttempt(
      failed({ ladderAttempts: attemptsMs.length, nowMs: START_MS + sinceStartMs, ...changes }),
    );
    if (next.kind === 'exhausted') return attemptsMs;
    attemptsMs.push(next.atMs - START_MS);
  }
}

t.test('the ladder', async (t) => {
  t.test(
    'is 5 s, 30 s, 2 min, 6 min, 18 min, 45 min, 1 h 45, 3 h 30, 7 h and a last one after 24 h',
    async (t) => {
      const gapsSeconds = [5, 30, 120, 360, 1_080, 2_700, 6_300, 12_600, 25_200];
      let sinceStartMs = 0;
      const expected = [0, ...gapsSeconds.map((gap) => (sinceStartMs += gap * 1_000)), 24 * HOUR_MS];
      t.same(ladder(), expected);
    },
  );

  t.test('has each gap up to 10 % longer at random, and the last one still after 24 h', async (t) => {
    const shortest = ladder();
    const longest = ladder({ randomFraction: 1 });
    for (let index = 1; index < 10; index++) {
      t.equal(longest[index], Math.round((shortest[index] ?? 0) * 1.1), `attempt ${index + 1}`);
    }
    t.equal(longest.length, 11);
    t.equal(longest.at(-1), 24 * HOUR_MS);
  });

  t.test('is over after 24 h also if by the clock, which was set back, it is yet to begin', async (t) => {
    for (const [isStartDoubtful, randomFraction] of [
      [true, 0],
      [true, 0.5],
      [true, 1],
      [false, 1],
    ] as const) {
      const ladderStartedAtMs = START_MS + 48 * HOUR_MS;
      const attemptsMs = ladder({ isStartDoubtful, ladderStartedAtMs, randomFraction });
      t.same(attemptsMs.slice(0, -1), ladder({ randomFraction }).slice(0, -1));
      const lastMs = attemptsMs.at(-1) ?? 0;
      t.ok(lastMs > 22.6 * HOUR_MS && lastMs <= 24 * HOUR_MS, `${lastMs / HOUR_MS} h`);
    }
  });

  t.test('has no fewer attempts if its start is doubtful than if its gaps are the longest', async (t) => {
    for (const windowHours of [20, 24, 25, 26.4, 27]) {
      const delaysMs = [8 * HOUR_MS, 8 * HOUR_MS, 8 * HOUR_MS];
      const schedule = { delaysMs, windowMs: windowHours * HOUR_MS };
      const longest = ladder({ schedule, randomFraction: 1 });
      for (const randomFraction of [0, 0.5, 1]) {
        const { length } = ladder({ schedule, randomFraction, isStartDoubtful: true });
        t.ok(length >= longest.length, `${windowHours} h: ${length} of ${longest.length}`);
      }
    }
  });

  t.test('goes on from the attempt that was late, and still ends after 24 h', async (t) => {
    const nowMs = START_MS + 20 * HOUR_MS;
    t.same(nextAttempt(failed({ ladderAttempts: 2, nowMs })), { kind: 'retry', atMs: nowMs + 30_000 });
    t.same(nextAttempt(failed({ ladderAttempts: 9, nowMs })), {
      kind: 'retry',
      atMs: START_MS + 24 * HOUR_MS,
    });
    t.same(nextAttempt(failed({ ladderAttempts: 2, nowMs: START_MS + 24 * HOUR_MS })), { kind: 'exhausted' });
  });

  t.test('with other delays ends at the end of its window', async (t) => {
    const schedule = (delaysMs: number[], windowMs: number) => ({ schedule: { delaysMs, windowMs } });
    t.same(ladder(schedule([10, 20], 100)), [0, 10, 30, 100], 'room to spare: one more at the end');
    t.same(ladder(schedule([10, 200, 300], 100)), [0, 10, 100], 'a gap past the window: one last at its end');
    t.same(ladder(schedule([100], 100)), [0, 100], 'a gap that ends with the window is the last');
    t.same(ladder(schedule([], 100)), [0, 100], 'no delays: only the last');
    t.same(ladder(schedule([10, 20], 0)), [0], 'no window: nothing is retried');
  });
});

t.test('Retry-After', async (t) => {
  const after = (retryAfter: string, ladderAttempts = 1) => {
    const next = nextAttempt(failed({ retryAfter, ladderAttempts }));
    return next.kind === 'retry' ? next.atMs - START_MS : next.kind;
  };

  t.test('lengthens a gap, in seconds or as a date', async (t) => {
    t.equal(after('60'), 60_000);
    t.equal(after('Sat, 21 Nov 2026 08:02:00 GMT'), 120_000);
  });

  t.test('never shortens one', async (t) => {
    t.equal(after('0', 5), 1_080_000);
    t.equal(after('10', 5), 1_080_000);
    t.equal(after('Sat, 21 Nov 2020 08:02:00 GMT', 5), 1_080_000);
  });

  t.test('lengthens it by an hour at most', async (t) => {
    t.equal(after('3605'), 3_605_000);
    t.equal(after('3606'), 3_605_000);
    for (const digits of [12, 13, 400]) t.equal(after('9'.repeat(digits)), 3_605_000, `${digits} digits`);
    t.equal(after('Fri, 31 Dec 9999 23:59:59 GMT'), 3_605_000);
  });

  t.test('never leads past the window', async (t) => {
    const nowMs = START_MS + 23.5 * HOUR_MS;
    t.same(nextAttempt(failed({ nowMs, ladderAttempts: 3, retryAfter: '3600' })), {
      kind: 'retry',
      atMs: START_MS + 24 * HOUR_MS,
    });
    t.same(ladder({ retryAfter: '86400', randomFraction: 1 }).length, 11, 'and costs no attempt');
  });

  t.test('is read in each form that RFC 9110 knows, and in no other', async (t) => {
    const nowMs = Date.UTC(1994, 10, 6, 8, 49, 0);
    t.equal(parseRetryAfter('120', nowMs), 120_000);
    t.equal(parseRetryAfter(' 120 ', nowMs), 120_000);
    t.equal(parseRetryAfter('Sun, 06 Nov 1994 08:49:37 GMT', nowMs), 37_000);
    t.equal(parseRetryAfter('Sunday, 06-Nov-94 08:49:37 GMT', nowMs), 37_000);
    t.equal(parseRetryAfter('Sun Nov  6 08:49:37 1994', nowMs), 37_000);
    t.equal(parseRetryAfter('Sun, 06 Nov 1994 08:48:00 GMT', nowMs), 0);
    for (const header of ['', '-1', '1.5', '1e3', '0x10', '1 2', 'soon', '1994-11-06T08:49:37Z', '1, 2']) {
      t.equal(parseRetryAfter(header, nowMs), undefined, header);
    }
    t.equal(parseRetryAfter('Sun, 99 Nov 1994 08:49:37 GMT', nowMs), undefined);
    t.equal(parseRetryAfter('9'.repeat(400), nowMs), Number.POSITIVE_INFINITY);
  });

  t.test('is in UTC wherever davit runs, also without a zone', async (t) => {
    const zone = process.env['TZ'];
    t.teardown(() => {
      if (zone === undefined) delete process.env['TZ'];
      else process.env['TZ'] = zone;
    });
    process.env['TZ'] = 'America/New_York';
    t.equal(parseRetryAfter('Sun Nov  6 08:49:37 1994', Date.UTC(1994, 10, 6, 8, 49, 0)), 37_000);
  });
});

t.test('for any clock and schedule', async (t) => {
  const schedule = fc.record({
    delaysMs: fc.array(fc.integer({ min: 1, max: 30 * HOUR_MS }), { maxLength: 12 }),
    windowMs: fc.integer({ min: 0, max: 48 * HOUR_MS }),
  });
  const anyFailed = fc.record({
    ladderStartedAtMs: fc.integer({ min: 0, max: 4e12 }),
    isStartDoubtful: fc.boolean(),
    ladderAttempts: fc.integer({ min: 1, max: 20 }),
    nowMs: fc.integer({ min: 0, max: 4e12 }),
    retryAfter: fc.oneof(
      fc.constant(null),
      fc.string(),
      fc.nat().map(String),
      fc.date({ noInvalidDate: true }).map((date) => date.toUTCString()),
    ),
    randomFraction: fc.double({ min: 0, max: 1, noNaN: true }),
    schedule: fc.oneof(fc.constant(DEFAULT_SCHEDULE), schedule),
  });

  t.test(
    'the next attempt is in whole milliseconds, not before now and at most one window away',
    async () => {
      fc.assert(
        fc.property(anyFailed, (attempt) => {
          const next = nextAttempt(attempt);
          if (next.kind === 'exhausted') return true;
          const { nowMs, schedule } = attempt;
          return Number.isInteger(next.atMs) && next.atMs > nowMs && next.atMs <= nowMs + schedule.windowMs;
        }),
      );
    },
  );

  t.test('nothing is tried once the window is over', async () => {
    fc.assert(
      fc.property(anyFailed, fc.nat(), (attempt, pastMs) => {
        const nowMs = attempt.ladderStartedAtMs + attempt.schedule.windowMs + pastMs;
        return nextAttempt({ ...attempt, nowMs }).kind === 'exhausted';
      }),
    );
  });

  t.test(
    'a ladder ends, with at most two attempts more than delays, also if the clock jumps each time',
    async () => {
      fc.assert(
        fc.property(anyFailed, fc.infiniteStream(fc.integer({ min: -1e11, max: 1e11 })), (first, jumps) => {
          let { nowMs } = first;
          let attempts = 1;
          for (const jumpMs of jumps) {
            const next = nextAttempt({ ...first, nowMs, ladderAttempts: attempts });
            if (next.kind === 'exhausted') break;
            attempts += 1;
            nowMs = Math.max(0, next.atMs + jumpMs);
          }
          return attempts <= first.schedule.delaysMs.length + 2;
        }),
      );
    },
  );
});
