import { readFileSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { releaseStartMemory } from '../src/memory.ts';
import { fakeEffects } from './helpers/effects.ts';

t.test('what only the start needed of the executable leaves memory', async (t) => {
  const effects = fakeEffects();
  releaseStartMemory(effects, 'main');
  const before = residentBytes();
  effects.advance(10_000);
  effects.advance(10_000);
  while (residentBytes() >= before) await nextTurn();
  t.ok(residentBytes() < before / 2, 'most of it');
});

/** How much of the executable is in memory, all its mappings together. */
function residentBytes(): number {
  const mappings = readFileSync('/proc/self/smaps', 'latin1').split(/^(?=[0-9a-f]+-[0-9a-f]+ )/m);
  return mappings
    .filter((text) => text.includes(` ${process.execPath}\n`))
    .reduce((sum, text) => sum + Number(/^Rss: +(\d+)/m.exec(text)?.[1]) * 1024, 0);
}
