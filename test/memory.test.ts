import { readFileSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { getHeapStatistics } from 'node:v8';
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
  t.equal(looks, 7, 'and then looks less often');
});

t.test('what a load has left is collected once the thread was quiet for minutes', async (t) => {
  const effects = fakeEffects();
  let utilization = 0;
  releaseStartMemory(effects, 'thread', {
    eventLoopUtilization: () => ({ idle: 0, active: 0, utilization }),
  });
  effects.advance(2_000);

  const unchanged = weakReference();
  await nextTurn();
  effects.advance(QUIET_MS);
  t.ok(unchanged.deref(), 'not if there is hardly any');

  const left = await load();
  utilization = 0.2;
  effects.advance(QUIET_MS);
  utilization = 0.05;
  effects.advance(QUIET_MS - LOOK_EVERY_MS);
  utilization = 0.2;
  effects.advance(LOOK_EVERY_MS);
  utilization = 0.05;
  effects.advance(QUIET_MS - LOOK_EVERY_MS);
  t.ok(left.deref(), 'nor while there is something to do, nor sooner after that');
  await nextTurn(); // until then what was looked at is kept
  effects.advance(LOOK_EVERY_MS);
  t.equal(left.deref(), undefined);
});

const QUIET_MS = 5 * 60_000;
const LOOK_EVERY_MS = 30_000;

/** Makes the heap half as large again at least; returns one of the objects, which nothing else refers to any more. */
async function load(): Promise<WeakRef<object>> {
  const bytes = getHeapStatistics().total_heap_size;
  const objects: object[] = [];
  while (getHeapStatistics().total_heap_size < bytes * 1.5) objects.push({ text: Array(1_000).fill(0) });
  const one = new WeakRef(objects[0] ?? {});
  await nextTurn();
  return one;
}

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
