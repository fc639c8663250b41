import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { fillPartial } from '../../src/cli/file-work.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { makeLarge } from '../helpers/large.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('while a copy is made, how much of it there is is shown again and again', async (t) => {
  const { shown, filled, effects } = progressOf(t, Buffer.of());
  await filled;
  const copied = /^copying: \d+ % of 1\.\d MB$/;
  t.match(shown, [copied, copied, copied, copied, 'checking the copy']);
  t.equal(shown.length, 5);

  effects.after = () => {
    t.fail('there is nothing left to look at');
    return () => undefined;
  };
  effects.advance(200);
});

t.test('how much of a copy there is is its size, and 100 % at most', async (t) => {
  for (const [bytes, text] of [
    [600_000, /^copying: 4\d % of 1\.\d MB$/],
    [6_000_000, /^copying: 100 % of 1\.\d MB$/],
  ] as const) {
    const { shown, filled } = progressOf(t, Buffer.alloc(bytes));
    await t.rejects(filled, 'a copy is not made into a file that has something in it');
    t.match(shown, [text, text, text, text]);
  }
});

/** What is shown while a file of 1.2 MB is copied into one with these bytes; more time passes at once at each step. */
function progressOf(t: Test, bytes: Buffer) {
  const directory = temporaryDirectory(t);
  const [dbPath, path] = ['davit.db', 'copy'].map((name) => join(directory, name)) as [string, string];
  makeLarge(dbPath, 1);
  writeFileSync(path, bytes);
  const effects = fakeEffects();
  const shown: string[] = [];
  let isAdvancing = false;
  const progress = (text: string) => {
    shown.push(text);
    if (isAdvancing) return;
    isAdvancing = true;
    effects.advance(600);
    isAdvancing = false;
  };
  const filled = fillPartial(
    'copy',
    { path: dbPath, name: 'davit.db' },
    { path, publishAs: () => undefined, discard: () => undefined },
    new AbortController().signal,
    { effects, terminal: { progress } } as never,
  );
  return { shown, filled, effects };
}
