import { readFileSync } from 'node:fs';
import { performance } from 'node:perf_hooks';
import { getHeapStatistics, setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { WorkerOptions } from 'node:worker_threads';
import type { Effects } from './effects.ts';
import { loadCLibrary } from './libc.ts';

type EventLoop = Pick<typeof performance, 'eventLoopUtilization'>;

/** Late enough that the first requests after a start are answered before. */
const AFTER_MS = 2_000;
const PAGES_EVERY_MS = 30_000;

/** When a thread has time for a collection: after so many looks in a row at each of which it was hardly busy. */
interface Quiet {
  looks: number;
  everyMs: number;
  /** The share of its time since the last look that the thread has used at most. */
  busyMax: number;
}

const AFTER_START: Quiet = { looks: 1, everyMs: AFTER_MS, busyMax: 0.2 };

/**
 * V8 itself would collect 8 s after a load, and with the last objects of a kind it discards the machine code that expects
 * such: in the 3 s after each pause of 20, a tenth fewer deployments were created, and the slowest 1 % took 16 to 22 ms
 * instead of 12. So --no-memory-reducer, see scripts/package.ts, keeps it from that, and pauses may be longer.
 */
const AFTER_LOAD: Quiet = { looks: 10, everyMs: 30_000, busyMax: 0.1 };

/** How much larger than after the last collection a heap must be for another one. */
const GROWN = 1.3;

/**
 * Releases the memory that the start needed and serving does not, a little after the start, and what a load has needed,
 * some minutes after it: V8, malloc and the kernel otherwise keep it until the machine runs short. Each thread calls it
 * for its own heap, the main thread also for what all threads share. An idle davit shrinks from 157 MiB to 83. From then
 * on heaps are kept small, and pages that were needed only for a while are released: under load davit stays below 250 MB
 * instead of 290.
 */
export function releaseStartMemory(
  effects: Effects,
  part: 'thread' | 'main',
  loop: EventLoop = performance,
): void {
  collectGarbageWhenQuiet(effects, loop);
  if (part === 'thread') return;
  effects.after(AFTER_MS, keepHeapsSmall);
  // If it fails, as it does without a free file descriptor, davit merely uses more memory.
  effects.after(2 * AFTER_MS, () => void releasePages(effects).catch(() => undefined));
}

/**
 * A collection blocks for 50 ms. Under load, when V8 collects anyway, it delayed all answers by 100 ms: so not then.
 */
function collectGarbageWhenQuiet(effects: Effects, loop: EventLoop): void {
  let quiet = AFTER_START;
  let quietLooks = 0;
  let keptBytes = 0;
  watch();

  function watch(): void {
    const before = loop.eventLoopUtilization();
    effects.after(quiet.everyMs, () => {
      quietLooks = loop.eventLoopUtilization(before).utilization < quiet.busyMax ? quietLooks + 1 : 0;
      if (quietLooks >= quiet.looks && heapBytes() >= keptBytes * GROWN) {
        collectGarbage();
        keptBytes = heapBytes();
        quiet = AFTER_LOAD;
        quietLooks = 0;
      }
      watch();
    });
  }
}

/** What this thread's heap takes, free or not. */
function heapBytes(): number {
  return getHeapStatistics().total_heap_size;
}

/** The largest semi-space of each thread. V8's young generation is three times as large. */
const SEMI_SPACE_MAX_MIB = {
  // With 16, as the main thread has, it would deliver 4 % more and use 25 MB more.
  'deliver/dispatcher-thread': 8,
  // Nearly all of their objects die young, so collecting costs the same with less space. Saves 8 MB for the two.
  'store/writer-thread': 4,
  'store/checkpoint-thread': 1,
} as const;

/** Limits the young generation of a thread's heap, for `new Worker`, to less than the main thread's. */
export function boundThreadMemory(
  name: keyof typeof SEMI_SPACE_MAX_MIB,
): Pick<WorkerOptions, 'resourceLimits'> {
  // The flag that the executable sets for the main thread, see scripts/package.ts, would override the limits below.
  setFlagsFromString('--max-semi-space-size=0');
  return { resourceLimits: { maxYoungGenerationSizeMb: 3 * SEMI_SPACE_MAX_MIB[name] } };
}

/**
 * Turns off V8's pretenuring, for all threads. V8 allocates the objects of an allocation site in the old generation for
 * good once most of them survived, as nearly all objects of a start do. Mostly for that, there were six full
 * collections a second under load, and 5,500 deployments created a second with 256 connections instead of 8,500. To be
 * called by the last thread to be loaded: V8 rejects the executable's code cache, see src/boot.ts, when its flags have
 * changed.
 */
export function keepYoungWhatIsNew(): void {
  setFlagsFromString('--no-allocation-site-pretenuring');
}

/**
 * Has every thread collect its heap when that is 1.3 times as large as what survived the last collection; V8 would let
 * it grow to four times. For requests and deliveries the cost is too small to measure, as few of their objects grow
 * old, see src/slots.ts; a burst of a thousand short commands soon after the start takes some 8 % longer. Not set at
 * the start, as changed flags invalidate the code cache.
 */
function keepHeapsSmall(): void {
  setFlagsFromString('--heap-growing-percent=30');
}

/**
 * Runs a full garbage collection of this thread's heap, which blocks the thread. Meanwhile a tick is pending: with the
 * last one V8 would forget the shape of such objects, and make them in a slow way from then on. Creating a deployment,
 * with seven ticks, took the main thread 79 µs instead of 73.
 */
export function collectGarbage(): void {
  process.nextTick(() => undefined);
  setFlagsFromString('--expose-gc');
  const collect: NodeJS.GCFunction = runInNewContext('gc');
  collect({ type: 'major', execution: 'sync', flavor: 'last-resort' });
}

const MADV_DONTNEED = 4;

/**
 * Periodically releases the free pages of malloc's heap, and the executable's own pages, which the kernel reads again
 * when they are needed. Finding the executable's mappings takes 40 ms once, releasing the pages 1 to 4 ms each time.
 */
async function releasePages(effects: Effects): Promise<void> {
  const { declare } = await loadCLibrary();
  const trim = declare('int malloc_trim(size_t keep)');
  const madvise = declare('int madvise(uintptr_t address, size_t length, int advice)');
  const mappings = unchangedMappings(process.execPath);
  release();

  function release(): void {
    trim(0);
    for (const { start, end } of mappings) madvise(start, end - start, MADV_DONTNEED);
    effects.after(PAGES_EVERY_MS, release);
  }
}

/**
 * The read-only mappings of the executable at `path` in which no page was ever modified: dropping their pages loses
 * nothing. Only those below the heap, made by the loader, which stay for the life of the process: V8 maps more of the
 * file for each thread, and those addresses are reused when the thread has ended.
 */
function unchangedMappings(path: string): { start: number; end: number }[] {
  const mappings = readFileSync('/proc/self/smaps', 'utf8').split(/^(?=[0-9a-f]+-[0-9a-f]+ )/m);
  const heapAt = mappings.findIndex((text) => text.includes(' [heap]\n'));
  return mappings.slice(0, Math.max(0, heapAt)).flatMap((text) => {
    const [, start, end] = /^([0-9a-f]+)-([0-9a-f]+) r-[x-]p /.exec(text) ?? [];
    const isUnchanged =
      text.includes(` ${path}\n`) && /^Anonymous: +0 kB$/m.test(text) && /^Swap: +0 kB$/m.test(text);
    if (start === undefined || end === undefined || !isUnchanged) return [];
    return [{ start: Number.parseInt(start, 16), end: Number.parseInt(end, 16) }];
  });
}
