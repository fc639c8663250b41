import { randomBytes } from 'node:crypto';

/**
 * Everything that makes two runs differ. The real ones are here; tests bring their own clock
 * (test/helpers/effects.ts). Nothing else in src/ reads a clock, draws a random number or sets a timer.
 */
export interface Effects {
  /** Wall clock, milliseconds since 1970. May jump: never subtract two of them to measure. */
  now(): number;
  /** Milliseconds on a clock that never jumps, from an arbitrary origin. */
  monotonicMs(): number;
  /** From a CSPRNG. */
  randomBytes(size: number): Uint8Array;
  /** Calls `action` once, `delayMs` from now; the returned function calls it off. Keeps no process alive. */
  after(delayMs: number, action: () => void): () => void;
  /** Holds up this thread, and everything in it. */
  block(durationMs: number): void;
}

/** Resolves `delayMs` from now; keeps no process alive. */
export function delay(delayMs: number, effects: Pick<Effects, 'after'>): Promise<void> {
  return new Promise((resolve) => {
    effects.after(delayMs, resolve);
  });
}

/** Node's timers wrap to 1 ms beyond this; a longer wait is cut, and whoever waits looks again. */
export const LONGEST_TIMER_MS = 2 ** 31 - 1;

export const realEffects: Effects = {
  now: Date.now,
  monotonicMs: () => performance.now(),
  randomBytes: pooledRandomBytes,
  after(delayMs, action) {
    const timer = setTimeout(action, Math.min(delayMs, LONGEST_TIMER_MS));
    timer.unref();
    return () => clearTimeout(timer);
  },
  block(durationMs) {
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, durationMs);
  },
};

/** One call into the system for many ids: `randomBytes` costs about 1 µs each, most of it the call. */
const POOL_BYTES = 4096;
let pool = Buffer.alloc(0);

function pooledRandomBytes(size: number): Uint8Array {
  if (size > POOL_BYTES) return randomBytes(size);
  if (pool.length < size) pool = randomBytes(POOL_BYTES);
  const bytes = pool.subarray(0, size);
  pool = pool.subarray(size);
  return bytes;
}
