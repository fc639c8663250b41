import { PassThrough } from 'node:stream';
import t from 'tap';
import { createPatience } from '../../src/cli/patience.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import type { Effects } from '../../src/effects.ts';
import { fakeEffects, hurried } from '../helpers/effects.ts';

const WHY = 'it cannot be reached';
const OVER = { code: 'unavailable', message: `${WHY}, and --retry-for is over: gave up` };

t.test('waits double up to 15 s, and begin anew after a success', async (t) => {
  const { patience, waitsMs, notes } = patient(3_600_000);
  for (let times = 0; times < 7; times++) await patience.wait(WHY);
  patience.reset();
  await patience.wait(WHY);
  t.strictSame(waitsMs, [500, 1_000, 2_000, 4_000, 8_000, 15_000, 15_000, 500]);
  t.match(notes(), `${WHY}: trying again in 500ms\n${WHY}: trying again in 1s\n`);
});

t.test('waits are shorter by up to a third, at random', async (t) => {
  const { patience, waitsMs } = patient(3_600_000, 255);
  for (let times = 0; times < 7; times++) await patience.wait(WHY);
  t.strictSame(waitsMs, [334, 668, 1_336, 2_672, 5_344, 10_020, 10_020]);
});

t.test('the last try is made at the end of the time, which begins with the first failure', async (t) => {
  const { patience, waitsMs, effects } = patient(1_200);
  effects.advance(10_000);
  for (const _ of ['first', 'after a success']) {
    await patience.wait(WHY);
    await patience.wait(WHY);
    await t.rejects(patience.wait(WHY), OVER);
    patience.reset();
  }
  t.strictSame(waitsMs, [500, 700, 500, 700]);
});

t.test('the time for what got no answer begins when it had to be answered', async (t) => {
  const { patience, waitsMs, effects } = patient(1_200);
  effects.advance(10_000);
  await patience.wait(WHY, 0, 9_500);
  await patience.wait(WHY, 0, 10_500);
  await t.rejects(patience.wait(WHY), OVER);
  patience.reset();
  await patience.wait(WHY, 0, 60_000); // it was refused before
  await patience.wait(WHY);
  t.strictSame(waitsMs, [500, 200, 500, 700]);
});

t.test('a wait is as long as the service asks for, unless that is longer than what is left', async (t) => {
  const { patience, waitsMs } = patient(5_000);
  await patience.wait(WHY, 3_000);
  await patience.wait(WHY, 500); // its own is longer
  await patience.wait(WHY, 1_000);
  await t.rejects(patience.wait(WHY, 3_000), OVER);
  patience.reset();
  await t.rejects(patience.wait(WHY, 6_000), {
    code: 'unavailable',
    message: `${WHY} and asks to wait 6s, longer than --retry-for leaves: gave up`,
  });
  t.strictSame(waitsMs, [3_000, 1_000, 1_000]);
});

/** With a clock that advances through each wait, and this random byte. */
function patient(limitMs: number, random = 0) {
  const effects = fakeEffects();
  const hurrying = hurried(effects);
  const waitsMs: number[] = [];
  const after: Effects['after'] = (delayMs, action) => {
    waitsMs.push(delayMs);
    return hurrying.after(delayMs, action);
  };
  const stderr = new PassThrough();
  const terminal = createTerminal(
    { stdin: process.stdin, stdout: new PassThrough(), stderr },
    () => undefined,
  );
  const randomBytes = () => Uint8Array.of(random);
  const patience = createPatience(limitMs, { effects: { ...hurrying, after, randomBytes }, terminal });
  return { patience, waitsMs, notes: () => String(stderr.read()), effects };
}
