import type { Effects } from '../effects.ts';

/* How often failing webhooks are attempted: each by itself, and all together. */

/**
 * The gap between two attempts (probes) to a failing webhook is a thousandth of the time for which it has been failing,
 * within these bounds. Without it, a receiver with a long backlog that refuses at once would cost as much as a busy one,
 * and record 20 million attempts a day. It gets 1,000 attempts in the first 10 s, 2,800 in the first minute, 7,200 in
 * the first 83 minutes and then one every 5 s, within which its recovery is noticed.
 */
const PROBE_GAP_MIN_MS = 10;
const PROBE_GAP_MAX_MS = 5_000;
const PROBE_GAP_FRACTION = 1 / 1_000;

/** The gap to the next probe of a webhook that has been failing for this long. */
export function probeGapMs(failingForMs: number): number {
  return Math.max(
    PROBE_GAP_MIN_MS,
    Math.min(Math.round(failingForMs * PROBE_GAP_FRACTION), PROBE_GAP_MAX_MS),
  );
}

/** In which time there is one more probe for all failing webhooks. */
export const PROBES_GAP_MS = 2;
const PROBES_BURST_MS = 100;

interface Probes {
  /** How many may begin now. */
  free(): number;
  /** One begins. */
  take(): void;
}

/**
 * A token bucket for the probes of all failing webhooks: 500 a second, in bursts of up to 50. When the network is down,
 * the failing attempts of a thousand webhooks would otherwise keep a core busy.
 */
export function createProbes({ monotonicMs }: Pick<Effects, 'monotonicMs'>): Probes {
  /** The monotonic time up to which tokens are spent, of which each PROBES_GAP_MS gives one. */
  let spentUntilMs = Number.NEGATIVE_INFINITY;

  return {
    free() {
      const nowMs = monotonicMs();
      spentUntilMs = Math.max(spentUntilMs, nowMs - PROBES_BURST_MS);
      return Math.floor((nowMs - spentUntilMs) / PROBES_GAP_MS);
    },
    take() {
      spentUntilMs += PROBES_GAP_MS;
    },
  };
}
