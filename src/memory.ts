import { readFileSync } from 'node:fs';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { Effects } from './effects.ts';

/** Late enough that whoever starts davit has had the first answers. */
const AFTER_MS = 2_000;

/**
 * Gives back what loading took and serving does not need, once, a little after the start: V8, malloc and the kernel
 * keep it otherwise until somebody is in need. Each thread calls it for its own part, the main thread also for what
 * is all threads', which takes it 40 ms. An idle davit shrinks from 152 MiB to 80 by it.
 */
export function releaseStartMemory(effects: Effects, part: 'thread' | 'main'): void {
  effects.after(AFTER_MS, () => {
    if (part === 'main') keepHeapsSmall();
    collectGarbage();
    if (part === 'main') effects.after(AFTER_MS, () => void releasePages());
  });
}

/**
 * A heap is looked through when it is twice as large as what lived the last time, in every thread; V8 would let it grow to four
 * times. Ten minutes of load end at 250 MB in place of 290, at the same speed. Not from the start: Node refuses the
 * executable's code cache when a flag is not what it was when the cache was made.
 */
function keepHeapsSmall(): void {
  setFlagsFromString('--heap-growing-percent=100');
}

function collectGarbage(): void {
  setFlagsFromString('--expose-gc');
  const collect: NodeJS.GCFunction = runInNewContext('gc');
  collect({ type: 'major', execution: 'sync', flavor: 'last-resort' });
}

const MADV_DONTNEED = 4;

/** Of the C library's heap, and of the executable: what is needed of that is mapped anew when it is touched. */
async function releasePages(): Promise<void> {
  const { default: koffi } = await import('koffi');
  const library = koffi.load('libc.so.6');
  library.func('int malloc_trim(size_t keep)')(0);
  const madvise = library.func('int madvise(uintptr_t address, size_t length, int advice)');
  for (const { start, end } of unchangedMappings(process.execPath)) {
    madvise(start, end - start, MADV_DONTNEED);
  }
}

/** Where the file is mapped, cannot be written to and was never: no page there differs from the file's. */
function unchangedMappings(path: string): { start: number; end: number }[] {
  const mappings = readFileSync('/proc/self/smaps', 'latin1').split(/^(?=[0-9a-f]+-[0-9a-f]+ )/m);
  return mappings.flatMap((text) => {
    const [, start, end] = /^([0-9a-f]+)-([0-9a-f]+) r-[x-]p /.exec(text) ?? [];
    const isUnchanged = text.includes(` ${path}\n`) && /^Anonymous: +0 kB$/m.test(text);
    if (start === undefined || end === undefined || !isUnchanged) return [];
    return [{ start: Number.parseInt(start, 16), end: Number.parseInt(end, 16) }];
  });
}
