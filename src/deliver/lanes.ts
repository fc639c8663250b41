import type { WebhookId } from '../domain.ts';
import { HOUR_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { createKeyedSlots } from '../keyed-slots.ts';
import { createSlots, type Slots } from '../slots.ts';
import type { PendingWebhook, WebhookHistory } from '../store/outbox.ts';
import { createSharedPlaces, type Owner, type SharedPlaces } from './key-shares.ts';
import { createProbes, PROBES_GAP_MS, probeGapMs } from './probes.ts';

/*
 * Decides which webhook may send now: fair queuing, bulkheads and a circuit breaker in one. A receiver's standing
 * follows from its behaviour, and each standing but `proven` has at most a part of the slots:
 *
 *   new      no attempt has succeeded yet: one attempt at a time
 *   proven   answers with success, and quickly: up to four at a time, from all free slots
 *   slow     its last attempt took longer than a second, or one under way does
 *   failing  one attempt at a time, as a probe, and not too often, until one succeeds
 *
 * So the quick receivers find free slots, however many others hang, drip or fail, and however suddenly. A hundred black
 * holes that join at once with a thousand events each hold 100 slots while they are new, and 51 from then on: see
 * test/deliver/lanes.test.ts.
 *
 * Of each part, and of all slots, a key may have only its share, see key-shares.ts, and keys take turns. When webhooks
 * waited in one queue, whoever registered them, the first event of a new one came 75 s late beside the hundred black
 * holes of another key.
 */

type Standing = 'proven' | 'new' | 'slow' | 'failing';

/** Each batch begins with another standing: with one order, quick receivers that have a backlog would fill every batch. */
const ORDERS: readonly (readonly Standing[])[] = [
  ['proven', 'new', 'slow', 'failing'],
  ['new', 'slow', 'failing', 'proven'],
  ['slow', 'failing', 'proven', 'new'],
  ['failing', 'proven', 'new', 'slow'],
];

interface LaneLimits {
  /** Concurrent attempts to one webhook. */
  perWebhook: number;
  /** Concurrent attempts in all. */
  total: number;
  /** Concurrent attempts to all slow webhooks together, and to all failing ones. */
  share: number;
  /** To all new ones: the share of a key in it does for all webhooks that a key may have. */
  new: number;
  /** To new and failing ones together, so that new ones that hang leave slots to failing ones. */
  unproven: number;
}

export const LANE_LIMITS: LaneLimits = { perWebhook: 4, total: 256, share: 64, new: 128, unproven: 144 };

/** An attempt is slow after this: a hundred times what a common receiver takes. */
const SLOW_AFTER_MS = 1_000;

/** After so many consecutive failures a webhook is failing; one that has never succeeded is after the first. */
const FAILING_AFTER = 3;

/**
 * A slot is free once the attempt has ended, but its result still has to be committed. So many attempts, of one webhook
 * and of all, may be under way or uncommitted: a webhook with 20 events a second goes on while commits take 3 s, and
 * after a full disk or a crash no more than these are sent twice.
 */
const UNRECORDED_MAX = 64;
const UNRECORDED_TOTAL_MAX = 4_096;

/** A lane that was unused for so long is removed; its history is read again when it is needed. */
const FORGOTTEN_AFTER_MS = HOUR_MS;

/** The state of one webhook. */
export interface Lane {
  readonly webhookId: WebhookId;
  readonly key: Owner;
  /** The seqs of deliveries whose attempt has begun and is not recorded yet: the outbox still has them as pending. */
  readonly underWay: readonly number[];
  /** Deliveries that were read ahead of the last claim: see ClaimRequest. */
  readonly ahead: number[];
  /** Consecutive failures; those before this process started count as FAILING_AFTER at most. */
  readonly failures: number;
}

/** How many attempts a lane may begin now. */
export interface Turn {
  readonly lane: Lane;
  readonly slots: number;
}

/** How an attempt ended: `stopped` says nothing about the receiver. */
export type SlotEnd = 'succeeded' | 'failed' | 'stopped';

/** The slot of one attempt, from its beginning until its result is recorded. */
export interface TakenSlot {
  readonly lane: Lane;
}

export interface Lanes {
  /** A delivery of this webhook may be due at `atMs`. An earlier time that is already known stays. */
  schedule(webhookId: WebhookId, atMs: number, nowMs: number): void;
  /** Replaces all that is known about pending deliveries: `pending` is complete. */
  replace(pending: readonly PendingWebhook[], nowMs: number): void;
  /**
   * Which webhooks may begin how many attempts now, round robin: all get one before any gets two. First come webhooks
   * that had nothing due until now, up to `freshMax` attempts, then those with a backlog, up to `behindMax`: as with the
   * new flows of fq_codel (RFC 8290, section 4.2), a single event does not wait for the backlogs of others. The slots are
   * theirs until `finishTurn`, with which each turn is to be ended.
   */
  turns(nowMs: number, freshMax: number, behindMax: number): Turn[];
  /** Uses a slot of the lane's turn for a delivery. */
  begin(lane: Lane, seq: number, nowMs: number): TakenSlot;
  /** The attempt has ended: its slot is free again. */
  end(slot: TakenSlot, how: SlotEnd, nowMs: number): void;
  /** Call after `end`, once the result is in the outbox. */
  recorded(slot: TakenSlot, nowMs: number): void;
  /**
   * Ends the turn of a lane: slots that it did not use are free again. `nextAtMs`: when its next delivery is due; null:
   * none is pending.
   */
  finishTurn(lane: Lane, nextAtMs: number | null, nowMs: number): void;
  /** When `turns` may return more by itself, so not when a slot becomes free; null: no time is known. */
  nextTurnAtMs(nowMs: number): number | null;
}

interface OwnLane extends Lane {
  readonly underWay: number[];
  standing: Standing;
  /** Its slots, with those of its turn. */
  slots: number;
  /** Those of them that no attempt uses yet. */
  unusedSlots: number;
  /** Those of them whose attempts have taken longer than SLOW_AFTER_MS. */
  slowSlots: number;
  lastWasSlow: boolean;
  hasSucceeded: boolean;
  failures: number;
  failingSinceMs: number;
  /** When its next delivery is due; Infinity: none is known. */
  dueAtMs: number;
  /** While it is failing, the earliest time of its next attempt. */
  notBeforeMs: number;
  usedAtMs: number;
  /** Where it waits: `fresh` or `behind` of its standing, or `sleeping`; null: it has nothing due, or no slot left. */
  queue: Slots<OwnLane> | null;
  /** Its place in `queue`. */
  queuePlace: number;
}

interface OwnSlot extends TakenSlot {
  readonly lane: OwnLane;
  readonly seq: number;
  readonly beganAtMs: number;
  isSlow: boolean;
  /** Its place in `notYetSlow`, until it is slow. */
  place: number;
}

/**
 * Keeps all lanes in memory. A lane that is not there, for instance after a restart, starts with what `historyOf` tells:
 * when all webhooks started as new, those that had succeeded before waited 9 s behind those that hang. Arguments such as
 * `nowMs` are wall-clock times.
 */
export function createLanes(
  effects: Pick<Effects, 'monotonicMs'>,
  historyOf: (webhookId: WebhookId) => WebhookHistory,
  limits: LaneLimits = LANE_LIMITS,
): Lanes {
  const lanes = new Map<WebhookId, OwnLane>();
  /** The lanes that have something due: those that had nothing due before, and those with a backlog. See `turns`. */
  const fresh = perStanding(() => createKeyedSlots(({ key }: OwnLane) => key));
  const behind = perStanding(() => createKeyedSlots(({ key }: OwnLane) => key));
  const all = createSharedPlaces(limits.total);
  const unproven = createSharedPlaces(limits.unproven, all);
  /** The slots that lanes of each standing share. */
  const slotsOf: Record<Standing, SharedPlaces> = {
    proven: all,
    new: createSharedPlaces(limits.new, unproven),
    slow: createSharedPlaces(limits.share, all),
    failing: createSharedPlaces(limits.share, unproven),
  };
  /** The lanes whose next attempt lies in the future. */
  const sleeping = createSlots<OwnLane>();
  /** When the first of them may have to be woken. */
  let earliestMs = Number.POSITIVE_INFINITY;
  /** With the slots of turns that no attempt uses yet. */
  let totalUnderWay = 0;
  /** How often there were turns. */
  let turnsTaken = 0;
  const probes = createProbes(effects);
  /** Slots whose attempts have not taken SLOW_AFTER_MS yet, the oldest first. */
  const notYetSlow = createSlots<OwnSlot>();

  return {
    schedule,
    replace,
    turns,
    begin: (lane, seq, nowMs) => begin(lane as OwnLane, seq, nowMs),
    end: (slot, how, nowMs) => end(slot as OwnSlot, how, nowMs),
    recorded: (slot, nowMs) => recorded(slot as OwnSlot, nowMs),
    finishTurn: (lane, nextAtMs, nowMs) => finishTurn(lane as OwnLane, nextAtMs, nowMs),
    nextTurnAtMs,
  };

  function schedule(webhookId: WebhookId, atMs: number, nowMs: number): void {
    const lane = laneOf(webhookId);
    if (lane.dueAtMs <= atMs) return;
    lane.dueAtMs = atMs;
    requeue(lane, nowMs, fresh);
  }

  function replace(pending: readonly PendingWebhook[], nowMs: number): void {
    earliestMs = Number.POSITIVE_INFINITY;
    for (const lane of lanes.values()) {
      lane.dueAtMs = Number.POSITIVE_INFINITY;
      lane.ahead.length = 0;
      // If the clock was set back, this may be far ahead.
      lane.notBeforeMs = Math.min(lane.notBeforeMs, nowMs + gapMs(lane, nowMs));
      // Of a turn that was lost as its claim failed.
      giveBack(lane);
    }
    for (const webhook of pending) {
      const lane = laneOf(webhook.webhook_id, () => webhook);
      lane.dueAtMs = webhook.next_attempt_at;
      // The webhook was enabled again, or has a new URL.
      if (webhook.failing_since === null && lane.underWay.length === 0) resetFailures(lane);
    }
    for (const lane of lanes.values()) {
      requeue(lane, nowMs, behind);
      const isIdle = lane.queue === null && lane.underWay.length === 0;
      if (isIdle && effects.monotonicMs() - lane.usedAtMs > FORGOTTEN_AFTER_MS) lanes.delete(lane.webhookId);
    }
  }

  function turns(nowMs: number, freshMax: number, behindMax: number): Turn[] {
    wakeSleeping(nowMs);
    noticeSlow();
    const turns: Turn[] = [];
    const order = ORDERS[turnsTaken % ORDERS.length] ?? [];
    for (const { ready, slotsMax } of [
      { ready: fresh, slotsMax: freshMax },
      { ready: behind, slotsMax: behindMax },
    ]) {
      let left = Math.min(slotsMax, UNRECORDED_TOTAL_MAX - totalUnderWay);
      for (const standing of order) {
        let free = Math.min(left, freeSlotsFor(standing));
        const each = Math.max(1, Math.floor(free / ready[standing].size));
        for (const lane of ready[standing]) {
          if (free <= 0) break;
          const slots = Math.min(
            free,
            each,
            slotsFor(lane, limits.total - all.free()),
            slotsOf[standing].freeTo(lane.key),
          );
          if (slots <= 0) continue;
          leaveQueue(lane);
          turns.push({ lane, slots });
          free -= slots;
          left -= slots;
          hold(lane, slots);
          lane.unusedSlots += slots;
          totalUnderWay += slots;
        }
      }
    }
    if (turns.length > 0) turnsTaken += 1;
    return turns;
  }

  function begin(lane: OwnLane, seq: number, nowMs: number): TakenSlot {
    const slot: OwnSlot = { lane, seq, beganAtMs: effects.monotonicMs(), isSlow: false, place: 0 };
    slot.place = notYetSlow.put(slot);
    lane.underWay.push(seq);
    lane.usedAtMs = slot.beganAtMs;
    lane.unusedSlots -= 1;
    lane.notBeforeMs = nowMs + gapMs(lane, nowMs); // has an effect only once it is failing
    if (lane.standing === 'failing') probes.take();
    return slot;
  }

  function recorded({ lane, seq }: OwnSlot, nowMs: number): void {
    const last = lane.underWay.pop();
    if (last !== undefined && last !== seq) lane.underWay[lane.underWay.indexOf(seq)] = last;
    totalUnderWay -= 1;
    requeue(lane, nowMs, behind);
  }

  function finishTurn(lane: OwnLane, nextAtMs: number | null, nowMs: number): void {
    giveBack(lane);
    lane.dueAtMs = nextAtMs ?? Number.POSITIVE_INFINITY;
    requeue(lane, nowMs, behind);
  }

  function resetFailures(lane: OwnLane): void {
    lane.failures = 0;
    updateStanding(lane);
  }

  function end(slot: OwnSlot, how: SlotEnd, nowMs: number): void {
    const { lane } = slot;
    noticeSlow();
    if (slot.isSlow) lane.slowSlots -= 1;
    else notYetSlow.take(slot.place);
    hold(lane, -1);
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
    updateStanding(lane);
    requeue(lane, nowMs, behind);
  }

  function nextTurnAtMs(nowMs: number): number | null {
    const atMs = isProbeReady() ? Math.min(earliestMs, nowMs + PROBES_GAP_MS) : earliestMs;
    return atMs === Number.POSITIVE_INFINITY ? null : atMs;
  }

  /** Whether a failing lane waits for nothing but the token bucket. */
  function isProbeReady(): boolean {
    if (slotsOf.failing.free() <= 0) return false;
    for (const lane of behind.failing) if (slotsOf.failing.freeTo(lane.key) > 0) return true;
    return false;
  }

  /** How many more attempts all lanes of this standing may begin. */
  function freeSlotsFor(standing: Standing): number {
    const free = slotsOf[standing].free();
    return standing === 'failing' ? Math.min(free, probes.free()) : free;
  }

  function hold(lane: OwnLane, slots: number): void {
    lane.slots += slots;
    slotsOf[lane.standing].take(lane.key, slots);
  }

  function giveBack(lane: OwnLane): void {
    hold(lane, -lane.unusedSlots);
    totalUnderWay -= lane.unusedSlots;
    lane.unusedSlots = 0;
  }

  /** Counts the attempts that have become slow, each of which makes its webhook slow before it ends. */
  function noticeSlow(): void {
    const slowSinceMs = effects.monotonicMs() - SLOW_AFTER_MS;
    for (const slot of notYetSlow) {
      if (slot.beganAtMs > slowSinceMs) return;
      notYetSlow.take(slot.place);
      slot.isSlow = true;
      slot.lane.slowSlots += 1;
      updateStanding(slot.lane);
    }
  }

  function updateStanding(lane: OwnLane): void {
    const standing = standingOf(lane);
    if (standing === lane.standing) return;
    const { slots } = lane;
    hold(lane, -slots);
    const wasReady = isReady(lane);
    lane.standing = standing;
    hold(lane, slots);
    if (wasReady) enterQueue(lane, behind[standing]);
  }

  /** Puts a lane into the queue that its state calls for. One that is ready already keeps its place in the queue. */
  function requeue(lane: OwnLane, nowMs: number, ready: Record<Standing, Slots<OwnLane>>): void {
    const wakeAtMs = wakeAt(lane);
    if (wakeAtMs === Number.POSITIVE_INFINITY) {
      leaveQueue(lane);
    } else if (wakeAtMs > nowMs) {
      earliestMs = Math.min(earliestMs, wakeAtMs);
      enterQueue(lane, sleeping);
    } else if (slotsFor(lane, 0) <= 0) {
      leaveQueue(lane); // until one of its attempts ends or is recorded
    } else if (!isReady(lane)) {
      // Failing lanes wake again and again: as `fresh` they would overtake those that wait.
      enterQueue(lane, (lane.standing === 'failing' ? behind : ready)[lane.standing]);
    }
  }

  function wakeSleeping(nowMs: number): void {
    if (nowMs < earliestMs) return;
    earliestMs = Number.POSITIVE_INFINITY;
    for (const lane of sleeping) requeue(lane, nowMs, fresh);
  }

  function wakeAt(lane: OwnLane): number {
    return lane.standing === 'failing' ? Math.max(lane.dueAtMs, lane.notBeforeMs) : lane.dueAtMs;
  }

  /** How many more slots this lane may take, if all lanes together use `taken`. */
  function slotsFor(lane: OwnLane, taken: number): number {
    const most = lane.standing === 'proven' || lane.standing === 'slow' ? limits.perWebhook : 1;
    const own = Math.min(most - lane.slots, UNRECORDED_MAX - lane.underWay.length);
    // The last quarter is only for lanes without a slot: if quick receivers all begin to hang at once, none of them
    // takes more than one slot of it.
    return taken < limits.total - limits.share ? own : Math.min(own, 1 - lane.slots);
  }

  function isReady({ queue, standing }: OwnLane): boolean {
    return queue === fresh[standing] || queue === behind[standing];
  }

  function enterQueue(lane: OwnLane, queue: Slots<OwnLane>): void {
    if (lane.queue === queue) return;
    leaveQueue(lane);
    lane.queue = queue;
    lane.queuePlace = queue.put(lane);
  }

  function leaveQueue(lane: OwnLane): void {
    lane.queue?.take(lane.queuePlace);
    lane.queue = null;
  }

  function laneOf(webhookId: WebhookId, history = historyOf): OwnLane {
    const known = lanes.get(webhookId);
    if (known !== undefined) return known;
    const lane = newLane(webhookId, history(webhookId), effects.monotonicMs());
    lanes.set(webhookId, lane);
    return lane;
  }
}

function gapMs({ failures, failingSinceMs }: OwnLane, nowMs: number): number {
  return probeGapMs(failures === 0 ? 0 : nowMs - failingSinceMs);
}

function standingOf(lane: OwnLane): Standing {
  if (lane.failures >= (lane.hasSucceeded ? FAILING_AFTER : 1)) return 'failing';
  // Comes before `slow`, so that new webhooks that hang stay within the share of `new`.
  if (!lane.hasSucceeded) return 'new';
  return lane.lastWasSlow || lane.slowSlots > 0 ? 'slow' : 'proven';
}

function newLane(
  webhookId: WebhookId,
  { key_id, failing_since, last_success_at }: WebhookHistory,
  usedAtMs: number,
): OwnLane {
  const lane: OwnLane = {
    webhookId,
    key: key_id,
    underWay: [],
    ahead: [],
    standing: 'new',
    slots: 0,
    unusedSlots: 0,
    slowSlots: 0,
    lastWasSlow: false,
    hasSucceeded: last_success_at !== null,
    failures: failing_since === null ? 0 : FAILING_AFTER,
    failingSinceMs: failing_since ?? 0,
    dueAtMs: Number.POSITIVE_INFINITY,
    notBeforeMs: 0,
    usedAtMs,
    queue: null,
    queuePlace: 0,
  };
  lane.standing = standingOf(lane);
  return lane;
}

function perStanding<Value>(make: () => Value): Record<Standing, Value> {
  return { proven: make(), new: make(), slow: make(), failing: make() };
}
