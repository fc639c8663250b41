import { readFileSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { releaseStartMemory } from '../src/memory.ts';
import { fakeEffects } from './helpers/effects.ts';

t.test('parts of the executable that only the start needed are released from memory', async (t) => {
  const effects = fakeEffects();
  releaseStartMemory(effects, 'main');
  const before = residentBytes();
  effects.advance(10_000);
  effects.advance(10_000);
  while (residentBytes() >= before) await nextTurn();
  t.ok(residentBytes() < before / 2, 'most of it');
});

t.test('garbage is collected once the thread has little to do', async (t) => {
  const effects = fakeEffects();
  const garbage = weakReference();
  let utilization = 0.5;
  let looks = 0;
  const eventLoopUtilization = () => {
    looks += 1;
    return { idle: 0, active: 0, utilization };
  };
  releaseStartMemory(effects, 'thread', { eventLoopUtilization });
  effects.advance(4_000);
  t.equal(looks, 5, 'while it is busy it looks again');
  await nextTurn(); // until then whatever a WeakRef was made for is kept
  utilization = 0.1;
  effects.advance(2_000);
  t.equal(garbage.deref(), undefined);
  effects.advance(10_000);
  t.equal(looks, 6, 'and then no more');
});

/** Made elsewhere, so that nothing of it is left on the stack. */
function weakReference(): WeakRef<object> {
  return new WeakRef({});
}

/** How much of the executable is in memory, all its mappings together. */
function residentBytes(): number {
  const mappings = readFileSync('/proc/self/smaps', 'utf8').split(/^(?=[0-9a-f]+-[0-9a-f]+ )/m);
  return mappings
    .filter((text) => text.includes(` ${process.execPath}\n`))
    .reduce((sum, text) => sum + Number(/^Rss: +(\d+)/m.exec(text)?.[1]) * 1024, 0);
}
