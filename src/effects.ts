import { randomBytes } from 'node:crypto';

/**
 * Clock, randomness and timers: everything that makes two runs differ. Nothing else in src/ reads a clock, draws a
 * random number or sets a timer; tests substitute their own clock (test/helpers/effects.ts).
 */
export interface Effects {
  /** Wall clock, milliseconds since 1970. It may jump: do not measure durations with it. */
  now(): number;
  /** Milliseconds on a clock that never jumps, from an arbitrary origin. */
  monotonicMs(): number;
  /** From a CSPRNG. */
  randomBytes(size: number): Uint8Array;
  /** Calls `action` once, `delayMs` from now; the returned function cancels it. Does not keep the process alive. */
  after(delayMs: number, action: () => void): () => void;
  /** Blocks this thread. */
  block(durationMs: number): void;
}

/** Resolves `delayMs` from now. Does not keep the process alive. */
export function delay(delayMs: number, effects: Pick<Effects, 'after'>): Promise<void> {
  return new Promise((resolve) => {
    effects.after(delayMs, resolve);
  });
}

/** Node fires longer timers after 1 ms, so `after` shortens the delay: its callers must check again when it fires. */
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

/** `randomBytes` costs about 1 µs, nearly all of it for the call: one call yields bytes for many ids. */
const POOL_BYTES = 4096;
let pool = Buffer.alloc(0);

function pooledRandomBytes(size: number): Uint8Array {
  if (size > POOL_BYTES) return randomBytes(size);
  if (pool.length < size) pool = randomBytes(POOL_BYTES);
  const bytes = pool.subarray(0, size);
  pool = pool.subarray(size);
  return bytes;
}
