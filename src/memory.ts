import { readFileSync } from 'node:fs';
import { performance } from 'node:perf_hooks';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { WorkerOptions } from 'node:worker_threads';
import type { Effects } from './effects.ts';
import { loadCLibrary } from './libc.ts';

type EventLoop = Pick<typeof performance, 'eventLoopUtilization'>;

/** Late enough that whoever starts davit has had the first answers. */
const AFTER_MS = 2_000;
const PAGES_EVERY_MS = 30_000;

/** Of its time, what a thread is busy that is not to be held up. */
const BUSY = 0.2;

/**
 * Gives back what loading took and serving does not need, a little after the start: V8, malloc and the kernel
 * keep it otherwise until somebody is in need. Each thread calls it for its own part, the main thread also for what
 * is all threads'. An idle davit shrinks from 157 MiB to 83 by it. From then on heaps are kept small, and pages that
 * were needed for a while only are given back: under load it stays below 250 MB, where it would have 290.
 */
export function releaseStartMemory(
  effects: Effects,
  part: 'thread' | 'main',
  loop: EventLoop = performance,
): void {
  collectGarbageWhenQuiet(effects, loop);
  if (part === 'thread') return;
  effects.after(AFTER_MS, keepHeapsSmall);
  // Without it davit only takes more: with no descriptor left, for instance, nothing can be read.
  effects.after(2 * AFTER_MS, () => void releasePages(effects).catch(() => undefined));
}

/** It takes 50 ms, at once: under load, in which V8 collects anyway, nobody was answered for 100 ms. */
function collectGarbageWhenQuiet(effects: Effects, loop: EventLoop): void {
  const before = loop.eventLoopUtilization();
  effects.after(AFTER_MS, () => {
    if (loop.eventLoopUtilization(before).utilization < BUSY) collectGarbage();
    else collectGarbageWhenQuiet(effects, loop);
  });
}

/** How large each of the halves may be between which V8 moves young objects; V8 itself counts three of them. */
const YOUNG_HALF_MAX_MIB = {
  // With the 16 of the main thread it would deliver 4 % more, and davit take 25 MB more meanwhile.
  'deliver/dispatcher-thread': 8,
  // Of theirs nothing lives for long, so that to collect it takes the same however much it is: 8 MB less of both.
  'store/writer-thread': 4,
  'store/checkpoint-thread': 1,
} as const;

/** How a thread's heap is bounded, for `new Worker`: by less than the main thread's, for what is soon garbage. */
export function boundThreadMemory(
  name: keyof typeof YOUNG_HALF_MAX_MIB,
): Pick<WorkerOptions, 'resourceLimits'> {
  // The executable's bound for the main thread, see scripts/package.ts, would count for all and before this one.
  setFlagsFromString('--max-semi-space-size=0');
  return { resourceLimits: { maxYoungGenerationSizeMb: 3 * YOUNG_HALF_MAX_MIB[name] } };
}

/**
 * V8 makes the objects of a place in the program old from the first where most of them lived on for a while, and that
 * stays so: of what a start makes nearly all do. Under load full collections came six times a second of that, mostly,
 * and to 256 connections 5,500 deployments were created a second in place of 8,500. It is for all threads, and for the
 * last of them to call once it is loaded: V8 refuses the executable's recorded code, see src/boot.ts, when a flag is not
 * what it was.
 */
export function keepYoungWhatIsNew(): void {
  setFlagsFromString('--no-allocation-site-pretenuring');
}

/**
 * A heap is looked through when it is 1.3 times as large as what lived the last time, in every thread; V8 would let it
 * grow to four times. Requests and deliveries pay nothing for it that could be measured, as little of them grows old, see
 * src/slots.ts; a burst of a thousand short commands soon after the start takes some 8 % longer. Not from the start on,
 * for the reason above.
 */
function keepHeapsSmall(): void {
  setFlagsFromString('--heap-growing-percent=30');
}

/** All of this thread's that there is, at once. */
export function collectGarbage(): void {
  setFlagsFromString('--expose-gc');
  const collect: NodeJS.GCFunction = runInNewContext('gc');
  collect({ type: 'major', execution: 'sync', flavor: 'last-resort' });
}

const MADV_DONTNEED = 4;

/**
 * Of the C library's heap, and of the executable: what is needed of that is mapped anew when it is touched. Looking for
 * the mappings takes 40 ms once, giving their pages back 1 to 4 each time.
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
 * Where the system's loader has mapped the program, cannot be written to and was never: no page there differs from the
 * file's, and nothing else ever comes to be there. That is below the heap; V8 maps more of the file elsewhere for each
 * thread, and where that was is somebody's memory when the thread has ended.
 */
function unchangedMappings(path: string): { start: number; end: number }[] {
  const mappings = readFileSync('/proc/self/smaps', 'latin1').split(/^(?=[0-9a-f]+-[0-9a-f]+ )/m);
  const heapAt = mappings.findIndex((text) => text.includes(' [heap]\n'));
  return mappings.slice(0, Math.max(0, heapAt)).flatMap((text) => {
    const [, start, end] = /^([0-9a-f]+)-([0-9a-f]+) r-[x-]p /.exec(text) ?? [];
    const isUnchanged =
      text.includes(` ${path}\n`) && /^Anonymous: +0 kB$/m.test(text) && /^Swap: +0 kB$/m.test(text);
    if (start === undefined || end === undefined || !isUnchanged) return [];
    return [{ start: Number.parseInt(start, 16), end: Number.parseInt(end, 16) }];
  });
}
