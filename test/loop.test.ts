import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import type { Effects } from '../src/effects.ts';
import { AppError } from '../src/errors.ts';
import { startLoop } from '../src/loop.ts';
import { fakeEffects } from './helpers/effects.ts';

t.test('a loop ticks at once, and again at the time that the last tick named', async (t) => {
  const { effects, looks, settle } = loop(t, { next: (effects) => effects.now() + 200 });
  await settle();
  t.equal(looks(), 1);
  effects.advance(199);
  await settle();
  t.equal(looks(), 1);
  effects.advance(1);
  await settle();
  t.equal(looks(), 2);
});

t.test('a loop ticks after the idle time at the latest, whatever the clock does', async (t) => {
  const { effects, looks, settle } = loop(t, { next: (effects) => effects.now() + 60_000 });
  await settle();
  effects.jump(-3_600_000);
  effects.advance(500);
  await settle();
  t.equal(looks(), 2);
});

t.test('several wakes during a tick or after it lead to one more tick', async (t) => {
  const { loop: running, looks, settle } = loop(t);
  running.wake();
  running.wake();
  await settle();
  t.equal(looks(), 2);
  running.wake();
  running.wake();
  await settle();
  t.equal(looks(), 3);
});

t.test('ticks that follow each other immediately let others have their turn', async (t) => {
  const { looks, loop: running } = loop(t, { next: (effects) => effects.now() });
  for (let turn = 0; turn < 5; turn++) {
    await nextTurn();
    t.ok(looks() <= turn + 2, `${looks()} looks in ${turn + 1} turns`);
  }
  t.ok(looks() > 1, 'without a sleep between them');
  await running.stop();
});

t.test('a tick that throws is reported, and the loop goes on', async (t) => {
  const { effects, looks, settle, errors } = loop(t, {
    next: () => {
      throw new Error('a bug');
    },
  });
  await settle();
  effects.advance(500);
  await settle();
  t.equal(looks(), 2);
  t.match(errors, [{ message: 'a bug' }, { message: 'a bug' }]);
});

t.test('a database that takes no writes is reported once, until it takes some again', async (t) => {
  const full = new AppError('unavailable', 'the disk is full');
  const answers: (Error | null)[] = [full, full, full, null, full, new Error('a bug'), full];
  const { effects, settle, errors } = loop(t, {
    next: () => {
      const answer = answers.shift() ?? null;
      if (answer !== null) throw answer;
      return null;
    },
  });
  while (answers.length > 0) {
    await settle();
    effects.advance(500);
  }
  t.match(errors, [full, full, { message: 'a bug' }, full]);
});

t.test('quietMs is the time since the last successful tick began', async (t) => {
  const {
    effects,
    loop: running,
    settle,
  } = loop(t, {
    next: ({ block }) => {
      block(200);
      return null;
    },
  });
  await settle();
  effects.advance(300);
  t.equal(running.quietMs(), 500);
  running.wake();
  await settle();
  t.equal(running.quietMs(), 200);
});

t.test('a failed tick does not reset quietMs', async (t) => {
  let fails = true;
  const {
    effects,
    loop: running,
    settle,
  } = loop(t, {
    next: () => {
      if (fails) throw new Error('a bug');
      return null;
    },
  });
  await settle();
  effects.advance(500);
  await settle();
  t.equal(running.quietMs(), 500);
  fails = false;
  effects.advance(500);
  await settle();
  t.equal(running.quietMs(), 0);
});

t.test('after a stop there is no tick', async (t) => {
  const { effects, loop: running, looks, settle } = loop(t);
  await settle();
  await running.stop();
  running.wake();
  effects.advance(5_000);
  await settle();
  t.equal(looks(), 1);
});

t.test('a loop that is woken or stopped leaves no timer behind', async (t) => {
  const effects = fakeEffects();
  const timers = new Set<() => void>();
  const after: Effects['after'] = (delayMs, action) => {
    const cancel = effects.after(delayMs, action);
    timers.add(cancel);
    return () => {
      timers.delete(cancel);
      cancel();
    };
  };
  const running = startLoop(async () => null, {
    idleMs: 500,
    effects: { ...effects, after },
    onError: (error) => t.fail(`${error}`),
  });
  for (let round = 0; round < 3; round++) {
    for (let turn = 0; turn < 5; turn++) await nextTurn();
    t.equal(timers.size, 1);
    running.wake();
  }
  await running.stop();
  t.equal(timers.size, 0);
});

t.test('a stop during a tick waits for that tick, and for nothing else', async (t) => {
  const effects = fakeEffects();
  const look = Promise.withResolvers<null>();
  const running = startLoop(() => look.promise, {
    idleMs: 500,
    effects,
    onError: (error) => t.fail(`${error}`),
  });
  let stopped = false;
  void running.stop().then(() => {
    stopped = true;
  });
  await nextTurn();
  t.equal(stopped, false);
  look.resolve(null);
  for (let turn = 0; turn < 5; turn++) await nextTurn();
  t.equal(stopped, true);
});

function loop(
  t: Test,
  { next = () => null }: { next?: (effects: ReturnType<typeof fakeEffects>) => number | null } = {},
) {
  const effects = fakeEffects();
  const errors: unknown[] = [];
  let looks = 0;
  const running = startLoop(
    async () => {
      looks += 1;
      return next(effects);
    },
    { idleMs: 500, effects, onError: (error) => errors.push(error) },
  );
  t.teardown(() => running.stop());
  /** Long enough for whatever does not wait for the clock. */
  const settle = async () => {
    for (let turn = 0; turn < 5; turn++) await nextTurn();
  };
  return { effects, loop: running, errors, looks: () => looks, settle };
}
