import type { WebhookId } from '../domain.ts';
import { HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { createSlots, type Slots } from '../slots.ts';
import type { AttemptHistory, PendingWebhook } from '../store/outbox.ts';

/*
 * Who may send now. A receiver is judged by what it does, and each kind but the proven has a quarter of the
 * slots at most:
 *
 *   new      has never answered well: one attempt at a time shows what it is
 *   proven   answers well and quickly: up to four at a time, from whatever is free
 *   slow     its last attempt took longer than a second, or one that is under way does
 *   failing  one attempt at a time, and not too often, until one succeeds
 *
 * So however many receivers hang, drip or fail, and however suddenly, the quick ones find free slots. A
 * hundred black holes that join at once with a thousand events each hold 64 slots for as long as they are
 * new and 64 from then on: see test/deliver/lanes.test.ts.
 */

type Standing = 'proven' | 'new' | 'slow' | 'failing';
const STANDINGS: readonly Standing[] = ['proven', 'new', 'slow', 'failing'];

interface LaneLimits {
  /** Attempts of one webhook under way at a time. */
  perWebhook: number;
  /** Attempts of all. */
  total: number;
  /** Attempts of all new webhooks together, of all slow ones, and of all failing ones. */
  share: number;
}

export const LANE_LIMITS: LaneLimits = { perWebhook: 4, total: 256, share: 64 };

/** An attempt is slow from here on: a hundred times what a receiver that keeps up takes. */
const SLOW_AFTER_MS = 1_000;

/** One that was proven is failing after this many failures in a row; one that was not, after the first. */
export const FAILING_AFTER = 3;

/**
 * Between the beginnings of two attempts of a failing webhook lies a thousandth of the time for which it has failed,
 * within these bounds: a receiver that refuses at once, with a long backlog, would otherwise cost as much as a
 * busy one, and have 20 million attempts written down each day. It gets 1,000 in the first
 * 10 s, 2,800 in the first minute, 7,200 in the first 83 minutes and one in 5 s from then on: within 5 s its recovery
 * is noticed.
 */
const PROBE_GAP_MIN_MS = 10;
const PROBE_GAP_MAX_MS = 5_000;
const PROBE_GAP_FRACTION = 1 / 1_000;

/**
 * All failing webhooks together begin 500 attempts a second, 50 at once: when the network is gone, a thousand of them
 * would keep a core busy with failing.
 */
const PROBES_GAP_MS = 2;
const PROBES_BURST_MS = 100;

/**
 * A slot is free again when the answer is there, but the answer still has to be written down. So many may wait for
 * that, of one webhook and of all: a webhook with 20 events a second goes on while commits take 3 s, and a full disk
 * or a crash has no more than these sent twice.
 */
const UNRECORDED_MAX = 64;
const UNRECORDED_TOTAL_MAX = 4_096;

/** A lane that was not used for so long is forgotten, with what was learned of it. */
const FORGOTTEN_AFTER_MS = HOUR_MS;

/** What is remembered of one webhook. */
export interface Lane {
  readonly webhookId: WebhookId;
  /** Deliveries, by seq, that were begun and are not yet recorded: in the outbox they are still pending. */
  readonly underWay: readonly number[];
  /** What was looked up beyond the last claim: see ClaimRequest. */
  readonly ahead: number[];
  readonly hasSucceeded: boolean;
  /** Its failures in a row; of those before this process no more than FAILING_AFTER. */
  readonly failures: number;
}

/** How many attempts a lane may begin now. */
export interface Turn {
  readonly lane: Lane;
  readonly slots: number;
}

/** How an attempt ended: `stopped` says nothing of the receiver. */
export type SlotEnd = 'succeeded' | 'failed' | 'stopped';

/** What one attempt takes, until it is recorded. */
export interface TakenSlot {
  readonly lane: Lane;
}

export interface Lanes {
  /** Something of this webhook is due at `atMs`, perhaps; earlier moments that are known stay. */
  lookAt(webhookId: WebhookId, atMs: number, nowMs: number): void;
  /** All that is pending, and nothing else is: what was known before is replaced. */
  replace(pending: readonly PendingWebhook[], nowMs: number): void;
  /**
   * Who may begin how many attempts now, in turn, and all get one before any gets two. First come those that had
   * nothing due until now, `freshMax` attempts, then those that are behind, `behindMax`: a single event does not
   * wait for the backlogs of others, as with the packets of fq_codel (RFC 8290, section 4.2). Whoever is named has to
   * be answered with `looked`.
   */
  turns(nowMs: number, freshMax: number, behindMax: number): Turn[];
  /** Takes a slot for a delivery. */
  begin(lane: Lane, seq: number, nowMs: number): TakenSlot;
  /** The receiver has answered, or will not: the slot is free again. */
  end(slot: TakenSlot, how: SlotEnd, nowMs: number): void;
  /** After that: the outbox shows what came of it. */
  recorded(slot: TakenSlot, nowMs: number): void;
  /** After its turn: when the lane's next delivery is due; null: none is pending. */
  looked(lane: Lane, nextAtMs: number | null, nowMs: number): void;
  /** When `turns` may name more; null: no moment is known. Those who wait for a slot need none. */
  nextLookAtMs(nowMs: number): number | null;
}

interface OwnLane extends Lane {
  readonly underWay: number[];
  standing: Standing;
  /** Attempts that hold a slot. */
  slots: number;
  /** Of these, how many take longer than SLOW_AFTER_MS. */
  slowSlots: number;
  lastWasSlow: boolean;
  hasSucceeded: boolean;
  failures: number;
  failingSinceMs: number;
  /** When to look into the outbox; Infinity: nothing is known to be pending. */
  lookAtMs: number;
  /** A failing one begins nothing before. */
  notBeforeMs: number;
  usedAtMs: number;
  /** Where it waits: among the ready of its standing, among the sleeping, or for one of its own slots. */
  queue: Slots<OwnLane> | null;
  /** In that. */
  place: number;
}

interface OwnSlot extends TakenSlot {
  readonly lane: OwnLane;
  readonly seq: number;
  readonly beganAtMs: number;
  isSlow: boolean;
  /** Among the young. */
  place: number;
}

/**
 * In memory only. What is not remembered, as davit was started anew for instance, begins with what `historyOf` tells of
 * it: with all webhooks new, those that had succeeded waited 9 s for those that hang. Moments are those of the wall clock.
 */
export function createLanes(
  effects: Pick<Effects, 'monotonicMs'>,
  historyOf: (webhookId: WebhookId) => AttemptHistory,
  limits: LaneLimits = LANE_LIMITS,
): Lanes {
  const lanes = new Map<WebhookId, OwnLane>();
  /** Those with something due that had nothing due before, and those that are behind: see `turns`. */
  const fresh = perStanding(() => createSlots<OwnLane>());
  const behind = perStanding(() => createSlots<OwnLane>());
  const sleeping = createSlots<OwnLane>();
  /** No sleeping lane is to be woken before. */
  let earliestMs = Number.POSITIVE_INFINITY;
  const inUse = perStanding(() => 0);
  let totalInUse = 0;
  let totalUnderWay = 0;
  /** On the clock that never jumps: so many probes were made as if one was made every PROBES_GAP_MS up to here. */
  let probedUntilMs = Number.NEGATIVE_INFINITY;
  /** Slots that are not slow yet. */
  const young = createSlots<OwnSlot>();

  return {
    lookAt,
    replace,
    turns,
    begin,
    end: (slot, how, nowMs) => end(slot as OwnSlot, how, nowMs),
    recorded: (slot, nowMs) => recorded(slot as OwnSlot, nowMs),
    looked,
    nextLookAtMs,
  };

  function lookAt(webhookId: WebhookId, atMs: number, nowMs: number): void {
    const lane = laneOf(webhookId);
    if (lane.lookAtMs <= atMs) return;
    lane.lookAtMs = atMs;
    place(lane, nowMs, fresh);
  }

  function replace(pending: readonly PendingWebhook[], nowMs: number): void {
    earliestMs = Number.POSITIVE_INFINITY;
    for (const lane of lanes.values()) {
      lane.lookAtMs = Number.POSITIVE_INFINITY;
      lane.ahead.length = 0;
    }
    for (const webhook of pending) {
      const lane = laneOf(webhook.webhook_id, () => webhook);
      lane.lookAtMs = webhook.next_attempt_at;
      // The clock may have been set back.
      lane.notBeforeMs = Math.min(lane.notBeforeMs, nowMs + probeGapMs(lane, nowMs));
      // Somebody enabled it again, or gave it another url.
      if (webhook.failing_since === null && lane.underWay.length === 0) forgive(lane);
    }
    for (const lane of lanes.values()) {
      place(lane, nowMs, behind);
      const isIdle = lane.queue === null && lane.underWay.length === 0;
      if (isIdle && effects.monotonicMs() - lane.usedAtMs > FORGOTTEN_AFTER_MS) lanes.delete(lane.webhookId);
    }
  }

  function turns(nowMs: number, freshMax: number, behindMax: number): Turn[] {
    wakeSleeping(nowMs);
    noticeSlow();
    const turns: Turn[] = [];
    const granted = perStanding(() => 0);
    let totalGranted = 0;
    for (const { ready, slotsMax } of [
      { ready: fresh, slotsMax: freshMax },
      { ready: behind, slotsMax: behindMax },
    ]) {
      let left = Math.min(
        slotsMax,
        limits.total - totalInUse - totalGranted,
        UNRECORDED_TOTAL_MAX - totalUnderWay - totalGranted,
      );
      for (const standing of STANDINGS) {
        let free = Math.min(left, freeFor(standing) - granted[standing]);
        const each = Math.max(1, Math.floor(free / ready[standing].size));
        for (const lane of ready[standing]) {
          if (free <= 0) break;
          const slots = Math.min(free, each, ownSlots(lane, totalInUse + totalGranted));
          if (slots <= 0) continue;
          leaveQueue(lane);
          turns.push({ lane, slots });
          free -= slots;
          left -= slots;
          granted[standing] += slots;
          totalGranted += slots;
        }
      }
    }
    return turns;
  }

  function begin(lane: Lane, seq: number, nowMs: number): TakenSlot {
    const own = ownLane(lane);
    const slot: OwnSlot = { lane: own, seq, beganAtMs: effects.monotonicMs(), isSlow: false, place: 0 };
    slot.place = young.put(slot);
    own.underWay.push(seq);
    totalUnderWay += 1;
    own.usedAtMs = slot.beganAtMs;
    own.slots += 1;
    inUse[own.standing] += 1;
    totalInUse += 1;
    own.notBeforeMs = nowMs + probeGapMs(own, nowMs); // counts once it is failing
    if (own.standing === 'failing') probedUntilMs += PROBES_GAP_MS;
    return slot;
  }

  function recorded({ lane, seq }: OwnSlot, nowMs: number): void {
    const last = lane.underWay.pop();
    if (last !== undefined && last !== seq) lane.underWay[lane.underWay.indexOf(seq)] = last;
    totalUnderWay -= 1;
    place(lane, nowMs, behind);
  }

  function looked(lane: Lane, nextAtMs: number | null, nowMs: number): void {
    const own = ownLane(lane);
    own.lookAtMs = nextAtMs ?? Number.POSITIVE_INFINITY;
    place(own, nowMs, behind);
  }

  function forgive(lane: OwnLane): void {
    lane.failures = 0;
    judge(lane);
  }

  function end(slot: OwnSlot, how: SlotEnd, nowMs: number): void {
    const { lane } = slot;
    noticeSlow();
    if (slot.isSlow) lane.slowSlots -= 1;
    else young.take(slot.place);
    lane.slots -= 1;
    inUse[lane.standing] -= 1;
    totalInUse -= 1;
    switch (how) {
      case 'succeeded':
        lane.hasSucceeded = true;
        lane.failures = 0;
        lane.lastWasSlow = slot.isSlow;
        break;
      case 'failed':
        if (lane.failures === 0) lane.failingSinceMs = nowMs;
        lane.failures += 1;
        lane.lastWasSlow = slot.isSlow;
        break;
      case 'stopped':
        break;
      default:
        how satisfies never;
    }
    judge(lane);
    place(lane, nowMs, behind);
  }

  function nextLookAtMs(nowMs: number): number | null {
    const probesWait = fresh.failing.size + behind.failing.size > 0 && inUse.failing < limits.share;
    const atMs = probesWait ? Math.min(earliestMs, nowMs + PROBES_GAP_MS) : earliestMs;
    return atMs === Number.POSITIVE_INFINITY ? null : atMs;
  }

  /** How many more attempts all of this standing may begin. */
  function freeFor(standing: Standing): number {
    if (standing === 'proven') return limits.total - totalInUse;
    const free = limits.share - inUse[standing];
    if (standing !== 'failing') return free;
    const elapsedMs = effects.monotonicMs();
    probedUntilMs = Math.max(probedUntilMs, elapsedMs - PROBES_BURST_MS);
    return Math.min(free, Math.floor((elapsedMs - probedUntilMs) / PROBES_GAP_MS));
  }

  /** Attempts that have grown slow make their webhook slow, before they end. */
  function noticeSlow(): void {
    const slowSinceMs = effects.monotonicMs() - SLOW_AFTER_MS;
    for (const slot of young) {
      if (slot.beganAtMs > slowSinceMs) return;
      young.take(slot.place);
      slot.isSlow = true;
      slot.lane.slowSlots += 1;
      judge(slot.lane);
    }
  }

  function judge(lane: OwnLane): void {
    const standing = standingOf(lane);
    if (standing === lane.standing) return;
    inUse[lane.standing] -= lane.slots;
    inUse[standing] += lane.slots;
    const wasReady = lane.queue === fresh[lane.standing] || lane.queue === behind[lane.standing];
    lane.standing = standing;
    if (wasReady) enterQueue(lane, behind[standing]);
  }

  /** Where a lane waits follows from what is known of it; one that is ready already keeps its turn. */
  function place(lane: OwnLane, nowMs: number, ready: Record<Standing, Slots<OwnLane>>): void {
    const wakeAtMs = wakeAt(lane);
    if (wakeAtMs > nowMs) {
      if (wakeAtMs === Number.POSITIVE_INFINITY) {
        leaveQueue(lane);
        return;
      }
      earliestMs = Math.min(earliestMs, wakeAtMs);
      enterQueue(lane, sleeping);
    } else if (ownSlots(lane, 0) > 0) {
      const isReady = lane.queue === fresh[lane.standing] || lane.queue === behind[lane.standing];
      // Those that fail wake over and over: one that does must not go before one that waits.
      if (!isReady) enterQueue(lane, (lane.standing === 'failing' ? behind : ready)[lane.standing]);
    } else {
      leaveQueue(lane); // until one of its slots ends
    }
  }

  function wakeSleeping(nowMs: number): void {
    if (nowMs < earliestMs) return;
    earliestMs = Number.POSITIVE_INFINITY;
    for (const lane of sleeping) place(lane, nowMs, fresh);
  }

  function wakeAt(lane: OwnLane): number {
    return lane.standing === 'failing' ? Math.max(lane.lookAtMs, lane.notBeforeMs) : lane.lookAtMs;
  }

  /** How many more slots it may take for itself, with `taken` in use by all. */
  function ownSlots(lane: OwnLane, taken: number): number {
    const most = lane.standing === 'proven' || lane.standing === 'slow' ? limits.perWebhook : 1;
    const own = Math.min(most - lane.slots, UNRECORDED_MAX - lane.underWay.length);
    // The last quarter is for who has nothing under way: quick receivers that all hang from one moment
    // to the next hold no more than that beyond one slot each.
    return taken < limits.total - limits.share ? own : Math.min(own, 1 - lane.slots);
  }

  function probeGapMs(lane: OwnLane, nowMs: number): number {
    const failedForMs = lane.failures === 0 ? 0 : nowMs - lane.failingSinceMs;
    return Math.max(
      PROBE_GAP_MIN_MS,
      Math.min(Math.round(failedForMs * PROBE_GAP_FRACTION), PROBE_GAP_MAX_MS),
    );
  }

  function enterQueue(lane: OwnLane, queue: Slots<OwnLane>): void {
    if (lane.queue === queue) return;
    leaveQueue(lane);
    lane.queue = queue;
    lane.place = queue.put(lane);
  }

  function leaveQueue(lane: OwnLane): void {
    lane.queue?.take(lane.place);
    lane.queue = null;
  }

  function laneOf(webhookId: WebhookId, history = historyOf): OwnLane {
    const known = lanes.get(webhookId);
    if (known !== undefined) return known;
    const lane = newLane(webhookId, history(webhookId), effects.monotonicMs());
    lanes.set(webhookId, lane);
    return lane;
  }

  function ownLane({ webhookId }: Lane): OwnLane {
    return laneOf(webhookId);
  }
}

function standingOf(lane: OwnLane): Standing {
  if (lane.failures >= (lane.hasSucceeded ? FAILING_AFTER : 1)) return 'failing';
  // Before `slow`, so that any number of new ones that hang keep to the share of the new.
  if (!lane.hasSucceeded) return 'new';
  return lane.lastWasSlow || lane.slowSlots > 0 ? 'slow' : 'proven';
}

function newLane(
  webhookId: WebhookId,
  { failing_since, last_success_at }: AttemptHistory,
  usedAtMs: number,
): OwnLane {
  const lane: OwnLane = {
    webhookId,
    underWay: [],
    ahead: [],
    standing: 'new',
    slots: 0,
    slowSlots: 0,
    lastWasSlow: false,
    hasSucceeded: last_success_at !== null,
    failures: failing_since === null ? 0 : FAILING_AFTER,
    failingSinceMs: failing_since ?? 0,
    lookAtMs: Number.POSITIVE_INFINITY,
    notBeforeMs: 0,
    usedAtMs,
    queue: null,
    place: 0,
  };
  lane.standing = standingOf(lane);
  return lane;
}

function perStanding<Value>(make: () => Value): Record<Standing, Value> {
  return { proven: make(), new: make(), slow: make(), failing: make() };
}
